"""Tests of the Function's relay with a scripted client, and of its pure parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.cluster.targets import pool
from delaylevel.cluster.targets.producer import STALL_S
from delaylevel.errors import BrokerUnreachableError, ClientError, UpgradeRequiredError
from delaylevel.functions import relay as relay_module
from delaylevel.functions.relay import SLOW, SLOW_S, Item, Relay, take_confirmed
from delaylevel.model.envelope import DUE, REASON, TARGET
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Mover
from delaylevel.model.position import Position
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.testing import ManualClock
from support.fakes import FakeAdmin, FakeClient, FakeMessage, FakeMessageId, FakeProducer

T0 = 1_800_000_000_000
DAY = 86_400_000
ORDERS = "persistent://public/default/orders"
BILLS = "persistent://public/default/bills"
ADDED = "persistent://public/default/added"
LEVEL_TOPIC = "persistent://public/default/orders-delay-level"
HELD = f"{LEVEL_TOPIC}-held-partition-0"
DEAD = f"{LEVEL_TOPIC}-DLQ-partition-0"
DESCRIPTION = LevelTopicDescription(
    LEVEL_TOPIC,
    Levels([PartitionStrategy(maximum_delay=timedelta(days=5))]),
    (ORDERS, BILLS),
    Mover.FUNCTION,
    FinalWindow.BROKER,
    hold_pause_ms=30_000,
)


class RelayProducer(FakeProducer):
    """A producer that confirms only on ``answer``."""

    def flush(self) -> None: ...


class RelayWorld(FakeClient):
    """Fake client, consumer, admin interface and clock of a relay.

    ``openings`` has the producers that are being opened, unless that happens at once. What the
    description is when it is read comes from ``descriptions``: an error, or the last one remains.
    """

    def __init__(self, *targets: str, **options: Any) -> None:
        super().__init__()
        self.clock = ManualClock(T0)
        self.acknowledged: list[int] = []
        self.given_back: list[int] = []
        self.openings: list[Callable[[], None]] = []
        self.description = replace(DESCRIPTION, targets=targets or DESCRIPTION.targets)
        self.descriptions: list[LevelTopicDescription | Exception] = [self.description]
        self.reads = 0
        admin: Any = FakeAdmin()
        self.relay = Relay(
            self,
            admin,
            self.description,
            self,
            clock=self.clock,
            describe=self.describe,
            now_s=lambda: self.clock.now_ms() / 1000,
            **{"start": lambda work: work(), **options},
        )

    def describe(self) -> LevelTopicDescription:
        self.reads += 1
        found = self.descriptions[0]
        if len(self.descriptions) > 1:
            del self.descriptions[0]
        if isinstance(found, Exception):
            raise found
        return found

    def create_producer(self, topic: str, **settings: Any) -> FakeProducer:
        if topic in self.refusals:
            raise self.refusals[topic]
        self.producers.append(RelayProducer(self, topic, settings))
        return self.producers[-1]

    def acknowledge(self, message_id: FakeMessageId) -> None:
        self.acknowledged.append(message_id.entry_id())

    def negative_acknowledge(self, message_id: FakeMessageId) -> None:
        self.given_back.append(message_id.entry_id())

    # -- the steps of tests

    def offer(
        self,
        *entries: int,
        target: str = ORDERS,
        due_ms: int = T0 + 3_600_000,
        topic: str = f"{LEVEL_TOPIC}-partition-0",
    ) -> None:
        """Deliver messages of a level or held partition; do not poll."""
        for entry in entries:
            place = FakeMessageId(Position(7, entry))
            properties = {DUE: str(due_ms), TARGET: target}
            # Publish times are those of a clock that is far behind; they do not matter.
            self.relay.offer(FakeMessage(place, b"body", properties, topic, T0 - DAY))

    def settle(self) -> None:
        """Poll until producers are open, and messages that were set aside are sent."""
        for _ in range(4):
            self.relay.poll()

    def move(self, *entries: int, **more: Any) -> None:
        self.offer(*entries, **more)
        self.settle()

    def answer(self, topic: str, count: int | None = None) -> None:
        """Confirm messages."""
        self[topic].answer(count=count)
        self.settle()

    def let_pass(self, seconds: float) -> None:
        """Let time pass while the relay is polled, as it is all the time."""
        for _ in range(round(seconds * 10)):
            self.clock.advance(timedelta(seconds=0.1))
            self.relay.poll()

    def counts(self, *topics: str) -> tuple[int, ...]:
        """Return the numbers of messages that were sent to topics."""
        return tuple(len(self.to(topic)) for topic in topics)


@pytest.fixture
def world() -> RelayWorld:
    return RelayWorld()


def test_a_redelivery_is_not_sent(world: RelayWorld) -> None:
    world.move(0, 0)
    assert world.counts(ORDERS) == (1,)
    world.answer(ORDERS)
    assert world.acknowledged == [0]
    assert (world.relay.in_flight, world.relay.unacknowledged) == (0, 0)
    # The broker has lost the acknowledgement.
    world.move(0)
    world.move(0, topic=HELD)  # another message
    assert world.counts(ORDERS) == (2,)
    assert world.acknowledged == [0, 0]
    assert (world.relay.in_flight, world.relay.unacknowledged) == (1, 1)
    assert world.relay.take_report().duplicates == 2


# -- the description


def test_a_later_format_stops_the_relay(world: RelayWorld) -> None:
    world.descriptions += [UpgradeRequiredError("format 9")]
    world.let_pass(100)
    assert world.reads == 1
    with pytest.raises(UpgradeRequiredError, match="format 9"):
        world.let_pass(100)


def test_a_message_of_a_new_partition_waits_for_the_description(world: RelayWorld) -> None:
    longer = Levels([PartitionStrategy(maximum_delay=timedelta(days=8))])
    world.descriptions = [replace(world.description, levels=longer)]
    world.move(0, topic=f"{LEVEL_TOPIC}-partition-6")
    world.answer(ORDERS)
    assert (world.acknowledged, world.given_back, world.reads) == ([0], [], 1)


def test_unknown_targets_cause_one_read_for_all_that_wait(world: RelayWorld) -> None:
    """They are unknown only by a read that began after they arrived."""
    world.descriptions += [replace(world.description, targets=(ORDERS, ADDED))]
    for entry in range(500):
        world.offer(entry, target=f"persistent://public/default/never-{entry}")
    world.move(500)
    assert (world.reads, world.counts(DEAD, ORDERS)) == (1, (500, 1))
    world.move(501, target=ADDED)
    assert world.reads == 1, "the next read has to wait a moment"
    world.let_pass(0.3)
    assert (world.reads, world.counts(DEAD, ADDED)) == (2, (500, 1))


def test_a_message_is_given_back_if_the_description_cannot_be_read(world: RelayWorld) -> None:
    world.descriptions[0] = BrokerUnreachableError("no broker answers")
    world.offer(0, target=ADDED)
    world.move(1)
    world.answer(ORDERS)
    assert (world.given_back, world.acknowledged) == ([0], [1])
    assert world.relay.unacknowledged == 0


# -- topics that do not answer, or slowly


def test_other_messages_are_sent_while_a_producer_opens() -> None:
    openings: list[Callable[[], None]] = []
    world = RelayWorld(start=openings.append)
    world.offer(0, target=BILLS)
    world.move(1)
    for opening, topic in zip(reversed(openings), (ORDERS, BILLS), strict=True):
        opening()
        world.settle()
        world.answer(topic)
    assert world.acknowledged == [1, 0]


def test_a_silent_target_does_not_block_the_others() -> None:
    world = RelayWorld(in_flight=4)
    world.offer(*range(4), target=BILLS)
    world.move(4)
    assert not world.relay.has_room
    world.clock.advance(timedelta(seconds=0.2))
    world[ORDERS].answer()
    world.clock.advance(timedelta(seconds=STALL_S))
    world.settle()
    assert world.relay.has_room, "messages for the silent target count against the limit"
    world.move(5, target=BILLS)
    assert world.counts(BILLS, HELD) == (4, 1)


def test_a_silent_topic_of_our_own_does_not_block_the_others() -> None:
    world = RelayWorld(in_flight=4)
    world.move(*range(4), target="persistent://public/default/never")
    assert (world.counts(DEAD), world.relay.has_room) == ((4,), False)
    world.let_pass(STALL_S + 0.5)
    assert world.given_back == [0, 1, 2, 3]
    assert world.relay.has_room
    world.move(4)
    world.answer(ORDERS)
    assert world.acknowledged == [4]


def test_the_log_has_each_failure_of_our_own_topics_and_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One of another day has its own number and time, and waits for no pause of an earlier one."""
    world = RelayWorld(in_flight=1)
    for entry in range(2):
        world.move(2 * entry, target="persistent://public/default/never")
        world.let_pass(STALL_S + 0.5)
        world.move(2 * entry + 1, target="persistent://public/default/never")
        world.answer(DEAD)
        world.clock.advance(timedelta(days=1))
    logged = [record.getMessage() for record in caplog.records if DEAD in record.getMessage()]
    assert ["did not confirm" in text for text in logged] == [True, False] * 2
    assert not [text for text in logged if "failure 2" in text]
    assert all("works again" in text for text in logged[1::2])


def test_all_messages_wait_if_no_target_answers() -> None:
    world = RelayWorld(in_flight=2)
    world.offer(0)
    world.move(1, target=BILLS)
    world.clock.advance(timedelta(seconds=STALL_S * 3))
    world.settle()
    assert not world.relay.has_room
    assert world.counts(HELD) == (0,)


def test_messages_of_a_throttled_target_wait_and_others_pass() -> None:
    world = RelayWorld(in_flight=8)
    world.move(*range(4), target=BILLS)
    for entry in range(100, 200):
        # It confirms one message in two seconds.
        world.let_pass(0.5)
        if entry % 4 == 0 and world[BILLS].pending:
            world[BILLS].answer(count=1)
        world.move(entry)
        world.answer(ORDERS)
        assert world.relay.has_room
    assert world.counts(HELD) == (0,)
    assert set(world.acknowledged) == {*range(4), *range(100, 200)}


def test_a_slow_target_gets_a_share_of_the_limits() -> None:
    world = RelayWorld(in_flight=8)
    world.move(*range(8), target=BILLS)
    assert not world.relay.has_room
    world.let_pass(SLOW_S + 0.1)
    assert world.relay.has_room, "half of its messages do not count against the limit"
    world.offer(8, target=BILLS)
    world.move(9)
    (held,) = world.to(HELD)
    assert held.properties[REASON] == SLOW
    assert held.given["deliver_at"] == world.clock.now_ms() + 30_000
    assert world.counts(ORDERS, BILLS) == (1, 8)
    world.answer(BILLS, 5)
    world.move(10, target=BILLS)
    assert world.counts(BILLS) == (9,), "within its share, it is not held"


def test_a_slow_target_does_not_use_up_the_memory(
    world: RelayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "IN_FLIGHT_BYTES", 40)  # ten messages of 4 bytes
    world.offer(*range(16), target=BILLS)
    assert not world.relay.has_room
    world.let_pass(SLOW_S + 0.1)
    world.move(16, target=BILLS)
    assert world.counts(HELD) == (1,)
    for entry in (17, 18, 19):
        assert world.relay.has_room
        world.offer(entry)
    assert not world.relay.has_room, "twice the limit is never exceeded"


def test_several_slow_targets_leave_room_for_others() -> None:
    targets = [f"persistent://public/default/slow-{number}" for number in range(5)]
    world = RelayWorld(ORDERS, *targets, in_flight=30)
    for number, target in enumerate(targets):
        world.offer(*range(100 * number, 100 * number + 10), target=target)
    world.let_pass(SLOW_S + 0.1)
    for entry in range(1000, 1005):
        assert world.relay.has_room
        world.offer(entry)
    assert not world.relay.has_room


def test_a_single_target_is_never_held_because_it_is_slow() -> None:
    world = RelayWorld(ORDERS, in_flight=4)
    world.offer(*range(4))
    world.let_pass(STALL_S - 0.5)
    assert not world.relay.has_room
    world.move(4)
    world.answer(ORDERS)
    assert (world.counts(HELD), world.acknowledged) == ((0,), [0, 1, 2, 3, 4])


def test_a_silent_target_is_given_up_when_others_run_out_of_acknowledgements(
    world: RelayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "SCARCE", 3)
    world.offer(*range(4), target=BILLS)
    world.let_pass(STALL_S + 1)
    assert world.counts(HELD) == (4,)
    world.answer(HELD)
    assert world.acknowledged == [0, 1, 2, 3]


# -- clients of targets


def test_each_target_has_its_own_client_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MOST_CLIENTS", 2)
    monkeypatch.setattr(pool, "in_background", lambda work: work())
    made: list[FakeClient] = []

    def make() -> FakeClient:
        made.append(FakeClient())
        return made[-1]

    clients = pool.TargetClients(None, make)
    assert [made.index(clients.of(target)) for target in "abcab"] == [0, 1, 0, 0, 1]
    clients.close()
    assert [client.closed for client in made] == [True, True]
    with pytest.raises(ClientError, match="AlreadyClosed"):
        clients.of("b")  # an opening that took longer: nobody would close another client


def test_targets_have_their_own_clients_and_level_topics_share_one() -> None:
    other = FakeClient()
    world = RelayWorld(target_client={ORDERS: other}.__getitem__)
    world.offer(0)
    world.move(1, due_ms=T0 + 3 * DAY)
    assert (other.topics, world.topics) == ([ORDERS], [f"{LEVEL_TOPIC}-partition-2"])


# -- acknowledgements


def test_only_the_latest_acknowledgements_are_remembered(
    world: RelayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "REMEMBERED", 3)
    world.move(*range(5))
    world.answer(ORDERS)
    world.move(4, 3, 2)
    assert world.counts(ORDERS) == (5,)
    world.move(1)
    assert world.counts(ORDERS) == (6,)


@given(st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=200), st.integers(1, 8))
def test_acknowledgements_leave_few_holes_and_skip_no_message(
    steps: list[tuple[int, bool]], most: int
) -> None:
    slots = [Item(("orders", 7, number, -1), number, None) for number in range(301)]
    order = deque(slots)
    taken: list[int] = []
    for number, give_back in steps:
        # A redelivery of a message that was given back gets another slot.
        if not (slots[number].confirmed or slots[number].given_back):
            slots[number].given_back = give_back
            slots[number].confirmed = not give_back
        for found in take_confirmed(order, most):
            assert found.confirmed
            taken.append(found.message_id)
        if taken:
            open_before = [s for s in slots[: max(taken)] if not (s.confirmed or s.given_back)]
            assert len(open_before) < most or max(taken) <= open_before[most - 1].message_id
    for slot in slots:
        slot.confirmed = slot.confirmed or not slot.given_back
    taken += [found.message_id for found in take_confirmed(order, most)]
    assert sorted(taken) == [slot.message_id for slot in slots if slot.confirmed]
    assert len(order) == 0
