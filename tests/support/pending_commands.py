"""Commands of ``delaylevel pending`` on messages in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner, Result

from delaylevel.cli import inspection as command
from delaylevel.cli import pending
from delaylevel.cli.main import cli
from delaylevel.inspection import Inspector
from delaylevel.testing import MemoryPulsar


def pending_commands(
    monkeypatch: pytest.MonkeyPatch, memory: MemoryPulsar
) -> Callable[..., Result]:
    """Return ``run("list", "orders", …)``, which runs ``delaylevel pending`` on a Pulsar."""

    @contextmanager
    def connect(
        settings: Any, topic: str, *, slack_ms: int = 0, **options: Any
    ) -> Iterator[Inspector]:
        yield Inspector(memory.client(), memory.admin, topic, clock=memory.clock, **options)

    monkeypatch.setattr(command, "inspector", connect)
    # The in-memory Pulsar moves and releases messages itself.
    monkeypatch.setattr(command, "note_undelivered", lambda *_: None)
    monkeypatch.setattr(pending, "inspector", connect)
    monkeypatch.setattr(pending, "client_of", lambda settings: memory.client())

    def invoke(*arguments: str) -> Result:
        result = CliRunner().invoke(cli, ["pending", *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), (
            result.exception
        )
        return result

    return invoke
