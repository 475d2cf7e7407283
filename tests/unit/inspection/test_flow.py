"""Tests of the flow of messages through a level topic, its views, and the command ``top``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from click.testing import CliRunner

from delaylevel.cli import top as command
from delaylevel.cli.main import cli
from delaylevel.cli.top import flow_view
from delaylevel.inspection import Inspector
from delaylevel.inspection.flow import Flow, Stage, quantile, rates
from delaylevel.model.level_topic import Role
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar
from support.fakes import days_and_hours

NOW = 1_800_000_000_000
LEVELS = days_and_hours()


@contextmanager
def filled(**options: Any) -> Iterator[tuple[MemoryPulsar, Inspector, Any]]:
    with MemoryPulsar() as memory:
        client = memory.client()
        client.subscribe("orders", "app")
        producer = client.create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=LEVELS, **options
        )
        look = Inspector(memory.client(), memory.admin, "orders", clock=memory.clock)
        yield memory, look, producer


def stages(flow: Flow) -> dict[str, Stage]:
    return {stage.name: stage for stage in flow.stages}


@pytest.mark.parametrize("final_window", ["broker", "tracker"])
def test_every_stage_has_its_rates(final_window: str) -> None:
    with filled(final_window=final_window) as (memory, look, producer):
        before = look.flow()
        for hours in (30, 50, 3):
            producer.send(b"", deliver_after=timedelta(hours=hours))
        memory.clock.advance(timedelta(seconds=10))
        now = look.flow()
        found = stages(now)
        topic = TopicName.parse("orders").full
        others = ["outcomes"] if final_window == "tracker" else []
        assert list(found) == ["DAY", "HOUR", "window", topic, "held", "dead-letter", *others]
        assert (found["DAY"].pending_entries, found["HOUR"].pending_entries) == (2, 1)
        assert found["DAY"].behind_ms is None
        day_lead = 600_000
        assert found["DAY"].next_hand_off_ms == before.now_ms + 24 * 3_600_000 - day_lead
        assert found["DAY"].unattended == 29
        assert found["DAY"].alive == ()
        assert found["window"].estimate == (final_window == "broker")
        change = rates(before, now)
        assert change["DAY"].messages_in == pytest.approx(0.2)
        assert change["HOUR"].pending == pytest.approx(0.1)
        assert change[topic].pending is None
        # No mover runs, so the next snapshot shows overdue hand-offs.
        memory.clock.advance(timedelta(days=2))
        assert stages(look.flow())["HOUR"].behind_ms is not None


def test_lateness_comes_from_the_last_messages() -> None:
    with filled() as (memory, look, producer):
        assert look.flow().late_ms == ()
        for _ in range(30):
            producer.send(b"", deliver_after=timedelta(hours=2))
        memory.advance(timedelta(hours=3))
        assert look.flow().late_ms == (0,) * 20
        producer.send(b"", deliver_at=memory.clock.now_ms() - 5000)
        assert quantile(look.flow().late_ms, 1.0) == 5000


def stage(name: str, role: Role | None, **values: Any) -> Stage:
    return replace(Stage(name, role, 10_000_000, False, 0, None, None, None, (), 0), **values)


def flow(at_ms: int, messages: int) -> Flow:
    target = "persistent://public/default/orders"
    level = stage(
        "DAY",
        Role.LEVEL,
        messages_in=messages * 3,
        behind_ms=65_000,
        next_hand_off_ms=at_ms + 180_000,
        alive=("delaylevel-sync-host-1",),
        unattended=2,
    )
    return Flow(
        f"{target}-delay-level",
        at_ms,
        (
            level,
            stage("window", Role.WINDOW, alive=("host:1:a",), messages_in=messages),
            stage(target, None, pending_entries=None, messages_in=messages, messages_out=messages),
            stage("held", Role.HELD, pending_entries=0),
        ),
        4,
        (0, 12, 90),
    )


def test_the_keys_of_json_are_fixed() -> None:
    view = json.loads(json.dumps(flow_view(flow(NOW, 0), flow(NOW + 2000, 500))))
    assert list(view) == [
        "topic",
        "now_ms",
        "producers",
        "movers",
        "dispatchers",
        "late_p50_ms",
        "late_max_ms",
        "stages",
        "paused",
    ]
    assert view["stages"][0] == {
        "stage": "DAY",
        "role": "level",
        "pending_entries": 10_000_000,
        "estimate": False,
        "in_per_second": 750.0,
        "out_per_second": None,
        "pending_per_second": 0.0,
        "behind_ms": 65_000,
        "next_hand_off_ms": NOW + 182_000,
        "alive": ["delaylevel-sync-host-1"],
        "unattended": 2,
    }


def test_top_shows_the_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    with filled() as (memory, look, producer):

        @contextmanager
        def connect(settings: Any, topic: str) -> Iterator[Inspector]:
            assert topic == "orders"
            yield look

        waited: list[float] = []

        def wait(seconds: float) -> None:
            waited.append(seconds)
            producer.send(b"", deliver_after=timedelta(days=3))
            memory.clock.advance(timedelta(seconds=seconds))

        monkeypatch.setattr(command, "inspector", connect)
        monkeypatch.setattr(command, "sleep", wait)
        runner = CliRunner()
        shown = runner.invoke(cli, ["top", "orders"])
        assert shown.exit_code == 0, shown.output
        assert "orders-delay-level at " in shown.stdout
        assert "\x1b" not in shown.stdout, "there are no screen codes without a terminal"
        assert waited == [2.0]
        lines = runner.invoke(cli, ["top", "orders", "--refreshes", "3", "-o", "jsonl"]).stdout
        views = [json.loads(line) for line in lines.splitlines()]
        assert [view["stages"][0]["pending_entries"] for view in views] == [2, 3, 4]
        assert [view["stages"][0]["in_per_second"] for view in views] == [0.5] * 3
        one = json.loads(runner.invoke(cli, ["top", "orders", "-o", "json"]).stdout)
        assert one["stages"][0]["in_per_second"] == 0.5

        def interrupted(seconds: float) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(command, "sleep", interrupted)
        assert runner.invoke(cli, ["top", "orders"]).exit_code == 0
        assert runner.invoke(cli, ["top"]).exit_code == 2
        assert runner.invoke(cli, ["top", "orders", "--every", "often"]).exit_code == 2
