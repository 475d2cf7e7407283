"""Commands of ``delaylevel pending`` and ``horizon`` on messages in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from delaylevel.cli import horizon, pending
from delaylevel.cli.main import cli
from delaylevel.cli.options import Settings
from delaylevel.inspection import Inspector
from delaylevel.testing import MemoryPulsar


def inspector(memory: MemoryPulsar, topic: str, slack_ms: int = 0, **options: Any) -> Inspector:
    """Return an inspector of a Pulsar, whose clocks agree."""
    return Inspector(memory.client(), memory.admin, topic, clock=memory.clock, **options)


def pending_commands(
    monkeypatch: pytest.MonkeyPatch, memory: MemoryPulsar, group: str = "pending"
) -> Callable[..., Result]:
    """Return ``run("list", "orders", …)``, which runs ``delaylevel pending`` on a Pulsar."""
    monkeypatch.setattr(
        Settings, "inspector", lambda _, topic, **options: inspector(memory, topic, **options)
    )
    # The in-memory Pulsar moves and releases messages itself.
    for module in (horizon, pending):
        monkeypatch.setattr(module, "note_undelivered", lambda *_: None)
    monkeypatch.setattr(Settings, "producer_client", lambda self: memory.client())

    def invoke(*arguments: str) -> Result:
        result = CliRunner().invoke(cli, [group, *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), (
            result.exception
        )
        return result

    return invoke
