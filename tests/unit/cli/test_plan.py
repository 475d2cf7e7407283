"""Tests of the command ``plan``."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from delaylevel.cli.main import cli

BASE = ["plan", "--rate", "2000", "--max-delay", "30d", "--size", "1KiB"]


def test_plan_shows_load_plans_and_the_command_for_the_recommended_one() -> None:
    result = json.loads(CliRunner().invoke(cli, [*BASE, "-o", "json"]).stdout)
    assert result["pending"] == 2000 * 15 * 86_400
    assert [item["recommended"] for item in result["plans"]] == [False, True, False]
    create = "--unit day --max-delay 30d --then hour:1d"
    assert result["plans"][1]["create"] == create
    table = CliRunner().invoke(cli, BASE)
    assert "PARTITIONS" in table.stdout
    assert f"`delaylevel levels create TOPIC {create}`" in table.stderr
    broker = CliRunner().invoke(cli, [*BASE, "--final-window", "broker"])
    assert "--final-window broker`" in broker.stderr
    lines = CliRunner().invoke(cli, [*BASE, "-o", "jsonl"])
    assert [json.loads(line) for line in lines.stdout.splitlines()] == result["plans"]


@pytest.mark.parametrize("wrong", [[*BASE[:-1], "big"], [*BASE, "--mean-delay", "40d"]])
def test_wrong_loads_are_refused(wrong: list[str]) -> None:
    assert CliRunner().invoke(cli, wrong).exit_code == 2
