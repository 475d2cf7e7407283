"""Tests of the Function's relay with a scripted client, and of its pure parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.cluster.targets.opener import STALL_S
from delaylevel.cluster.targets.pool import TargetClients
from delaylevel.errors import BrokerUnreachableError, UpgradeRequiredError
from delaylevel.functions import relay as relay_module
from delaylevel.functions.relay import SLOW, SLOW_S, Item, RecentIds, Relay, take_confirmed
from delaylevel.model.envelope import (
    DUE,
    ID,
    REASON,
    TARGET,
)
from delaylevel.model.level_topic import (
    FinalWindow,
    LevelTopicDescription,
    Mover,
)
from delaylevel.model.position import Position
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.testing import ManualClock
from support.fakes import FakeAdmin, FakeClient, FakeMessage, FakeMessageId, FakeProducer

T0 = 1_800_000_000_000
DAY = 86_400_000
ORDERS = "persistent://public/default/orders"
BILLS = "persistent://public/default/bills"
LEVEL_TOPIC = "persistent://public/default/orders-delay-level"
FIRST = f"{LEVEL_TOPIC}-partition-0"
HELD = f"{LEVEL_TOPIC}-held-partition-0"
DEAD = f"{LEVEL_TOPIC}-DLQ-partition-0"
OK = pulsar.Result.Ok
LEVELS = Levels([PartitionStrategy(maximum_delay=timedelta(days=5))])


class RelayProducer(FakeProducer):
    """A producer that confirms only on ``answer``."""

    def flush(self) -> None: ...


class RelayWorld(FakeClient):
    """Fake client, consumer, admin interface and clock for a relay."""

    def __init__(self, **description: Any) -> None:
        super().__init__()
        self.admin = FakeAdmin()
        self.clock = ManualClock(T0)
        self.acknowledged: list[int] = []
        self.given_back: list[int] = []
        self.description = LevelTopicDescription(
            LEVEL_TOPIC,
            LEVELS,
            (ORDERS, BILLS),
            Mover.FUNCTION,
            description.pop("final_window", FinalWindow.BROKER),
            hold_pause_ms=30_000,
            **description,
        )
        self.openings: list[Callable[[], None]] = []
        self.describe: Callable[[], LevelTopicDescription] | None = None

    def relay(self, *, later: bool = False, in_flight: int = 2000, **more: Any) -> Relay:
        return Relay(
            self,
            self.admin,  # type: ignore[arg-type]
            self.description,
            self,
            clock=self.clock,
            describe=self.describe,
            in_flight=in_flight,
            start=self.openings.append if later else lambda work: work(),
            now_s=lambda: self.clock.now_ms() / 1000,
            **more,
        )

    def create_producer(self, topic: str, **settings: Any) -> FakeProducer:
        if topic in self.refusals:
            raise self.refusals[topic]
        self.producers.append(RelayProducer(self, topic, settings))
        return self.producers[-1]

    def advance(self, seconds: float) -> None:
        self.clock.advance(timedelta(seconds=seconds))

    def pass_time(self, relay: Relay, seconds: float) -> None:
        """Advance the clock while the relay is polled, as it is all the time."""
        for _ in range(round(seconds * 10)):
            self.advance(0.1)
            relay.poll()

    def acknowledge(self, message_id: FakeMessageId) -> None:
        self.acknowledged.append(message_id.entry_id())

    def negative_acknowledge(self, message_id: FakeMessageId) -> None:
        self.given_back.append(message_id.entry_id())


@pytest.fixture
def world() -> RelayWorld:
    return RelayWorld()


def received(
    entry: int, given: dict[str, str], topic: str = FIRST, published_ms: int = T0 - DAY
) -> FakeMessage:
    """Return a message of a level or held partition."""
    place = FakeMessageId(Position(7, entry))
    return FakeMessage(place, b"body", given, topic, published_ms, order="", event_ms=5)


def parked(
    entry: int, due_ms: int = T0 + 3_600_000, target: str = ORDERS, **more: Any
) -> FakeMessage:
    return received(entry, {DUE: str(due_ms), TARGET: target, "mine": "1"}, **more)


def settle(relay: Relay) -> None:
    """Poll until producers are open, and messages that were set aside are sent."""
    for _ in range(4):
        relay.poll()


def test_a_message_is_acknowledged_only_after_its_confirmation(world: RelayWorld) -> None:
    relay = world.relay()
    for entry in range(3):
        relay.offer(parked(entry))
    settle(relay)
    assert world.acknowledged == []
    assert relay.in_flight == 3
    world[ORDERS].answer(count=2)
    settle(relay)
    assert world.acknowledged == [0, 1]
    world[ORDERS].answer()
    settle(relay)
    assert world.acknowledged == [0, 1, 2]
    assert (relay.in_flight, relay.unacknowledged) == (0, 0)
    sent = world[ORDERS].sent[0]
    options = sent.given
    assert sent.value == b"body"
    assert options["deliver_at"] == T0 + 3_600_000
    assert (options["partition_key"], options["event_timestamp"]) == ("key", 5)
    assert options["properties"] == {
        "mine": "1",
        DUE: str(T0 + 3_600_000),
        TARGET: ORDERS,
        ID: "public/default/orders-delay-level-partition-0:7:0:-1",
    }
    assert relay.take_report().window == 3


def test_a_later_format_stops_the_relay(world: RelayWorld) -> None:
    reads = []

    def describe() -> LevelTopicDescription:
        reads.append(world.clock.now_ms())
        if len(reads) > 1:
            raise UpgradeRequiredError("format 9")
        return world.description

    world.describe = describe
    relay = world.relay()
    world.pass_time(relay, 100)
    assert len(reads) == 1
    with pytest.raises(UpgradeRequiredError, match="format 9"):
        world.pass_time(relay, 100)
    assert len(reads) == 2


def test_a_target_added_later_is_looked_up_once(world: RelayWorld) -> None:
    added = "persistent://public/default/added"
    reads = 0

    def describe() -> LevelTopicDescription:
        nonlocal reads
        reads += 1
        return replace(world.description, targets=(ORDERS, added))

    world.describe = describe
    relay = world.relay()
    relay.offer(parked(0, target=added, published_ms=T0 - 1000))
    relay.offer(parked(1, target=added, published_ms=T0 - 1000))
    settle(relay)
    assert len(world[added].sent) == 2
    relay.offer(parked(2, target=added))
    settle(relay)
    assert (len(world[added].sent), reads) == (3, 1)


def test_a_target_is_unknown_only_by_a_read_that_began_after_the_arrival(
    world: RelayWorld,
) -> None:
    added = "persistent://public/default/added"
    descriptions = [world.description, replace(world.description, targets=(ORDERS, added))]
    world.describe = lambda: descriptions.pop(0)
    relay = world.relay()
    # Publish times are those of a clock that is far behind; they do not matter.
    relay.offer(parked(0, target=added, published_ms=T0 - DAY))
    settle(relay)
    assert len(world[DEAD].sent) == 1
    world.advance(1)
    relay.offer(parked(1, target=added, published_ms=T0 - DAY))
    settle(relay)
    assert len(world[added].sent) == 1
    assert len(world[DEAD].sent) == 1
    assert descriptions == []


def test_unknown_targets_cause_one_read_for_all_that_wait(world: RelayWorld) -> None:
    reads: list[int] = []

    def describe() -> LevelTopicDescription:
        reads.append(world.clock.now_ms())
        return world.description

    world.describe = describe
    relay = world.relay()
    for entry in range(500):
        relay.offer(parked(entry, target=f"persistent://public/default/never-{entry}"))
    relay.offer(parked(500))
    settle(relay)
    assert len(reads) == 1
    assert (len(world[DEAD].sent), len(world[ORDERS].sent)) == (500, 1)
    relay.offer(parked(501, target="persistent://public/default/never"))
    settle(relay)
    assert len(reads) == 1, "the next read has to wait a moment"
    world.pass_time(relay, 0.3)
    assert (len(reads), len(world[DEAD].sent)) == (2, 501)


def test_a_message_is_given_back_if_the_description_cannot_be_read(world: RelayWorld) -> None:
    def describe() -> LevelTopicDescription:
        raise BrokerUnreachableError("no broker answers")

    world.describe = describe
    relay = world.relay()
    relay.offer(parked(0, target="persistent://public/default/added", published_ms=T0))
    relay.offer(parked(1))
    settle(relay)
    world[ORDERS].answer()
    settle(relay)
    assert (world.given_back, world.acknowledged) == ([0], [1])
    assert relay.unacknowledged == 0


def test_other_messages_are_sent_while_a_producer_opens(world: RelayWorld) -> None:
    relay = world.relay(later=True)
    relay.offer(parked(0, target=BILLS))
    relay.offer(parked(1))
    settle(relay)
    world.openings[1]()
    settle(relay)
    world[ORDERS].answer()
    settle(relay)
    assert world.acknowledged == [1]
    world.openings[0]()
    settle(relay)
    world[BILLS].answer()
    settle(relay)
    assert world.acknowledged == [1, 0]


def test_a_silent_target_does_not_block_the_others(world: RelayWorld) -> None:
    relay = world.relay(in_flight=4)
    for entry in range(4):
        relay.offer(parked(entry, target=BILLS))
    relay.offer(parked(4))
    settle(relay)
    assert not relay.has_room
    world.advance(0.2)
    world[ORDERS].answer()
    world.advance(STALL_S)
    settle(relay)
    assert relay.has_room, "messages for the silent target count against the limit"
    relay.offer(parked(5, target=BILLS))
    settle(relay)
    assert len(world[BILLS].sent) == 4
    assert len(world[HELD].sent) == 1


def test_all_messages_wait_if_no_target_answers(world: RelayWorld) -> None:
    relay = world.relay(in_flight=2)
    relay.offer(parked(0))
    relay.offer(parked(1, target=BILLS))
    settle(relay)
    world.advance(STALL_S * 3)
    settle(relay)
    assert not relay.has_room
    assert HELD not in world.topics


def test_a_redelivery_of_a_message_in_flight_is_not_sent(world: RelayWorld) -> None:
    relay = world.relay()
    relay.offer(parked(0))
    relay.offer(parked(0))
    settle(relay)
    assert len(world[ORDERS].sent) == 1
    world[ORDERS].answer()
    settle(relay)
    assert world.acknowledged == [0]
    assert (relay.in_flight, relay.unacknowledged) == (0, 0)
    assert relay.take_report().duplicates == 1


def test_a_redelivery_after_the_acknowledgement_is_acknowledged_and_not_sent(
    world: RelayWorld,
) -> None:
    relay = world.relay()
    relay.offer(parked(0))
    settle(relay)
    world[ORDERS].answer()
    settle(relay)
    relay.offer(parked(0))
    relay.offer(parked(0, topic=HELD))  # another message
    settle(relay)
    assert len(world[ORDERS].sent) == 2
    assert world.acknowledged == [0, 0]
    assert relay.take_report().duplicates == 1
    assert (relay.in_flight, relay.unacknowledged) == (1, 1)


def test_only_the_latest_ids_are_remembered() -> None:
    remembered = RecentIds(3)
    for number in range(7):
        remembered.add(number)
        assert number in remembered
    assert [number for number in range(7) if number in remembered] == [3, 4, 5, 6]


def test_each_target_has_its_own_client_up_to_a_limit() -> None:
    made: list[FakeClient] = []

    def make() -> FakeClient:
        made.append(FakeClient())
        return made[-1]

    clients = TargetClients(make, most=2, start=lambda work: work())
    assert [made.index(clients.of(target)) for target in "abcab"] == [0, 1, 0, 0, 1]
    clients.close()
    assert [client.closed for client in made] == [True, True]
    assert clients.of("b") is made[2]


def test_targets_have_their_own_clients_and_level_topics_share_one(world: RelayWorld) -> None:
    other = FakeClient()
    relay = world.relay(target_client={ORDERS: other}.__getitem__)
    relay.offer(parked(0))
    relay.offer(parked(1, due_ms=T0 + 3 * DAY))
    settle(relay)
    assert other.topics == [ORDERS]
    assert world.topics == [f"{LEVEL_TOPIC}-partition-2"]


def test_messages_of_a_throttled_target_wait_and_others_pass(world: RelayWorld) -> None:
    relay = world.relay(in_flight=8)
    for entry in range(4):
        relay.offer(parked(entry, target=BILLS))
    settle(relay)
    for entry in range(100, 200):
        # BILLS confirms one message in two seconds.
        world.pass_time(relay, 0.5)
        if entry % 4 == 0 and world[BILLS].pending:
            world[BILLS].answer(count=1)
        relay.offer(parked(entry))
        settle(relay)
        world[ORDERS].answer()
        settle(relay)
        assert relay.has_room
    assert not world.to(HELD)
    assert set(world.acknowledged) == {*range(4), *range(100, 200)}


def test_a_slow_target_gets_a_share_of_the_limits(world: RelayWorld) -> None:
    relay = world.relay(in_flight=8)
    for entry in range(8):
        relay.offer(parked(entry, target=BILLS))
    settle(relay)
    assert not relay.has_room
    world.pass_time(relay, SLOW_S + 0.1)
    assert relay.has_room, "half of its messages do not count against the limit"
    relay.offer(parked(8, target=BILLS))
    relay.offer(parked(9))
    settle(relay)
    (held,) = world.to(HELD)
    assert held.properties[REASON] == SLOW
    assert held.given["deliver_at"] == world.clock.now_ms() + 30_000
    assert len(world[ORDERS].sent) == 1
    assert len(world[BILLS].sent) == 8
    world[BILLS].answer(count=5)
    settle(relay)
    relay.offer(parked(10, target=BILLS))
    relay.poll()
    assert len(world[BILLS].sent) == 9, "within its share, it is not held"


def test_a_slow_target_does_not_use_up_the_memory(
    world: RelayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "IN_FLIGHT_BYTES", 40)  # ten messages of 4 bytes
    relay = world.relay()
    for entry in range(10):
        relay.offer(parked(entry, target=BILLS))
    assert not relay.has_room
    world.pass_time(relay, SLOW_S + 0.1)
    assert relay.has_room
    relay.offer(parked(10, target=BILLS))
    settle(relay)
    assert len(world.to(HELD)) == 1
    for entry in range(11, 20):
        relay.offer(parked(entry))
    assert not relay.has_room, "twice the limit is never exceeded"


def test_several_slow_targets_leave_room_for_others() -> None:
    targets = [f"persistent://public/default/slow-{number}" for number in range(5)]
    world = RelayWorld()
    world.description = replace(world.description, targets=(ORDERS, *targets))
    relay = world.relay(in_flight=30)
    for number, target in enumerate(targets):
        for entry in range(10):
            relay.offer(parked(100 * number + entry, target=target))
    world.pass_time(relay, SLOW_S + 0.1)
    for entry in range(1000, 1005):
        assert relay.has_room
        relay.offer(parked(entry))
    assert not relay.has_room
    for target in targets:
        relay.offer(parked(2000, target=target))


def test_a_single_target_is_never_held_because_it_is_slow() -> None:
    world = RelayWorld()
    world.description = replace(world.description, targets=(ORDERS,))
    relay = world.relay(in_flight=4)
    for entry in range(4):
        relay.offer(parked(entry))
    world.pass_time(relay, STALL_S - 0.5)
    assert not relay.has_room
    relay.offer(parked(4))
    settle(relay)
    assert not world.to(HELD)
    world[ORDERS].answer()
    settle(relay)
    assert world.acknowledged == [0, 1, 2, 3, 4]


def test_a_silent_target_is_given_up_when_others_run_out_of_acknowledgements(
    world: RelayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "SCARCE", 3)
    relay = world.relay()
    for entry in range(4):
        relay.offer(parked(entry, target=BILLS))
    world.pass_time(relay, STALL_S + 0.5)
    world.pass_time(relay, 0.5)
    assert len(world.to(HELD)) == 4
    world[HELD].answer()
    settle(relay)
    assert world.acknowledged == [0, 1, 2, 3]


def test_a_level_that_does_not_answer_gets_messages_again_once_it_does(world: RelayWorld) -> None:
    level = f"{LEVEL_TOPIC}-partition-2"
    world.refusals[level] = pulsar.ConnectError("nothing answers")
    relay = world.relay()
    relay.offer(parked(0, due_ms=T0 + 3 * DAY + 20_000))
    world.pass_time(relay, STALL_S - 1)
    assert world.given_back == [], "it may be served in a moment"
    world.pass_time(relay, 2)
    assert world.given_back == [0]
    relay.offer(parked(1, due_ms=T0 + 3 * DAY + 20_000))
    settle(relay)
    assert world.given_back == [0, 1]
    world.refusals.clear()
    relay.offer(parked(2, due_ms=T0 + 3 * DAY + 20_000))
    world.pass_time(relay, 1)
    relay.offer(parked(3, due_ms=T0 + 3 * DAY + 20_000))
    world.pass_time(relay, 1)
    relay.offer(parked(0, due_ms=T0 + 3 * DAY + 20_000))
    settle(relay)
    assert world[level].sent
    world[level].answer()
    settle(relay)
    assert 0 in world.acknowledged
    assert relay.in_flight == 0


@given(st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=200), st.integers(1, 8))
def test_acknowledgements_leave_few_holes_and_skip_no_message(
    steps: list[tuple[int, bool]], most: int
) -> None:
    slots = [Item("orders", number, None, ("orders", 7, number, -1)) for number in range(301)]
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
