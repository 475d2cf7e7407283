"""Tests of ``delaylevel send`` with options that contradict each other."""

from __future__ import annotations

from datetime import timedelta

import pytest
from click.testing import CliRunner

from delaylevel.cli.main import cli
from delaylevel.cli.send import parse_line


@pytest.mark.parametrize(
    "option",
    [
        ("--after", "3d"),
        ("--at", "+2h"),
        ("--expires-at", "+3h"),
        ("--expires-after", "1h"),
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


def test_a_json_line_has_an_expiry() -> None:
    line = parse_line('{"body": "a", "after": "2h", "expires_after": "90s"}', 0)
    assert line.arguments["expires_after"] == timedelta(seconds=90)
    line = parse_line('{"body": "a", "at": "+2h", "expires_at": "+3h"}', 1_800_000_000_000)
    assert line.arguments["expires_at"] == 1_800_010_800_000


def test_two_expiries_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delaylevel.cli.command.require_reachable", lambda connection: None)
    options = ["--after", "1h", "--expires-at", "+3h", "--expires-after", "1h"]
    refused = CliRunner().invoke(cli, ["send", "orders", "body", *options])
    assert refused.exit_code == 2
    assert "give --expires-after or --expires-at, not both" in refused.stderr
