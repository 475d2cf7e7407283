"""Tests of horizons: estimates, a level topic in memory, views, and the command."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel import topics
from delaylevel.cli.horizon import horizon_text
from delaylevel.cluster.port import LedgerInfo, PartitionStats
from delaylevel.errors import InvalidInputError
from delaylevel.inspection import sampling
from delaylevel.inspection.horizon import DAY, HOUR, Distribution, Stratum, build
from delaylevel.model.envelope import DUE, TARGET
from delaylevel.model.level_topic import Role
from delaylevel.model.message import ParkedMessage, RawMessage
from delaylevel.model.position import EARLIEST, Position
from delaylevel.model.topic_name import TopicName
from support.pending_commands import pending_commands

NOW = 1_800_000_000_000
Filled = Callable[..., Any]
times = st.integers(NOW - 1000, NOW + 1000)


@given(st.lists(times, max_size=20), st.integers(0, 300), times)
def test_a_sample_spreads_each_due_time_evenly(dues: list[int], spread: int, at: int) -> None:
    found = Distribution("orders")
    properties = [{DUE: str(due)} for due in dues]
    messages = [ParkedMessage(0, 0, -1, 0, "", "", 0, each, None) for each in properties]
    found.add(messages, 2.0, spread)
    # The share of (due, due + spread) that is before the time.
    parts = [min(max((at - due) / spread, 0.0), 1.0) if spread else float(due < at) for due in dues]
    assert found.before(at) == pytest.approx(2 * sum(parts), abs=1e-6)
    assert found.total == found.targets.get("orders", 0) == 2 * len(dues)
    assert found.before(NOW + 2000) == pytest.approx(found.total)
    assert found.last_due_ms == (max(dues) + spread if dues else None)


# -- a level topic in memory


@pytest.mark.parametrize("exact", [False, True])
def test_few_messages_are_counted(filled: Filled, exact: bool) -> None:
    pending, read = filled(final_window="tracker"), list[int]()
    found = pending.look(tell=read.append).horizon(exact=exact)
    now, dues = pending.now_ms, pending.dues
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
    assert sum(read) == 2 * found.looked_at


def test_forwarded_messages_are_not_counted_twice(filled: Filled) -> None:
    pending = filled(100)
    # One was delivered a second ago.
    pending.memory.advance(timedelta(milliseconds=pending.dues[60] - pending.now_ms + 1000))
    for exact in (False, True):
        found = pending.look().horizon(exact=exact)
        assert found.messages == sum(due > pending.now_ms for due in pending.dues)
        assert found.within[0].messages == 0


def test_a_horizon_can_be_limited_to_one_target(filled: Filled) -> None:
    pending = filled(50)
    client, admin = pending.memory.client(), pending.memory.admin
    client.subscribe("invoices", "app")
    known = topics.describe(admin, "orders")
    topics.create(admin, replace(known, targets=(*known.targets, "invoices")))
    options = {"enable_delay_level_topic": True, "delay_level_topic": "_orders-delay-level"}
    client.create_producer("invoices", **options).send(b"", deliver_after=timedelta(days=5))
    assert sorted(pending.look().horizon().targets.values()) == [1, 50]
    for exact in (False, True):
        one = pending.look(target="invoices").horizon(exact=exact)
        assert (one.messages, one.target) == (1, TopicName.parse("invoices").full)
    with pytest.raises(InvalidInputError, match="carries no messages for"):
        pending.look(target="nobody")


# -- views


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("messages", [7, 10_000_000])
def test_five_levels_and_long_names_fit_80_columns(messages: int, exact: bool) -> None:
    parts = ["YEAR", "MONTH", "DAY", "HOUR", "MINUTE", "window", "held"]
    found_in = {part: Distribution() for part in parts[:2]}
    for part in parts[2:]:
        found_in[part] = Distribution(strata=[Stratum([NOW + DAY], messages)])
    found_in[parts[0]].targets = {
        f"persistent://public/default/{'t' * 99}{n}": messages for n in range(2)
    }
    found = build(
        "persistent://public/default/" + "orders" * 9,
        NOW,
        found_in,
        exact=exact,
    )
    lines = horizon_text(found, 80).splitlines()
    assert max(map(len, lines)) <= 80
    (total,) = [line for line in lines if line.startswith("any time")]
    assert f"{5 * messages:,}" in total
    if messages > 1000:
        # Of parts without messages, as many are shown as fit.
        shown = [cell for cell in total.split()[4:] if cell != "-"]
        assert shown == [("" if exact else "~") + "10.0M"] * 5


# -- the command


def test_the_command_shows_the_horizon(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    pending = filled(50)
    horizon = pending_commands(monkeypatch, pending.memory, "horizon")

    def run(*arguments: str) -> str:
        result = horizon(*arguments)
        assert (result.exit_code, result.stderr) == (0, ""), result.output
        return result.stdout

    shown = run("orders")
    assert "orders-delay-level: 50 pending" in shown
    head, now = shown.split("\n\n")[2].splitlines()[:2]
    assert (head.split(), now.split()[0]) == (["DUE", "FROM", "(UTC)", "MESSAGES"], "now")
    view = json.loads(run("orders", "-o", "json"))
    assert " ".join(sorted(view)) == (
        "bucket_ms damaged exact last_due_ms looked_at messages now_ms profile target targets "
        "topic within"
    )
    assert list(view["profile"][0]) == ["from_ms", "before_ms", "messages", "parts"]
    assert view["messages"] == 50
    rows = [json.loads(line) for line in run("orders", "--exact", "-o", "jsonl").splitlines()]
    assert rows == view["within"]
    labels = ["overdue", "1 minute", "1 hour", "1 day", "1 week", "any time"]
    assert [row["within"] for row in rows] == labels
    hour = sum(due < pending.now_ms + HOUR for due in pending.dues)
    assert rows[2] == {
        "within": "1 hour",
        "within_ms": HOUR,
        "messages": hour,
        "parts": {"DAY": 0, "HOUR": 0, "window": hour, "held": 0},
        "per_second": hour / 3600,
        "exact": True,
    }
    assert rows[4]["within_ms"] == 604_800_000
    assert horizon("nobody").exit_code == 1


DUE_MS = 1_800_000_000_000
PAYLOAD = b"x" * 100
PROPERTIES = {DUE: str(DUE_MS), TARGET: "persistent://public/default/orders", "a": "b"}
# In a batch, such a message has the size of its metadata (4 bytes), that of its payload (2), a
# sequence ID (3), its properties with the headers of protobuf, and its payload.
MESSAGE_BYTES = 9 + sum(6 + len(name + value) for name, value in PROPERTIES.items()) + len(PAYLOAD)
ENTRY_BYTES = 64


def stored(entry: int, size: int) -> Any:
    """Return a message of a batch of this size."""
    return SimpleNamespace(
        message_id=lambda: size,
        publish_timestamp=lambda: DUE_MS - 86_400_000 + entry,
        properties=lambda: PROPERTIES,
        partition_key=lambda: "",
        ordering_key=lambda: "",
        event_timestamp=lambda: 0,
        data=lambda: PAYLOAD,
    )


class Partitions:
    """Snapshot of partitions with these batches, whose broker has just opened them."""

    target = None

    def __init__(self, batches: list[list[int]]) -> None:
        self._batches: Mapping[TopicName, list[int]] = {
            TopicName.parse("_orders-delay-level").partition(number): sizes
            for number, sizes in enumerate(batches)
        }
        self.ranges = [
            SimpleNamespace(
                source=SimpleNamespace(name=name, topic=name.full, role=Role.LEVEL),
                start=EARLIEST,
                end=Position(7, len(sizes)),
            )
            for name, sizes in self._batches.items()
        ]
        self.admin = SimpleNamespace(
            partitioned_stats=lambda topic: {},
            partition_stats=lambda name: PartitionStats(0, {}),
            contents=self._contents,
        )

    def _contents(self, partition: TopicName) -> tuple[list[LedgerInfo], int]:
        sizes = self._batches[partition]
        size = len(sizes) * ENTRY_BYTES + sum(sizes) * MESSAGE_BYTES
        return [LedgerInfo(7, len(sizes), size=size)], 0

    def read(
        self, item: Any, start: Position | None = None, queue: int = 0
    ) -> Iterator[RawMessage]:
        first = 0 if start is None else max(0, start.entry)
        for entry, size in enumerate(self._batches[item.source.name][first:], first):
            for index in range(size):
                yield stored(entry, size), 7, entry, index

    def select(self, source: Any, found: list[Any]) -> list[Any]:
        return found

    def cancelling(self, source: Any, found: list[Any]) -> list[Any]:
        return []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("largest", [0, 1000], ids=["random", "the first is the largest"])
def test_the_estimate_is_true_for_unequal_batches(
    seed: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker has forgotten its counters: only entries and bytes are known."""
    monkeypatch.setattr(sampling, "batch_size", lambda size: size)
    chosen = random.Random(seed)
    batches = [
        [*([largest] if largest else []), *(chosen.choice((1, 1, 1, 3, 90)) for _ in range(150))]
        for _ in range(12)
    ]
    random.seed(seed)
    found = sampling.sample(Partitions(batches))  # type: ignore[arg-type]
    assert found is not None
    total = sum(map(sum, batches))
    assert sum(one.total for one in found) == pytest.approx(total, rel=0.05)
    for one, sizes in zip(found, batches, strict=True):
        assert one.total == pytest.approx(sum(sizes), rel=0.1)
