"""Tests of the status of a level topic, and of the movers and dispatchers that it lacks."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from delaylevel.cluster.port import ClientStats, PartitionStats, SubscriptionStats
from delaylevel.cluster.rules import Problem
from delaylevel.errors import (
    BrokerUnreachableError,
    DelayLevelError,
    LevelTopicError,
    NotFoundError,
    PermissionDeniedError,
)
from delaylevel.model.level_topic import (
    FinalWindow,
    LevelTopicDescription,
    Mover,
    Pauses,
    Role,
    Spread,
)
from delaylevel.model.position import Position
from delaylevel.model.strategy import PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar
from delaylevel.topics import lifecycle
from delaylevel.topics.hosts import missing_hosts, summary
from delaylevel.topics.status import (
    LevelTopicStatus,
    PartitionStatus,
    StatusCache,
    backlog_series,
    foreign_subscriptions,
    status,
    topic_problems,
    window_stats,
)
from support.fakes import describe

NOW_MS = 1_800_000_000_000
HOUR_MS = 3_600_000
LEVEL_TOPIC = describe().topic
NEAR_DUE_MS = describe().levels[-1].near_due_ms
IDLE = SubscriptionStats(0)
RUNNING = SubscriptionStats(0, consumers=(ClientStats("host-1"),), type="Exclusive")
FUNCTION: dict[str, Any] = {"mover": Mover.FUNCTION}
PAUSED: dict[str, Any] = {"pauses": Pauses((("*", NOW_MS - HOUR_MS),))}


class Reported:
    """An admin interface that reports the same subscription for all partitions of a kind.

    It reports what a broker was seen to report: a mover that was connected leaves the type of its
    subscription behind, and one that moved messages the time; both until the broker opens the topic
    again. The acknowledged position stays.
    """

    def __init__(
        self, levels: SubscriptionStats, window: SubscriptionStats, acknowledged: int = -1
    ) -> None:
        self.levels, self.window, self.acknowledged = levels, window, acknowledged

    def partitioned_stats(self, topic: Any) -> dict[int, PartitionStats]:
        found = self.window if topic.local.endswith("-window") else self.levels
        return {index: PartitionStats(100, {"delaylevel": found}) for index in range(40)}

    def mark_delete_position(self, partition: Any, subscription: str) -> Position:
        return Position(7, self.acknowledged, -1)


def spread(length_ms: int) -> dict[str, Any]:
    """Return a pause that ended half an hour ago, and the time over which messages are released."""
    return {"pauses": Pauses((), (("*", Spread(NOW_MS - HOUR_MS // 2, length_ms)),))}


def waiting(since_ms: int, of: SubscriptionStats = RUNNING, **changes: Any) -> SubscriptionStats:
    """Return the statistics of a running process, or another, with a message of that age."""
    return replace(of, backlog_entries=1, oldest_publish_ms=NOW_MS - since_ms, **changes)


DEPLOY = f"is running for orders: `delaylevel mover deploy {LEVEL_TOPIC}`"
SEPARATE = f"is running for orders: `delaylevel dispatcher run {LEVEL_TOPIC}`"
OVERDUE = (
    "host-1 is connected, and a message has been in the window for 2h05m: "
    "`delaylevel pending list orders`"
)
# A mover was connected, and moved nothing.
GONE = replace(IDLE, type="Exclusive")


@pytest.mark.parametrize(
    ("levels", "window", "changes", "lines"),
    [
        (RUNNING, RUNNING, {}, ()),
        (IDLE, IDLE, {}, "no mover and no dispatcher is running for orders: `delaylevel run o"),
        (RUNNING, IDLE, {}, "no dispatcher is running for orders: `delaylevel run orders`"),
        (IDLE, RUNNING, {}, "no mover is running for orders: `delaylevel run orders`"),
        (IDLE, IDLE, FUNCTION, (f"no mover {DEPLOY}", f"no dispatcher {SEPARATE}")),
        (RUNNING, IDLE, {"final_window": FinalWindow.BROKER}, ()),
        # -- movers that run at intervals
        (GONE, RUNNING, {}, ()),
        (replace(IDLE, acknowledged_ms=NOW_MS - 60_000), RUNNING, {}, ()),
        (waiting(HOUR_MS // 12, GONE), RUNNING, {}, ()),
        (
            waiting(3 * HOUR_MS, GONE, acknowledged_ms=NOW_MS - 3 * HOUR_MS // 2),
            RUNNING,
            {},
            "no mover is running for orders, and hand-offs are overdue by 2h05m: `delaylevel run o",
        ),
        # -- stale ones. The finest level's first partition hands off after an hour; the lead is
        # five minutes.
        (waiting(3 * HOUR_MS), RUNNING, {}, "host-1 is connected, and hand-offs are overdue by 2h"),
        (waiting(3 * HOUR_MS), IDLE, {}, ("the mover of orders", "no dispatcher is running")),
        (RUNNING, waiting(NEAR_DUE_MS + 30_000), {}, ()),
        (RUNNING, waiting(NEAR_DUE_MS + HOUR_MS), {}, OVERDUE),
        (RUNNING, waiting(100 * HOUR_MS), PAUSED, ()),
        (RUNNING, waiting(100 * HOUR_MS), spread(HOUR_MS), ()),
        # The end of an earlier pause stays in the description, and excuses nothing.
        (RUNNING, waiting(100 * HOUR_MS), spread(1_000), "host-1 is connected, and a message"),
    ],
)
def test_a_line_for_each_missing_or_stale_host_names_the_command(
    levels: SubscriptionStats, window: SubscriptionStats, changes: dict[str, Any], lines: Any
) -> None:
    admin: Any = Reported(levels, window)
    described = replace(describe(), **changes)
    at = status(admin, described, NOW_MS, as_described=False)
    missing = missing_hosts(admin, at, "orders")
    found, lines = summary(missing, "orders"), [lines] if isinstance(lines, str) else lines
    assert len(found) == len(lines)
    assert all(words in line for words, line in zip(lines, found, strict=True))


def test_a_mover_counts_that_had_the_topic_before_the_broker_opened_it_again() -> None:
    admin: Any = Reported(IDLE, RUNNING, acknowledged=12)
    at = status(admin, describe(), NOW_MS, as_described=False)
    assert missing_hosts(admin, at, "orders") == []


def test_what_doctor_has_opened_is_no_trace_of_a_mover() -> None:
    admin: Any = Reported(IDLE, RUNNING)
    at = status(admin, describe(), NOW_MS, as_described=False)
    first = replace(at.everything[0], stats=PartitionStats(100, {"delaylevel": GONE}))
    at = replace(at, everything=(first, *at.everything[1:]))
    (missing,) = missing_hosts(admin, at, "orders")
    assert missing.says.startswith("no mover")


def test_the_remedies_of_problems_name_the_level_topic_also_in_another_namespace() -> None:
    described = describe(topic="persistent://a/b/_orders-delay-level")
    admin: Any = Reported(waiting(100 * HOUR_MS, IDLE), IDLE)
    found = topic_problems(status(admin, described, NOW_MS))
    commands = [command for line in found for command in re.findall("`([^`]+)`", line.remedy)]
    assert len(commands) == len(found) == 4
    for command in commands:
        names = [word for word in shlex.split(command) if "delay-level" in word]
        assert [TopicName.parse(name) for name in names] == [described.name], command


def everything(admin: Any, description: LevelTopicDescription) -> LevelTopicStatus:
    return status(admin, description, 0, as_described=False)


DAYS = PartitionStrategy(maximum_delay=timedelta(days=4))
HOURS = PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(days=1))


@pytest.fixture
def parked(memory_pulsar: MemoryPulsar) -> LevelTopicDescription:
    """Create a level topic with two entries by day, one by hour, and one in the window."""
    client = memory_pulsar.client()
    producer = client.create_producer(
        "orders", enable_delay_level_topic=True, partition_strategy=[DAYS, HOURS]
    )
    for hours in (30, 50, 3):
        producer.send(b"", deliver_after=timedelta(hours=hours))
    description = producer.description
    assert description is not None
    producer.close()
    window = client.create_producer(description.window_topic.partition(2).full)
    window.send(b"")
    window.close()
    return description


def test_status_and_metrics_agree(
    memory_pulsar: MemoryPulsar, parked: LevelTopicDescription
) -> None:
    memory_pulsar.clock.advance(timedelta(hours=26))
    now_ms = memory_pulsar.clock.now_ms()
    at = status(memory_pulsar.admin, parked, now_ms)
    assert at.late
    assert at.behind_ms > 20 * HOUR_MS
    families = backlog_series("mover", {parked.topic: at})
    values = {each.name: [sample.value for sample in each.samples] for each in families}
    assert values == {
        "delaylevel_mover_broker_answers": [1],
        "delaylevel_mover_lag_seconds": [at.behind_ms / 1000],
        "delaylevel_mover_held_entries": [0],
        "delaylevel_mover_dead_letter_entries": [0],
        "delaylevel_mover_parked_entries": [2, 1],
        "delaylevel_mover_window_entries": [at.tracked_entries(Role.WINDOW)],
    }


def test_a_level_topic_without_statistics_hides_no_other() -> None:
    named = [describe(topic=f"{name}-delay-level") for name in "abc"]
    requests = list[str]()

    def series(error: DelayLevelError) -> dict[str, list[str]]:
        requests.clear()

        def read(description: LevelTopicDescription) -> LevelTopicStatus:
            requests.append(description.topic)
            if description is named[1]:
                raise error
            return LevelTopicStatus(description, 0, ())

        families = backlog_series("mover", StatusCache(read).read_all(named))
        values = {each.name: each.samples for each in families}
        (answers,) = values["delaylevel_mover_broker_answers"]
        assert answers.value == 0
        return [sample.labels["level_topic"] for sample in values["delaylevel_mover_lag_seconds"]]

    a, b, c = (each.topic for each in named)
    assert series(PermissionDeniedError("no", status=403)) == [a, c]
    assert series(BrokerUnreachableError("away", address="broker-2:8080")) == [a, c]
    assert series(BrokerUnreachableError("away")) == [a]
    assert requests == [a, b], "it waits for silent brokers once"


def test_a_missing_topic_has_partitions_without_statistics(
    memory_pulsar: MemoryPulsar, parked: LevelTopicDescription
) -> None:
    for topic in (parked.journal_topic, parked.window_topic):
        memory_pulsar.admin.delete(topic)
    stats = everything(memory_pulsar.admin, parked)
    found = {(row.stats, row.backlog_entries, row.consumers) for row in stats.rows(Role.WINDOW)}
    assert found == {(None, 0, ())}
    assert len(status(memory_pulsar.admin, parked, 0).problems) == 2 * parked.window_partitions
    assert lifecycle.pending_entries(memory_pulsar.admin, parked).total() == 3
    with pytest.raises(NotFoundError):
        window_stats(memory_pulsar.admin, parked)


def test_only_status_requests_partitions_missing_in_the_bulk_answer(
    memory_pulsar: MemoryPulsar, parked: LevelTopicDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, admin, asked = parked.level_topic(0), memory_pulsar.admin, list[TopicName]()
    together, alone = admin.partitioned_stats, admin.partition_stats

    def most(topic: TopicName) -> dict[int, PartitionStats]:
        lacking = {1, 2} if topic == name else ()
        return {index: each for index, each in together(topic).items() if index not in lacking}

    def one(topic: TopicName) -> PartitionStats:
        asked.append(topic)
        return alone(topic)

    monkeypatch.setattr(admin, "partitioned_stats", most)
    monkeypatch.setattr(admin, "partition_stats", one)
    assert status(admin, parked, 0).entries(Role.LEVEL) == 3
    rows = everything(admin, parked).rows()
    assert asked == [name.partition(1), name.partition(2)]
    assert [row.partition for row in rows if row.stats is None] == [1, 2]
    with pytest.raises(LevelTopicError, match=f"no statistics of {name.partition(1)}: try again"):
        lifecycle.pending_entries(admin, parked)


def test_partitions_beyond_the_description_are_left_out_on_request(
    memory_pulsar: MemoryPulsar, parked: LevelTopicDescription
) -> None:
    memory_pulsar.admin.expand(parked.name, 5)
    memory_pulsar.client().create_producer(parked.name.partition(4).full).send(b"")
    assert everything(memory_pulsar.admin, parked).entries(Role.LEVEL) == 4
    described = status(memory_pulsar.admin, parked, 0)
    assert described.entries(Role.LEVEL) == 3
    assert len(described.rows(Role.LEVEL)) == sum(level.partitions for level in parked.levels)


def test_a_subscription_is_foreign_unless_it_is_ours_or_the_brokers(
    parked: LevelTopicDescription,
) -> None:
    durable, reader = SubscriptionStats(0), SubscriptionStats(0, durable=False)
    found = {
        "delaylevel": durable,
        "delaylevel-0123456789ab-reader-x": reader,
        "__compaction": durable,
        "pulsar.dedup": durable,
        "delaylevel-reports": SubscriptionStats(3, consumers=(ClientStats("c", "10.0.0.1:99"),)),
        "reader": reader,
        "reports of x": durable,
    }

    def foreign(topic: TopicName, role: Role) -> list[Problem]:
        rest = (-1, role.value, 0, 0, 0, None, None, (), PartitionStats(0, found))
        return foreign_subscriptions([PartitionStatus(topic.partition(0).full, role, *rest)])

    assert foreign(parked.outcomes_topic, Role.OUTCOMES) == [], "may follow"
    topic = parked.window_topic
    first, second, third = foreign(topic, Role.WINDOW)
    receives = "is not ours: it receives what waits there"
    assert first.says == (
        f"subscription delaylevel-reports of {topic} {receives}, and keeps them stored "
        "(consumers at 10.0.0.1:99)"
    )
    assert second.says == f"subscription reader of {topic} {receives}"
    assert "unsubscribe" not in second.remedy
    assert third.says == f"subscription reports of x of {topic} {receives}, and keeps them stored"
    assert third.remedy.endswith("--subscription 'reports of x' --force`")


def test_a_status_is_requested_again_when_it_is_old(
    parked: LevelTopicDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, requests = [50.0], list[float]()
    monkeypatch.setattr("delaylevel.topics.status.time.monotonic", lambda: now_s[0])

    def read(description: LevelTopicDescription) -> LevelTopicStatus:
        requests.append(now_s[0])
        if now_s[0] > 65:
            raise LevelTopicError("away")
        return LevelTopicStatus(description, 0, ())

    cache = StatusCache(read)
    for at_s in (50.0, 60.0, 61.0, 70.0, 72.0, 75.0):
        now_s[0] = at_s
        assert (cache.read(parked) is None) == (at_s > 71)
    assert requests == [50.0, 61.0, 72.0], "a failure counts for as long"
