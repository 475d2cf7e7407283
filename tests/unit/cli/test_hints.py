"""Tests of errors on the command line: options, suggestions, and a stopped private broker."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from delaylevel.cli.failures import unreachable_hint, with_options
from delaylevel.cli.main import cli
from delaylevel.errors import DelayLevelError, InvalidInputError
from delaylevel.model.strategy import PartitionStrategy


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["horizn", "orders"], "Did you mean 'horizon'?"),
        (["pending", "lst", "orders"], "Did you mean 'list'?"),
        (["xyzzy"], "No such command 'xyzzy'."),
    ],
)
def test_commands_that_are_spelled_alike_are_suggested(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(cli, arguments)
    assert (result.exit_code, words in result.output) == (2, True), result.output


def test_errors_name_options() -> None:
    with pytest.raises(DelayLevelError) as refused:
        PartitionStrategy(maximum_delay=timedelta(hours=1))
    text = with_options(refused.value)
    assert "a --max-delay of 1h" in text
    assert "take a finer --unit" in text
    # Names of topics and values stay.
    same = "topic 'deliver_at' and public/default/deliver_at do not exist; the attribute is new"
    assert with_options(InvalidInputError(same)) == same


def stopped_broker(folder: Path, name: str, port: int) -> None:
    """Write the state of a private broker whose process has ended."""
    directory = folder / "delaylevel" / "brokers" / name
    directory.mkdir(parents=True)
    state: dict[str, Any] = {
        "pid": os.getpid(),  # it lives, but is no broker
        "service_port": port,
        "web_port": port + 1,
        "functions": False,
        "conf": {},
        "heap_mb": 400,
        "started_ms": 1,
    }
    (directory / "instance.json").write_text(json.dumps(state), encoding="utf-8")


def test_private_broker_that_is_stopped_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DELAYLEVEL_SERVICE_URL", "DELAYLEVEL_ADMIN_URL", "DELAYLEVEL_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert "starts a private broker on this machine" in unreachable_hint({})
    stopped_broker(tmp_path, "second", 34001)
    assert "The private broker 'second' on this machine is stopped" in unreachable_hint({})
    assert "`delaylevel broker start --name second`" in unreachable_hint({})
    stopped_broker(tmp_path, "default", 34003)
    assert "`delaylevel broker start` starts it, with its data" in unreachable_hint({})
    # The address of another cluster is given: the private broker does not matter.
    elsewhere = {"service_url": "pulsar://broker.example:6650"}
    assert "is stopped" not in unreachable_hint(elsewhere)
    assert "'second'" in unreachable_hint({"service_url": "pulsar://127.0.0.1:34001"})
