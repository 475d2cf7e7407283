"""Tests of horizons: estimates, a level topic in memory, views, and the command."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from delaylevel import topics
from delaylevel.cli import horizon as command
from delaylevel.cli.horizon import horizon_text, horizon_view
from delaylevel.cli.main import cli
from delaylevel.errors import InvalidInputError
from delaylevel.inspection import Horizon, Inspector, Part
from delaylevel.inspection.distribution import (
    SampledDistribution,
    Stratum,
)
from delaylevel.inspection.horizon import (
    DAY,
    HOUR,
    MINUTE,
    WEEK,
    build,
)
from delaylevel.model.level_topic import Role
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar
from support.fakes import days_and_hours

NOW = 1_800_000_000_000
LEVELS = days_and_hours()
PARTS = (Part("DAY", Role.LEVEL, 0), Part("HOUR", Role.LEVEL, 1), Part("window", Role.WINDOW))

times = st.integers(NOW - 1000, NOW + 1000)


@given(st.lists(times, max_size=20), st.integers(0, 300), times)
def test_a_stratum_spreads_each_due_time_evenly(dues: list[int], spread: int, at: int) -> None:
    stratum = Stratum(dues, 2.0, spread)
    # The share of (due, due + spread) that is before the time.
    parts = [min(max((at - due) / spread, 0.0), 1.0) if spread else float(due < at) for due in dues]
    assert stratum.before(at) == pytest.approx(2 * sum(parts), abs=1e-6)
    assert stratum.total == 2 * len(dues)
    assert stratum.before(NOW + 2000) == pytest.approx(stratum.total)
    assert stratum.last_due_ms == (max(dues) + spread if dues else None)


# -- a level topic in memory


@contextmanager
def filled(messages: int = 400, **options: Any) -> Iterator[tuple[MemoryPulsar, list[int]]]:
    """Fill a level topic over DAY and HOUR with messages due from minutes to weeks from now."""
    choose = random.Random(3)
    with MemoryPulsar() as memory:
        client = memory.client()
        client.subscribe("orders", "app")
        producer = client.create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=LEVELS, **options
        )
        dues = []
        for number in range(messages):
            delay = choose.choice([30 * MINUTE, 20 * HOUR, 3 * DAY, 20 * DAY])
            dues.append(memory.clock.now_ms() + delay + choose.randrange(10 * MINUTE))
            producer.send(b"x" * number, deliver_at=dues[-1], partition_key=f"k{number % 7}")
        yield memory, dues


def inspector(memory: MemoryPulsar, **options: Any) -> Inspector:
    return Inspector(memory.client(), memory.admin, "orders", clock=memory.clock, **options)


@pytest.mark.parametrize("exact", [False, True])
def test_small_partitions_are_counted(exact: bool) -> None:
    with filled() as (memory, dues):
        read: list[int] = []
        found = inspector(memory, tell=read.append).horizon(exact=exact)
        now = memory.clock.now_ms()
        assert found.exact
        for row in found.within:
            limit = None if row.within_ms is None else now + row.within_ms
            wanted = sum(limit is None or due < limit for due in dues)
            assert row.messages == wanted == sum(row.parts.values()), row.label
        assert found.within[-1].parts == {
            "DAY": sum(due - now >= DAY for due in dues),
            "HOUR": sum(HOUR <= due - now < DAY for due in dues),
            "window": sum(due - now < HOUR for due in dues),
            "held": 0,
        }
        assert found.last_due_ms == max(dues)
        assert sum(bucket.messages for bucket in found.profile) == len(dues)
        assert found.targets == {TopicName.parse("orders").full: len(dues)}
        # The first reading searches for cancellations.
        assert sum(read) == (2 * found.looked_at if exact else 0)


def test_forwarded_messages_are_not_counted_twice() -> None:
    with filled() as (memory, dues):
        memory.advance(timedelta(days=2, hours=23, minutes=30))
        now = memory.clock.now_ms()
        for exact in (False, True):
            found = inspector(memory).horizon(exact=exact)
            assert found.messages == sum(due > now for due in dues)
            assert found.within[0].messages == 0


def test_a_horizon_can_be_limited_to_one_target() -> None:
    with filled(100) as (memory, _):
        client = memory.client()
        client.subscribe("invoices", "app")
        known = topics.describe(memory.admin, "orders")
        targets = (*known.targets, TopicName.parse("invoices").full)
        topics.create(memory.admin, replace(known, targets=targets))
        client.create_producer(
            "invoices",
            enable_delay_level_topic=True,
            delay_level_topic="_orders-delay-level",
        ).send(b"", deliver_after=timedelta(days=5))
        both = inspector(memory).horizon()
        assert sorted(both.targets.values()) == [1, 100]
        for exact in (False, True):
            one = inspector(memory, target="invoices").horizon(exact=exact)
            assert one.messages == 1
            assert one.target == TopicName.parse("invoices").full
        with pytest.raises(InvalidInputError, match="carries no messages for"):
            inspector(memory, target="nobody")


# -- views


def horizon_of(*counts: int, weight: float = 1.0, exact: bool = True) -> Horizon:
    """Build a horizon of DAY, HOUR and the window; their messages are due every 10 minutes."""
    parts: dict[Part, SampledDistribution] = {}
    for part, messages in zip(PARTS, counts, strict=True):
        first = {"DAY": 2 * DAY, "HOUR": 2 * HOUR, "window": 0}[part.name]
        dues = [NOW + first + number * 10 * MINUTE for number in range(1, messages + 1)]
        parts[part] = SampledDistribution(
            [Stratum(dues, weight)], exact, looked_at=77 if not parts else 0
        )
    return build("persistent://public/default/orders-delay-level", NOW, parts)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("messages", [7, 10_000_000])
def test_five_levels_and_long_names_fit_80_columns(messages: int, exact: bool) -> None:
    parts = [
        *(Part(n, Role.LEVEL, i) for i, n in enumerate(("YEAR", "MONTH", "DAY", "HOUR", "MINUTE"))),
        Part("window", Role.WINDOW),
        Part("held", Role.HELD),
    ]
    found_in = {part: SampledDistribution([], exact) for part in parts[:2]}
    for part in parts[2:]:
        found_in[part] = SampledDistribution([Stratum([NOW + DAY], messages)], exact)
    found_in[parts[0]].targets = {
        f"persistent://public/default/{'t' * 99}{n}": messages for n in range(2)
    }
    found = build(
        "persistent://public/default/" + "orders" * 9,
        NOW,
        found_in,
    )
    lines = horizon_text(found, 80).splitlines()
    assert max(map(len, lines)) <= 80
    (total,) = [line for line in lines if line.startswith("any time")]
    assert f"{5 * messages:,}" in total
    if messages > 1000:
        assert total.split()[4:] == [("" if exact else "~") + "10.0M"] * 5


def test_the_keys_of_json_are_fixed() -> None:
    view = horizon_view(horizon_of(3, 2, 1))
    assert list(json.loads(json.dumps(view))) == [
        "topic",
        "target",
        "now_ms",
        "messages",
        "error",
        "exact",
        "exact_parts",
        "looked_at",
        "damaged",
        "window_by_clock",
        "last_due_ms",
        "targets",
        "within",
        "bucket_ms",
        "profile",
    ]
    assert view["within"][2] == {
        "within": "1 hour",
        "within_ms": HOUR,
        "messages": 1,
        "parts": {"DAY": 0, "HOUR": 0, "window": 1},
        "per_second": 1 / 3600,
        "exact": True,
    }
    assert list(view["profile"][0]) == ["from_ms", "before_ms", "messages", "parts"]


# -- the command


def test_the_command_shows_the_horizon(monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(50) as (memory, dues):

        @contextmanager
        def connect(settings: Any, topic: str, shown: Any, **options: Any) -> Iterator[Inspector]:
            yield Inspector(memory.client(), memory.admin, topic, clock=memory.clock, **options)

        monkeypatch.setattr(command, "inspector", connect)
        # The in-memory Pulsar moves and releases messages itself.
        monkeypatch.setattr(command, "note_delivery", lambda look, topic: None)
        runner = CliRunner()
        shown = runner.invoke(cli, ["horizon", "orders"])
        assert shown.exit_code == 0, shown.output
        assert f"orders-delay-level: {len(dues)} pending" in shown.stdout
        head, now = shown.stdout.split("\n\n")[2].splitlines()[:2]
        assert (head.split(), now.split()[0]) == (["DUE", "FROM", "(UTC)", "MESSAGES"], "now")
        assert shown.stderr == ""
        one = json.loads(runner.invoke(cli, ["horizon", "orders", "-o", "json"]).stdout)
        assert one["messages"] == len(dues)
        lines = runner.invoke(cli, ["horizon", "orders", "--exact", "-o", "jsonl"]).stdout
        assert [json.loads(line)["within"] for line in lines.splitlines()] == [
            "overdue",
            "1 minute",
            "1 hour",
            "1 day",
            "1 week",
            "any time",
        ]
        assert runner.invoke(cli, ["horizon", "nobody"]).exit_code == 1
        assert runner.invoke(cli, ["horizon"]).exit_code == 2


def test_a_week_is_seven_days_and_labels_have_weekdays() -> None:
    assert WEEK == 7 * DAY == 604_800_000
