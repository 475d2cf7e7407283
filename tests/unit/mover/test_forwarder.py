"""Tests of the forwarder with a scripted client."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.publisher import BULK_SETTINGS, PRODUCER_SETTINGS
from delaylevel.errors import BrokerError, BrokerUnreachableError
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.envelope import (
    ATTEMPT,
    DUE,
    ID,
    REASON,
    TARGET,
)
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import SourcePartition, source_partitions
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


def test_due_messages_have_no_timer_and_their_lateness_is_reported(bench: Bench) -> None:
    bench.forward(bench.message(T0 - 700), bench.message(T0), bench.message(T0 - 30))
    assert [sent.given["deliver_at"] for sent in bench.client.to(ORDERS)] == [None] * 3
    report = bench.forwarder.flush()
    assert (report.window, report.due, report.latest_ms) == (0, 3, 700)


def held_reason(bench: Bench) -> list[tuple[str, str]]:
    return [(sent.properties[ATTEMPT], sent.properties[REASON]) for sent in bench.client.to(HELD)]


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
def test_a_topic_of_our_own_that_does_not_answer_is_an_error(
    window: FinalWindow, topic: str, due_ms: int
) -> None:
    bench = Bench(final_window=window, window_partitions=2)
    bench.client.outcomes[topic] = "silence"
    again = [bench.message(T0 + 2 * DAY), *(bench.message(T0 + due_ms) for _ in range(2))]
    with pytest.raises(BrokerError, match=rf"{topic} did not confirm .*nothing was acknowledged"):
        bench.move(*again)
    bench.clock.move_to(T0)
    del bench.client.outcomes[topic]
    assert bench.move(*again).total == 3
    # The failed producer may be closed for good; it is not used again.
    assert topic in bench.client.closings


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
