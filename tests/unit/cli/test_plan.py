"""Tests of the command ``plan``."""

from __future__ import annotations

import json
from datetime import timedelta

from click.testing import CliRunner

from delaylevel.cli.main import cli
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.plan import Load

MONTH = Load(
    rate=2000, maximum_delay=timedelta(days=30), size=1024, final_window=FinalWindow.BROKER
)


def test_plan_shows_load_plans_and_figures() -> None:
    base = ["plan", "--rate", "2000", "--max-delay", "30d", "--size", "1KiB"]
    answer = CliRunner().invoke(cli, [*base, "-o", "json"])
    assert answer.exit_code == 0, answer.output
    result = json.loads(answer.stdout)
    assert result["pending"] == MONTH.pending
    assert result["plans"][0]["levels"].startswith("DAY for 30d")
    assert result["plans"][0]["rebuild_ms"] > 0
    assert result["plans"][0]["dispatchers"] == 1
    assert 0 < result["plans"][0]["dispatcher_cores"] < 1
    table = CliRunner().invoke(cli, base)
    assert table.exit_code == 0
    assert "PARTITIONS" in table.stdout
    assert "10% of all messages are due at nine o'clock; see" in table.stderr
    assert result["plans"][0]["movers"] == 1
    lines = CliRunner().invoke(cli, [*base, "-o", "jsonl"])
    assert len(lines.stdout.splitlines()) == len(result["plans"])
    assert CliRunner().invoke(cli, [*base[:-1], "big"]).exit_code == 2
    assert CliRunner().invoke(cli, [*base, "--mean-delay", "40d"]).exit_code == 2
