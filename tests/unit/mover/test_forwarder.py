"""Tests of the forwarder with a scripted client."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.port import SchemaVersion
from delaylevel.cluster.publisher import BULK_SETTINGS, PRODUCER_SETTINGS
from delaylevel.errors import BrokerError, BrokerUnreachableError
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.envelope import (
    ATTEMPT,
    DUE,
    EXPIRES,
    ID,
    REASON,
    SCHEMA,
    SOURCE,
    TARGET,
    SchemaRef,
)
from delaylevel.model.level_topic import Expired, FinalWindow, Mover
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import SourcePartition, source_partitions
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover import forwarder as forwarder_module
from delaylevel.mover.forwarder import Forwarder
from delaylevel.testing import ManualClock
from support.fakes import FakeAdmin, FakeClient, describe

T0 = 1_800_000_000_000
DAY = 86_400_000
ORDERS = "persistent://public/default/orders"
BILLS = "persistent://public/default/bills"
LEVEL_TOPIC = "persistent://public/default/orders-delay-level"
HELD = f"{LEVEL_TOPIC}-held-partition-0"
DEAD = f"{LEVEL_TOPIC}-DLQ-partition-0"
OK = pulsar.Result.Ok


class Waiting:
    """Event whose waits only move the clock."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def wait(self, timeout_s: float) -> None:
        self._clock.advance(timedelta(milliseconds=500))


class Bench:
    """A forwarder whose client, admin interface and clock are fakes."""

    def __init__(self, **changes: Any) -> None:
        given = {"targets": ("orders", "bills"), "final_window": FinalWindow.BROKER, **changes}
        self.description = describe(**given)
        self.client, self.admin, self.clock = FakeClient(), FakeAdmin(), ManualClock(T0)
        self.forwarder = Forwarder(
            self.client,
            self.admin,  # type: ignore[arg-type]
            self.description,
            self.clock,
            start=lambda work: work(),
        )
        self.forwarder._woken = Waiting(self.clock)  # type: ignore[assignment]
        self.sources = source_partitions(self.description)
        self.entry = 0

    def source(self, text: str) -> SourcePartition:
        return next(item for item in self.sources if item.topic.endswith(text))

    def message(
        self,
        due_ms: int = T0 + 60_000,
        target: str = ORDERS,
        value: bytes | None = b"body",
        properties: dict[str, str] | None = None,
        **own: str,
    ) -> ParkedMessage:
        self.entry += 1
        if properties is None:
            properties = {DUE: str(due_ms), TARGET: target, "color": "red", **own}
        return ParkedMessage(7, self.entry, 2, T0, "key", "order", 5, properties, value)

    def forward(self, *messages: ParkedMessage, source: str = "level-hour-partition-3") -> None:
        for message in messages:
            self.forwarder.forward(self.source(source), message, self.clock.now_ms())
        try:
            self.forwarder._take_outcomes()  # takes what was opened
        except BrokerError:
            self.forwarder.reset()
            raise

    def move(
        self, *messages: ParkedMessage, source: str = "level-hour-partition-3"
    ) -> ForwardReport:
        self.forward(*messages, source=source)
        return self.forwarder.flush()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_near_due_message_goes_into_the_window(bench: Bench) -> None:
    bench.forward(bench.message(T0 + 60_000))
    (sent,) = bench.client.to(ORDERS)
    assert sent.value == b"body"
    identity = f"{LEVEL_TOPIC}-hour-partition-3:7:1:2".removeprefix("persistent://")
    assert sent.given == {
        "properties": {"color": "red", DUE: str(T0 + 60_000), TARGET: ORDERS, ID: identity},
        "partition_key": "key",
        "ordering_key": "order",
        "event_timestamp": 5,
        "deliver_at": T0 + 60_000,
        "sequence_id": None,
    }
    report = bench.forwarder.flush()
    assert (report.window, report.due, report.total, report.latest_ms) == (1, 0, 1, 0)
    # The next report covers only later messages.
    assert bench.forwarder.flush().total == 0


def test_the_near_due_delay_depends_on_the_source_level(bench: Bench) -> None:
    # An hour and four minutes is near-due for HOUR, whose lead is five minutes.
    due = T0 + 3_840_000
    bench.forward(bench.message(due), source="level-hour-partition-3")
    bench.forward(bench.message(due), source="held-partition-0")
    bench.forward(bench.message(due), source="level-partition-0")
    assert [sent.topic for sent in bench.client.sent] == [
        ORDERS,
        ORDERS,
        f"{LEVEL_TOPIC}-hour-partition-0",
    ]


def test_due_messages_have_no_timer_and_their_lateness_is_reported(bench: Bench) -> None:
    bench.forward(bench.message(T0 - 700), bench.message(T0), bench.message(T0 - 30))
    assert [sent.given["deliver_at"] for sent in bench.client.to(ORDERS)] == [None] * 3
    report = bench.forwarder.flush()
    assert (report.window, report.due, report.latest_ms) == (0, 3, 700)


def test_an_absent_key_or_event_time_stays_absent_and_null_stays_null(bench: Bench) -> None:
    message = bench.message(value=None)._replace(key="", ordering_key="", event_ms=0)
    bench.forward(message, bench.message(value=b""))
    sent, empty = bench.client.to(ORDERS)
    assert (sent.value, empty.value) == (None, b"")
    given = sent.given
    assert given["partition_key"] is given["ordering_key"] is given["event_timestamp"] is None


@pytest.mark.parametrize(
    ("source", "remaining", "topic"),
    [
        ("level-partition-4", DAY - 1, f"{LEVEL_TOPIC}-hour-partition-22"),
        ("level-partition-4", DAY + 600_000, f"{LEVEL_TOPIC}-hour-partition-22"),
        ("level-partition-4", 3 * DAY, f"{LEVEL_TOPIC}-partition-2"),
        ("level-hour-partition-3", 5 * 3_600_000, f"{LEVEL_TOPIC}-hour-partition-4"),
        ("level-hour-partition-3", 3 * DAY, f"{LEVEL_TOPIC}-partition-2"),
        ("held-partition-0", 5 * 3_600_000, f"{LEVEL_TOPIC}-hour-partition-4"),
    ],
)
def test_a_message_that_is_not_near_due_is_parked_again(
    bench: Bench, source: str, remaining: int, topic: str
) -> None:
    bench.forward(bench.message(T0 + remaining, **{ID: "mine"}), source=source)
    (sent,) = bench.client.sent
    assert sent.topic == topic
    assert sent.given["deliver_at"] is None
    assert sent.properties == {
        "color": "red",
        DUE: str(T0 + remaining),
        TARGET: ORDERS,
        ID: "mine",
    }
    report = bench.forwarder.flush()
    ((level_topic, level, partition),) = report.parked
    assert topic == bench.description.level_topic(level).partition(partition).full
    assert level_topic == LEVEL_TOPIC
    assert report.total == 1


def test_with_a_function_the_broker_delays_the_message_until_its_hand_off() -> None:
    bench = Bench(mover=Mover.FUNCTION)
    bench.forward(bench.message(T0 + 5 * 3_600_000), source="level-partition-0")
    (sent,) = bench.client.sent
    assert sent.given["deliver_at"] == T0 + 5 * 3_600_000 - 300_000


def test_a_message_that_the_broker_would_release_at_once_is_not_parked_again() -> None:
    second, longest = timedelta(seconds=1), timedelta(seconds=9)
    levels = Levels([PartitionStrategy(partition_by=second, maximum_delay=longest)])
    bench = Bench(mover=Mover.FUNCTION, levels=levels)
    bench.forward(bench.message(T0 + 1500), source="level-partition-0")
    (sent,) = bench.client.to(ORDERS)
    assert sent.given["deliver_at"] == T0 + 1500


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({"color": "red"}, "delaylevel.due is missing"),
        ({DUE: "soon", TARGET: ORDERS}, "not a whole number"),
        ({DUE: "1", TARGET: "persistent://x/y/z"}, "target persistent://x/y/z is not one of"),
        ({DUE: "1", TARGET: LEVEL_TOPIC}, "is not one of level topic"),
    ],
)
def test_an_invalid_message_becomes_a_dead_letter(
    bench: Bench, properties: dict[str, str], reason: str
) -> None:
    bench.forward(bench.message(properties=properties), bench.message())
    (dead,) = bench.client.to(DEAD)
    assert dead.value == b"body"
    assert dead.given["partition_key"] == "key"
    assert {**properties, REASON: dead.properties[REASON]} | {
        SOURCE: f"{LEVEL_TOPIC}-hour-partition-3:7:1:2".removeprefix("persistent://")
    } == dead.properties
    assert reason in dead.properties[REASON]
    report = bench.forwarder.flush()
    # The dead letter does not block other messages.
    assert (report.dead.total(), report.window, report.total) == (1, 1, 2)
    assert reason in next(iter(report.dead))


def held_reason(bench: Bench) -> list[tuple[str, str]]:
    return [(sent.properties[ATTEMPT], sent.properties[REASON]) for sent in bench.client.to(HELD)]


def test_a_deleted_target_is_not_created_again(bench: Bench) -> None:
    bench.admin.missing.add(ORDERS)
    bench.forward(bench.message(), bench.message(target=BILLS), bench.message())
    report = bench.forwarder.flush()
    assert bench.client.opened(ORDERS) == 0
    assert report.held == {ORDERS: 2}
    assert report.window == 1
    assert held_reason(bench) == [("1", "the topic does not exist")] * 2
    held = bench.client.to(HELD)[0].properties
    assert held[TARGET] == ORDERS
    assert held[ID].endswith(":7:1:2")
    assert held["color"] == "red"
    assert len(bench.client.to(BILLS)) == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (pulsar.ProducerBlockedQuotaExceededException("full"), "ProducerBlockedQuotaExceeded"),
        (pulsar.IncompatibleSchema("no"), "IncompatibleSchema"),
        (pulsar.AuthorizationError("no"), "AuthorizationError"),
        (pulsar.TopicTerminated("over"), "TopicTerminated"),
    ],
)
def test_messages_are_held_if_the_target_refuses_a_producer(
    bench: Bench, error: Exception, reason: str
) -> None:
    bench.client.refusals[ORDERS] = error
    bench.forward(bench.message(), bench.message(target=BILLS))
    report = bench.forwarder.flush()
    assert (report.held.total(), report.window) == (1, 1)
    assert reason in held_reason(bench)[0][1]


@pytest.mark.parametrize("error", [pulsar.ConnectError("away"), pulsar.ServiceUnitNotReady("x")])
def test_a_transient_broker_error_is_waited_for_before_messages_are_held(
    bench: Bench, error: Exception
) -> None:
    bench.client.refusals[ORDERS] = error
    bench.forward(bench.message())
    assert bench.client.sent == []
    report = bench.forwarder.flush()
    assert 5_000 <= bench.clock.now_ms() - T0 < 8_000
    assert report.held == {ORDERS: 1}
    assert held_reason(bench) == [("1", type(error).__name__)]


def test_a_target_that_is_served_again_gets_its_messages(bench: Bench) -> None:
    bench.client.refusals[ORDERS] = pulsar.ServiceUnitNotReady("moving")
    bench.forward(bench.message(), bench.message(target=BILLS))
    bench.clock.advance(timedelta(seconds=2))
    del bench.client.refusals[ORDERS]
    report = bench.forwarder.flush()
    assert (report.window, report.held) == (2, {})


@pytest.mark.parametrize(
    "outcome",
    [
        pulsar.Result.TopicTerminated,
        pulsar.ProducerFenced("fenced"),
        [OK, pulsar.Result.Timeout, OK],
        None,  # flush returns without a confirmation
    ],
)
def test_messages_that_a_target_does_not_confirm_are_held(
    bench: Bench, outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_broker_serves_it(_: object) -> None:
        raise BrokerUnreachableError("the broker does not answer")

    bench.client.outcomes[ORDERS] = outcome if outcome is not None else "silence"
    bench.forward(*[bench.message() for _ in range(3)], bench.message(target=BILLS))
    bench.client[ORDERS].connected = False  # one that is connected may be throttled
    with monkeypatch.context() as patch:
        patch.setattr(bench.admin, "partition_stats", no_broker_serves_it)
        report = bench.forwarder.flush()
    # Only the unconfirmed messages are held, with the same ID.
    ids = [sent.properties[ID] for sent in bench.client.to(ORDERS)]
    unconfirmed = ids[1:2] if isinstance(outcome, list) else ids
    assert report.held == {ORDERS: len(unconfirmed)}
    assert (report.window, report.due, report.total) == (4 - len(unconfirmed), 0, 4)
    assert [sent.properties[ID] for sent in bench.client.to(HELD)] == unconfirmed
    silent = outcome is None or isinstance(outcome, Exception)
    named = "Timeout" if isinstance(outcome, list) else "Terminated"
    expected = "nothing confirmed for" if silent else named
    assert all(attempt == "1" and expected in reason for attempt, reason in held_reason(bench))
    # The failed producer is not used again.
    assert ORDERS in bench.client.closings
    del bench.client.outcomes[ORDERS]
    bench.clock.advance(timedelta(milliseconds=bench.description.hold_pause_ms))
    bench.forward(bench.message())
    assert bench.client.opened(ORDERS) == 2
    assert bench.forwarder.flush().total == 1


def test_attempts_are_counted(bench: Bench) -> None:
    bench.admin.missing |= {ORDERS, BILLS}
    bench.forward(bench.message(**{ATTEMPT: "4", REASON: "old"}), source="held-partition-0")
    bench.forwarder.flush()
    assert held_reason(bench) == [("5", "the topic does not exist")]


def test_a_message_delivered_after_a_hold_has_no_trace_of_it(bench: Bench) -> None:
    bench.forward(
        bench.message(T0 - 1, **{ATTEMPT: "4", REASON: "old", ID: "mine"}),
        source="held-partition-0",
    )
    (sent,) = bench.client.to(ORDERS)
    assert sent.properties == {"color": "red", DUE: str(T0 - 1), ID: "mine", TARGET: ORDERS}


def test_a_refused_target_is_tried_again_after_the_pause(bench: Bench) -> None:
    bench.client.refusals[ORDERS] = pulsar.TopicTerminated("over")
    bench.forward(bench.message())
    del bench.client.refusals[ORDERS]
    bench.clock.move_to(T0 + bench.description.hold_pause_ms // 2)
    bench.forward(bench.message(T0 + DAY // 24))
    assert bench.client.opened(ORDERS) == 0
    assert bench.forwarder.flush().held == {ORDERS: 2}
    assert held_reason(bench)[1] == held_reason(bench)[0]
    bench.clock.advance(timedelta(milliseconds=bench.description.hold_pause_ms // 2))
    bench.forward(bench.message(T0 + DAY // 24))
    assert bench.client.opened(ORDERS) == 1
    assert bench.forwarder.flush().window == 1


def test_the_refusal_of_one_schema_does_not_block_another(bench: Bench) -> None:
    lacking = str(SchemaRef("AVRO", "0" * 16))
    bench.forward(bench.message(**{SCHEMA: lacking}), bench.message())
    report = bench.forwarder.flush()
    assert (report.held.total(), report.window) == (1, 1)
    assert held_reason(bench) == [("1", f"its registry has no schema {lacking}")]
    assert bench.client.to(HELD)[0].properties[SCHEMA] == lacking


def test_one_producer_for_each_target_and_schema(bench: Bench) -> None:
    text = json.dumps({"type": "record", "name": "A", "fields": []})
    bench.admin.versions[ORDERS] = [
        SchemaVersion("JSON", text, 0),
        SchemaVersion("STRING", "", 1),
    ]
    references = [
        str(SchemaRef.of("STRING", "")),
        str(SchemaRef.of("JSON", text)),
    ]
    for _ in range(3):
        bench.forward(bench.message(), *[bench.message(**{SCHEMA: each}) for each in references])
    assert bench.client.opened(ORDERS) == 3
    types = [str(p.settings["schema"].schema_info().schema_type()) for p in bench.client.producers]
    assert [name.rpartition(".")[2] for name in types] == ["BYTES", "STRING", "JSON"]
    assert bench.forwarder.flush().window == 9


def test_producers_have_batching_limits_and_timeouts(bench: Bench) -> None:
    bench.forward(bench.message(), bench.message(T0 + 5 * DAY))
    by_topic = {producer.topic: producer for producer in bench.client.producers}
    target = by_topic.pop(ORDERS)
    (level,) = by_topic.values()
    # The forwarder waits for a topic, or gives it up; the client does neither.
    never = {
        "block_if_queue_full": False,
        "send_timeout_millis": 0,
        "max_pending_messages": 0,
    }
    for producer, settings in ((target, PRODUCER_SETTINGS), (level, BULK_SETTINGS)):
        for name, value in {**settings, **never}.items():
            assert producer.settings[name] == value
        # A position fits into a sequence ID.
        assert producer.settings["batching_max_messages"] <= 1024
    assert target.settings["batching_type"] == pulsar.BatchingType.KeyBased
    assert "batching_type" not in level.settings


#: The final window, and a topic of our own that gets what is due in five days or later.
OURS = [
    (FinalWindow.BROKER, f"{LEVEL_TOPIC}-partition-4", 5 * DAY),
    (FinalWindow.TRACKER, f"{LEVEL_TOPIC}-window-partition-1", 0),
]


@pytest.mark.parametrize(("window", "topic", "due_ms"), OURS)
def test_a_topic_of_our_own_that_cannot_be_opened_is_an_error(
    window: FinalWindow, topic: str, due_ms: int
) -> None:
    bench = Bench(final_window=window, window_partitions=2)
    bench.client.refusals[topic] = pulsar.TopicNotFound("gone")
    with pytest.raises(BrokerError, match=rf"{topic}.*TopicNotFound.*nothing was acknowledged"):
        bench.forward(bench.message(T0 + 2 * DAY), bench.message(T0 + due_ms))
    # The mover reads the source again from the last acknowledgement; no message counts twice.
    del bench.client.refusals[topic]
    bench.forward(bench.message(T0 + 2 * DAY), bench.message(T0 + due_ms))
    assert bench.forwarder.flush().total == 2


@pytest.mark.parametrize("outcome", [pulsar.Result.Timeout, pulsar.Timeout("late"), "silence"])
@pytest.mark.parametrize(("window", "topic", "due_ms"), OURS)
def test_a_topic_of_our_own_that_does_not_confirm_is_an_error(
    window: FinalWindow, topic: str, due_ms: int, outcome: Any
) -> None:
    bench = Bench(final_window=window, window_partitions=2)
    bench.client.outcomes[topic] = outcome
    again = [bench.message(T0 + 2 * DAY), *(bench.message(T0 + due_ms) for _ in range(2))]
    with pytest.raises(BrokerError, match=rf"{topic} did not confirm .*nothing was acknowledged"):
        bench.move(*again)
    bench.clock.move_to(T0)
    del bench.client.outcomes[topic]
    assert bench.move(*again).total == 3
    # The failed producer may be closed for good; it is not used again.
    assert topic in bench.client.closings


@pytest.mark.parametrize("topic", [HELD, DEAD])
def test_held_messages_and_dead_letters_must_be_confirmed_too(bench: Bench, topic: str) -> None:
    bench.client.outcomes[topic] = pulsar.Result.Timeout
    bench.admin.missing.add(ORDERS)
    with pytest.raises(BrokerError, match="did not confirm"):
        bench.move(bench.message(), bench.message(properties={}))
    assert bench.forwarder.flush().total == 0


def test_messages_are_held_while_the_admin_interface_is_unreachable(bench: Bench) -> None:
    bench.admin.away = True
    bench.forward(bench.message())
    assert bench.client.sent == []
    assert bench.forwarder.flush().held == {ORDERS: 1}
    assert bench.client.opened(ORDERS) == 0
    assert held_reason(bench) == [("1", "nothing answers")]


@pytest.mark.parametrize("limit", ["MOST_MESSAGES", "MOST_BYTES"])
def test_unconfirmed_messages_and_bytes_are_limited(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(forwarder_module, limit, 4 if limit == "MOST_MESSAGES" else 16)
    monkeypatch.setattr(forwarder_module, "_POLL_EVERY", 1)
    source = bench.source("level-hour-partition-3")
    for _ in range(10):
        bench.forwarder.forward(source, bench.message(), bench.clock.now_ms())
        assert sum(len(producer.pending) for producer in bench.client.producers) <= 4
    assert bench.forwarder.flush().window == 10


# -- with a tracker

WINDOW = f"{LEVEL_TOPIC}-window-partition-"


@pytest.fixture
def tracked() -> Bench:
    return Bench(final_window=FinalWindow.TRACKER, window_partitions=8)


def test_near_due_and_overdue_messages_go_into_the_window_regardless_of_the_target(
    tracked: Bench,
) -> None:
    tracked.admin.away = True  # no request needs it
    messages = [
        tracked.message(T0 + 60_000, **{ID: "one", SCHEMA: "AVRO:abc"}),
        tracked.message(T0 - 700, **{ID: "two"}),
    ]
    tracked.forward(*messages)
    expected = [
        {DUE: str(T0 + 60_000), ID: "one", SCHEMA: "AVRO:abc"},
        {DUE: str(T0 - 700), ID: "two"},
    ]
    topic = f"{WINDOW}{tracked.description.window_partition('key', '')}"
    assert [sent.given for sent in tracked.client.to(topic)] == [
        {
            "properties": {"color": "red", TARGET: ORDERS, **properties},
            "partition_key": "key",
            "ordering_key": "order",
            "event_timestamp": 5,
            "deliver_at": None,
            "sequence_id": None,
        }
        for properties in expected
    ]
    report = tracked.forwarder.flush()
    assert (report.window, report.due, report.total, report.latest_ms) == (2, 0, 2, 700)
    (producer,) = tracked.client.producers
    assert producer.settings["batching_enabled"] is True
    assert producer.settings["batching_max_messages"] <= 1024


def test_all_copies_of_a_message_go_into_one_window_partition(tracked: Bench) -> None:
    keyless = [tracked.message(number)._replace(key="") for number in range(T0, T0 + 40)]
    first = "level-hour-partition-3"
    topics = list[str]()
    for message in [*keyless, *keyless]:
        tracked.forward(message, source=first)
        topics.append(tracked.client.sent[-1].topic)
    assert topics[:40] == topics[40:]
    ids = [message.stable_id(tracked.source(first).topic) for message in keyless]
    places = [tracked.description.window_partition("", item) for item in ids]
    assert topics[:40] == [f"{WINDOW}{place}" for place in places]
    assert len(set(topics)) == 8
    # A message that has an ID keeps it, whichever partition it is read from.
    again = keyless[0]._replace(properties={**keyless[0].properties, ID: ids[0]})
    tracked.forward(again, source="level-hour-partition-0")
    assert tracked.client.sent[-1].topic == topics[0]
    assert len(tracked.client.producers) == 8


def test_an_ordering_key_alone_does_not_choose_the_window_partition(tracked: Bench) -> None:
    message = tracked.message(**{ID: "mine"})._replace(key="", ordering_key="other")
    tracked.forward(message)
    (sent,) = tracked.client.sent
    assert sent.topic == f"{WINDOW}{tracked.description.window_partition('', 'mine')}"


def test_a_held_message_goes_into_the_window_with_its_attempts(tracked: Bench) -> None:
    own = {ID: "mine", ATTEMPT: "3", REASON: "it was away"}
    tracked.forward(tracked.message(T0 - 1, **own), source="held-partition-0")
    (sent,) = tracked.client.sent
    expected = {"color": "red", DUE: str(T0 - 1), TARGET: ORDERS, ID: "mine", ATTEMPT: "3"}
    assert sent.properties == expected
    assert sent.topic.startswith(WINDOW)


def test_with_a_tracker_other_messages_are_parked_or_dead_letters(tracked: Bench) -> None:
    tracked.forward(tracked.message(T0 + 5 * DAY), tracked.message(properties={}))
    assert [sent.topic for sent in tracked.client.sent] == [f"{LEVEL_TOPIC}-partition-4", DEAD]


def test_close_targets_closes_only_producers_of_business_topics(bench: Bench) -> None:
    bench.forward(bench.message(), bench.message(target=BILLS), bench.message(T0 + 5 * DAY))
    bench.forwarder.flush()
    bench.forwarder.close_targets()
    assert sorted(bench.client.closings) == [BILLS, ORDERS]
    bench.forward(bench.message())
    assert bench.client.opened(ORDERS) == 2
    bench.forwarder.flush()
    bench.client.close_fails.add(ORDERS)  # the others are still closed
    bench.forwarder.close()
    assert all(producer.closed == 1 for producer in bench.client.producers)


def test_reports_add_up() -> None:
    one, other = ForwardReport(window=1, due=2, latest_ms=9), ForwardReport(window=3, latest_ms=4)
    one.parked["a", 0, 0] += 1
    other.parked["a", 0, 0] += 2
    other.held["t"] += 1
    other.dead["r"] += 1
    one.add(other)
    assert (one.window, one.due, one.latest_ms, one.total) == (4, 2, 9, 11)
    assert one.parked == {("a", 0, 0): 3}
    assert one.held == {"t": 1}
    assert one.dead == {"r": 1}


@pytest.mark.parametrize("policy", Expired)
def test_an_expired_message_is_not_handed_off(policy: Expired) -> None:
    bench = Bench(expired=policy, expire_after_ms=5_000)
    now_ms = str(T0 - 1)
    bench.forward(
        bench.message(T0 - 5_000),
        bench.message(T0 - 4_999),
        bench.message(T0 - 1_000, **{EXPIRES: str(T0)}),
        bench.message(T0 - 60_000, **{EXPIRES: str(T0 + 1)}),
        bench.message(T0 + 60_000, BILLS, **{EXPIRES: now_ms}),
    )
    report = bench.forwarder.flush()
    assert report.expired == {ORDERS: 2, BILLS: 1}
    assert (report.due, report.total) == (2, 5)
    assert all(EXPIRES not in sent.properties for sent in bench.client.to(ORDERS))
    letters = bench.client.to(DEAD)
    assert len(letters) == (3 if policy is Expired.DEAD_LETTER else 0)
    assert not report.dead
    for letter in letters:
        assert letter.properties[REASON].startswith("expired at ")
        assert letter.properties[TARGET] in (ORDERS, BILLS)


def test_a_held_message_expires_at_its_next_attempt(bench: Bench) -> None:
    bench.admin.missing.add(ORDERS)
    message = bench.message(T0, **{EXPIRES: str(T0 + 60_000)})
    bench.forward(message)
    assert bench.forwarder.flush().held == {ORDERS: 1}
    (held,) = bench.client.to(HELD)
    assert held.properties[EXPIRES] == str(T0 + 60_000)
    bench.clock.advance(timedelta(minutes=1))
    again = bench.message(properties=held.properties)
    bench.forward(again, source="-held-partition-0")
    report = bench.forwarder.flush()
    assert report.counts() == {**dict.fromkeys(report.counts(), 0), "expired": 1}
