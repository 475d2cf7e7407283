"""Tests of single commands: what they show, and how they end."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyroaring")

from click.testing import CliRunner, Result

from delaylevel.cli import doctor
from delaylevel.cli.main import cli
from delaylevel.cli.options import Settings
from delaylevel.cluster.rest.admin import Admin
from delaylevel.demo import Demonstration
from delaylevel.doctor import Finding, Problem
from delaylevel.errors import AdminError, BrokerError, BrokerUnreachableError
from delaylevel.functions import health
from delaylevel.functions.health import InstanceStatus
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar


@pytest.mark.parametrize(
    "error",
    [
        AdminError("the bundle is loading", status=503),
        # Of several brokers, the one that has the topics of this level topic is away.
        BrokerUnreachableError("the broker at two:8080 is away", address="two:8080"),
    ],
)
def test_a_level_topic_whose_state_cannot_be_read_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, error: BrokerError
) -> None:
    with MemoryPulsar() as memory:
        for name in ("orders", "reminders"):
            memory.client().create_producer(name, enable_delay_level_topic=True)
        read = memory.admin.partitioned_stats

        def refused(topic: TopicName) -> Any:
            if "orders" in topic.full:
                raise error
            return read(topic)

        monkeypatch.setattr(memory.admin, "partitioned_stats", refused)
        monkeypatch.setattr(Admin, "from_connection", lambda _: nullcontext(memory.admin))
        result = CliRunner().invoke(cli, ["levels", "list", "-o", "json"])
    assert result.exit_code == 0, result
    orders, reminders = json.loads(result.stdout)
    assert orders["problem"] == f"its state cannot be read: {error}"
    assert reminders["targets"] == ["persistent://public/default/reminders"]


BASE = ["plan", "--rate", "2000", "--max-delay", "30d", "--size", "1KiB"]


def test_plan_shows_load_plans_and_the_command_for_the_recommended_one() -> None:
    result = json.loads(CliRunner().invoke(cli, [*BASE, "-o", "json"]).stdout)
    assert result["pending"] == 2000 * 15 * 86_400
    assert [item["recommended"] for item in result["plans"]] == [False, True, False]
    create = "delaylevel levels create TOPIC --unit day --max-delay 30d --then hour:1d"
    assert result["plans"][1]["create"] == create
    table = CliRunner().invoke(cli, BASE)
    assert "PARTITIONS" in table.stdout
    assert f"`{create}`" in table.stderr
    broker = CliRunner().invoke(cli, [*BASE, "--final-window", "broker"])
    assert "--final-window broker`" in broker.stderr
    lines = CliRunner().invoke(cli, [*BASE, "-o", "jsonl"])
    assert [json.loads(line) for line in lines.stdout.splitlines()] == result["plans"]


@pytest.mark.parametrize(
    "wrong",
    [*([*BASE[:-1], size] for size in ("big", "1,024", "-5")), [*BASE, "--mean-delay", "40d"]],
)
def test_wrong_loads_are_refused(wrong: list[str]) -> None:
    assert CliRunner().invoke(cli, wrong).exit_code == 2


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
        "warn  broker faults (_orders-delay-level)",
        "  it may lose messages",
        "  -> look",
        "-     disk (_orders-delay-level): not checked: another machine",
        "2 passed; --all shows them.",
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
    assert "No check failed." in done.stderr
    # Neither a possible problem nor an unknown one is well.
    for findings, well in (([OK], True), ([OK, WARNING], False), ([OK, SKIPPED], False)):
        assert ("All is well." in run(monkeypatch, findings).stderr) == well


@pytest.mark.parametrize(
    ("seen", "changed", "late_ms", "what"),
    [
        ([0, 1], set(), [5, 9], None),
        ([0], set(), [5], "lost"),
        ([0, 1, 1], set(), [5, 9, 9], "duplicated"),
        ([0, 1], set(), [-1, 9], "early"),
        ([0, 1], {1}, [5, 9], "changed"),
    ],
)
def test_all_is_well_only_if_every_message_came_once_unchanged_and_on_time(
    seen: list[int], changed: set[int], late_ms: list[int], what: str | None
) -> None:
    demo = Demonstration(2, changed=changed, late_ms=late_ms)
    demo.seen.update(seen)
    counts = {"lost": demo.lost, "duplicated": demo.duplicated, "early": demo.early}
    found = [name for name, count in {**counts, "changed": len(demo.changed)}.items() if count]
    assert (found, demo.ok) == ([what] if what else [], what is None)
    assert demo.late_at(1.0) == max(late_ms)


def test_the_keys_of_an_instance_are_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    described = LevelTopicDescription(
        "orders-delay-level", Levels(PartitionStrategy()), ("orders",)
    )
    at = SimpleNamespace(
        instances=(InstanceStatus(0, running=False, restarts=3),),
        running=0,
        problems=("instance 0 is down",),
    )
    monkeypatch.setattr(Settings, "level_topic", lambda *_: nullcontext((None, described)))
    monkeypatch.setattr(health, "status", lambda *_: at)
    done = CliRunner().invoke(cli, ["mover", "status", "orders", "-o", "json"])
    result = json.loads(done.stdout)
    assert (done.exit_code, result["problems"]) == (1, ["instance 0 is down"])
    keys = {"instance": 0, "running": False, "restarts": 3, "error": None, "worker": None}
    assert result["instances"] == [keys]
