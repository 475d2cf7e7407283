"""Tests that a process may end after any event: nothing is lost, early or untrue.

Each scenario runs once for every event of its pass: an entry that is stored, or an
acknowledgement. The process ends after that event, a second one starts and goes on to the end, and
an independent ledger of what the application sent and was told is compared with what arrived. The
in-memory Pulsar erases at once what was acknowledged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel.consumer import Backoff, Deduplication, Listeners, ReceivedMessage, TopicIdStore
from delaylevel.model.delivery import Delivery
from delaylevel.model.envelope import ID
from delaylevel.model.outcome import Outcome, OutcomeStatus
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.testing import Crashed, MemoryPulsar, admin
from delaylevel.testing.memory import dispatcher
from delaylevel.testing.memory.partition import NO_POSITION, message_id
from delaylevel.testing.memory.producer import ProducerLink

DAY, HOUR, MINUTE = timedelta(days=1), timedelta(hours=1), timedelta(minutes=1)
LEVELS = Levels(
    [
        PartitionStrategy(maximum_delay=2 * DAY),
        PartitionStrategy(partition_by="HOUR", maximum_delay=DAY),
    ]
)
# With two partitions: each has a price in every run.
FEW = Levels(PartitionStrategy(partition_by="HOUR", maximum_delay=3 * HOUR))
SOON = (MINUTE, HOUR + MINUTE, HOUR + MINUTE)
TOPIC = "orders"


@dataclass
class Ledger:
    """The acts of the application, and the answers that it got: what is stored, and cancelled.

    With ``once``, there may be no copy, wherever the process ends.
    """

    due_ms: dict[bytes, int] = field(default_factory=dict)
    cancelled: set[bytes] = field(default_factory=set)
    once: bool = False

    def compare(self, memory: MemoryPulsar, copies: bool = True) -> None:
        """Compare with what arrived in the business topic by now."""
        arrived = memory.delivered(TOPIC)
        found = Counter(message.data for message in arrived)
        expected = self.due_ms.keys() - self.cancelled
        assert found.keys() == expected, "lost, or delivered although cancelled"
        for message in arrived:
            assert message.data is not None
            assert message.at.timestamp() * 1000 >= self.due_ms[message.data], "early"
        if self.once or not copies:
            assert set(found.values()) <= {1}, "copied"
        named = {(message.data, message.properties.get(ID)) for message in arrived}
        assert len(named) == len(found), "a copy has another ID"


def at_every_event(
    prepare: Callable[[MemoryPulsar], Any], work: Callable[[MemoryPulsar, Any], object]
) -> int:
    """Run `work`, killed after each of its events and then run again; return their number."""
    event = 0
    while True:
        event += 1
        memory = MemoryPulsar()
        ledger = prepare(memory)
        memory.crash_after(event)
        try:
            work(memory, ledger)
        except Crashed:
            memory.crash_after(None)
            work(memory, ledger)
            memory.advance(2 * DAY)
            ledger.compare(memory)
            memory.close()
        else:
            memory.crash_after(None)
            memory.advance(2 * DAY)
            ledger.compare(memory, copies=False)
            memory.close()
            return event - 1


def parked(
    memory: MemoryPulsar,
    *,
    final_window: str,
    levels: Levels = LEVELS,
    delays: tuple[timedelta, ...] = (MINUTE, 5 * HOUR, 5 * HOUR + MINUTE, DAY + HOUR),
) -> Ledger:
    """Send messages that are due in a minute, in hours, and in a day."""
    ledger = Ledger()
    producer = memory.client().create_producer(
        TOPIC,
        enable_delay_level_topic=True,
        partition_strategy=levels,
        final_window=final_window,
    )
    for number, delay in enumerate(delays):
        body = b"%d" % number
        producer.send(body, deliver_after=delay, partition_key="k")
        ledger.due_ms[body] = memory.clock.now_ms() + delay // timedelta(milliseconds=1)
    producer.close()
    return ledger


def deduplicate(patch: pytest.MonkeyPatch) -> None:
    """Let dispatchers publish effectively once, and the broker drop what it has stored already."""
    settings = replace(dispatcher.SETTINGS, delivery=Delivery.EFFECTIVELY_ONCE)
    patch.setattr(dispatcher, "SETTINGS", settings)
    stats, create, store = admin._stats, ProducerLink.__init__, ProducerLink._store

    def numbers(link: ProducerLink) -> dict[str, int]:
        """Return the last sequence ID in a partition by the name of the producer."""
        partition = link._broker.partition(link._topic)
        found: dict[str, int] = vars(partition).setdefault("numbers", {})
        return found

    def created(self: ProducerLink, *arguments: Any) -> None:
        create(self, *arguments)
        self.last_sequence_id = numbers(self).get(self.name, -1)

    def stored(self: ProducerLink, items: Any, *arguments: Any, **options: Any) -> None:
        if not self.name.startswith("delaylevel-dispatch"):
            store(self, items, *arguments, **options)
            return
        ((_, number, done),) = items
        last, entries = numbers(self), self._broker.partition(self._topic).entries
        if number <= last.get(self.name, -1):
            done(pulsar.Result.Ok, message_id(NO_POSITION))
            return
        before = len(entries)
        try:
            store(self, items, *arguments, **options)
        finally:  # it is stored even if the process ends then
            if len(entries) > before:
                last[self.name] = number

    patch.setattr(admin, "_stats", lambda each: replace(stats(each), deduplication=True))
    patch.setattr(ProducerLink, "__init__", created)
    patch.setattr(ProducerLink, "_store", stored)


@pytest.mark.parametrize(
    ("final_window", "once"), [("tracker", False), ("tracker", True), ("broker", False)]
)
def test_a_mover_and_a_dispatcher_may_end_after_any_event(
    final_window: str, once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if once:
        deduplicate(monkeypatch)

    def prepare(memory: MemoryPulsar) -> Ledger:
        ledger = parked(memory, final_window=final_window)
        ledger.once = once
        return ledger

    events = at_every_event(prepare, lambda memory, _: memory.advance(2 * DAY))
    assert events > 6, events


@dataclass
class Cancelled(Ledger):
    """The same with cancellations: what was told of them must be true.

    Once a process has begun, the next one finds a further cancellation.
    """

    begun: bool = False

    def compare(self, memory: MemoryPulsar, copies: bool = True) -> None:
        (description,) = memory._broker.level_topics()
        outcomes = memory.delivered(description.outcomes_topic.partition(0).full)
        told = {each.id: each.status for each in (Outcome.read(one.properties) for one in outcomes)}
        assert told.keys() == {"0", "1", "2"}, "an outcome is missing"
        stays = [name for name, status in told.items() if status is OutcomeStatus.TOO_LATE]
        self.cancelled = {b"0", b"1", b"2"} - {name.encode() for name in stays}
        assert stays == ["2"] or (copies and not stays)
        super().compare(memory, copies)


@pytest.mark.parametrize("once", [False, True])
def test_a_dispatcher_that_cancels_may_end_after_any_event(
    once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if once:
        deduplicate(monkeypatch)

    def prepare(memory: MemoryPulsar) -> Cancelled:
        producer = memory.client().create_producer(
            TOPIC, enable_delay_level_topic=True, partition_strategy=FEW, final_window="tracker"
        )
        ledger = Cancelled(once=once)
        due_ms = memory.clock.now_ms() + 60_000
        for number, later_ms in enumerate((0, 1000, 1000)):
            ledger.due_ms[b"%d" % number] = due_ms + later_ms
            options = {"message_id": str(number), "partition_key": "k"}
            if number == 1:  # its cancellation comes first
                producer.cancel(deliver_at=due_ms + later_ms, **options)
            producer.send(b"%d" % number, deliver_at=due_ms + later_ms, **options)
        producer.cancel(deliver_at=due_ms, message_id="0", partition_key="k")
        return ledger

    def work(memory: MemoryPulsar, ledger: Cancelled) -> None:
        left_ms = ledger.due_ms[b"2"] + 1000 - memory.clock.now_ms()
        if not ledger.begun:  # otherwise the next owner has not begun yet
            ledger.begun = True
            memory.advance(timedelta(milliseconds=left_ms))
        producer = memory.client().create_producer(
            TOPIC, enable_delay_level_topic=True, final_window="tracker"
        )
        producer.cancel(deliver_at=ledger.due_ms[b"2"], message_id="2", partition_key="k")
        memory.advance(HOUR)

    assert at_every_event(prepare, work) > 10


@dataclass
class Handlings:
    """The messages of a subscription, and how often each was handled."""

    sent: frozenset[bytes]
    handled: Counter[bytes] = field(default_factory=Counter)

    def compare(self, memory: MemoryPulsar, copies: bool = True) -> None:
        assert self.handled.keys() == self.sent, "not handled"
        # Only the message in hand at the end of the process.
        assert self.handled.total() <= len(self.sent) + copies, "handled again"
        before = self.handled.copy()
        again = memory.client().create_producer(TOPIC)
        for message in memory.delivered(TOPIC):
            assert message.data is not None
            again.send(message.data, properties=dict(message.properties), partition_key=message.key)
        listen(memory, self)
        memory.advance(DAY)
        assert self.handled == before, "a copy was handled: an ID was saved after its message"


def listen(memory: MemoryPulsar, ledger: Handlings) -> None:
    app = Listeners(memory.client())

    @app.on(
        TOPIC,
        subscription="billing",
        retry=Backoff("10m"),
        deduplicate=Deduplication(store=TopicIdStore()),
    )
    def bill(message: ReceivedMessage) -> None:
        if message.data == b"1" and message.attempt == 1:
            raise ValueError("try again")
        ledger.handled[message.data] += 1


def test_a_listener_may_end_after_any_event() -> None:
    def prepare(memory: MemoryPulsar) -> Handlings:
        client = memory.client()
        client.subscribe(TOPIC, "billing", pulsar.ConsumerType.Shared)
        ledger = parked(memory, final_window="tracker", levels=FEW, delays=SOON)
        client.shutdown()
        memory.advance(2 * HOUR)
        return Handlings(frozenset(ledger.due_ms))

    def work(memory: MemoryPulsar, ledger: Handlings) -> None:
        listen(memory, ledger)
        memory.advance(HOUR)

    assert at_every_event(prepare, work) > 6
