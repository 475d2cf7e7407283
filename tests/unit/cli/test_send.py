"""Tests of ``delaylevel send`` with options that contradict each other."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from delaylevel.cli.main import cli


@pytest.mark.parametrize(
    "option",
    [
        ("--after", "3d"),
        ("--at", "+2h"),
        ("--key", "customer-7"),
        ("--ordering-key", "customer-7"),
        ("--property", "kind=reminder"),
        ("--event-time", "+1h"),
        ("--id", "invoice-117"),
    ],
)
def test_json_lines_exclude_the_options_of_a_single_message(
    option: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delaylevel.cli.command.require_reachable", lambda connection: None)
    refused = CliRunner().invoke(cli, ["send", "orders", "--jsonl", "-", *option], input="{}\n")
    assert refused.exit_code == 2
    assert "each line has its own" in refused.stderr
