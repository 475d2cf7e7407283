"""Tests of the output of ``delaylevel doctor`` for each state of a check."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from delaylevel.cli import doctor
from delaylevel.cli.main import cli
from delaylevel.doctor import Finding, Problem

TOPIC = "persistent://public/default/_orders-delay-level"
OK = Finding(note="31 partitions", check="partitions", subject=TOPIC)
RISK = Problem("it may lose messages", "look")
WARNING = Finding(warnings=(RISK,), check="broker faults", subject=TOPIC)
SKIPPED = Finding(note="another machine", skipped=True, check="disk", subject=TOPIC)
FAILED = Finding((Problem("no mover", "run one"),), check="mover", subject=TOPIC)


def run(monkeypatch: pytest.MonkeyPatch, findings: list[Finding], *options: str) -> Result:
    def examine(*_: Any, **__: Any) -> list[Finding]:
        return findings

    monkeypatch.setattr(doctor.examination, "examine", examine)
    arguments = ["--service-url", "pulsar://127.0.0.1:1", "--admin-url", "http://127.0.0.1:1"]
    return CliRunner().invoke(cli, [*arguments, "doctor", "orders", *options])


def test_failures_come_before_warnings_and_what_is_fine_is_only_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = run(monkeypatch, [OK, WARNING, OK, SKIPPED, FAILED])
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "FAIL  mover (_orders-delay-level)",
        "  no mover",
        "  -> run one",
        "",
        "warn  broker faults (_orders-delay-level)",
        "  it may lose messages",
        "  -> look",
        "",
        "-     disk (_orders-delay-level): not checked: another machine",
        "",
        "2 checks passed; --all shows them.",
    ]
    assert "1 of 5 checks failed." in done.stderr
    everything = run(monkeypatch, [OK, FAILED], "--all").stdout
    assert everything.index("-> run one") < everything.index("31 partitions")
    rows = json.loads(run(monkeypatch, [WARNING, FAILED, SKIPPED], "-o", "json").stdout)
    states = [(row["state"], row["problems"], row["warnings"]) for row in rows]
    warned = ("warning", [], ["it may lose messages"])
    assert states == [warned, ("failed", ["no mover"], []), ("skipped", [], [])]
    assert rows[2]["says"] == "not checked: another machine"


def test_a_warning_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, [OK, WARNING, SKIPPED])
    assert done.exit_code == 0, done.output
    for text in ("No check failed.", "Warnings: broker faults.", "Not checked: disk."):
        assert text in done.stderr
    # Neither a possible problem nor an unknown one is well.
    for findings, well in (([OK], True), ([OK, WARNING], False), ([OK, SKIPPED], False)):
        assert ("All is well." in run(monkeypatch, findings).stderr) == well
