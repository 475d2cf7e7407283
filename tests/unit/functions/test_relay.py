"""Tests of the Function's relay with a scripted client, and of its pure parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.cluster.targets.opener import STALL_S
from delaylevel.cluster.targets.pool import TargetClients
from delaylevel.cluster.targets.producer import GIVE_UP_S
from delaylevel.cluster.targets.receivers import NO_RECEIVER
from delaylevel.errors import BrokerUnreachableError, UpgradeRequiredError
from delaylevel.functions import relay as relay_module
from delaylevel.functions.relay import SLOW, SLOW_S, Item, RecentIds, Relay, take_confirmed
from delaylevel.model.envelope import (
    ATTEMPT,
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


class Stored(NamedTuple):
    """The ID that the client reports for a message that is stored."""

    ledger: int

    def ledger_id(self) -> int:
        return self.ledger

    def partition(self) -> int:
        return -1


class RelayProducer(FakeProducer):
    """A producer that confirms only on ``answer``, and refuses large messages as the client does.

    The producers that store chunks are the ones without batches: they confirm on ``flush``.
    """

    def send_async(self, value: bytes | None, callback: Any, **given: Any) -> None:
        world = self.client
        assert isinstance(world, RelayWorld)
        if len(value or b"") > world.limits.get(self.topic, 1 << 30):
            callback(pulsar.Result.MessageTooBig, None)
        else:
            super().send_async(value, callback, **given)

    def flush(self) -> None:
        if not self.settings["batching_enabled"]:
            super().flush()


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
        self.limits: dict[str, int] = {}  # of a message, in bytes
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


def test_refused_messages_are_held_for_the_pause_and_others_are_sent(
    world: RelayWorld,
) -> None:
    relay = world.relay()
    relay.offer(parked(0, target=BILLS))
    relay.offer(parked(1))
    settle(relay)
    world[BILLS].answer(pulsar.Result.TopicTerminated)
    world[ORDERS].answer()
    settle(relay)
    assert world.acknowledged == [1]
    held = world[HELD].sent[0].given
    assert held["deliver_at"] == T0 + 30_000
    assert held["properties"][ATTEMPT] == "1"
    assert held["properties"][REASON] == "TopicTerminated"
    world[HELD].answer()
    settle(relay)
    assert world.acknowledged == [1, 0]

    # After the pause, the relay tries the target again with a new producer.
    relay.offer(parked(2, target=BILLS))
    settle(relay)
    assert len(world[HELD].sent) == 2
    assert world.opened(BILLS) == 1
    assert world.closings == [BILLS]
    world.advance(30)
    back = received(3, held["properties"], topic=HELD, published_ms=T0)
    relay.offer(back)
    settle(relay)
    assert world.opened(BILLS) == 2
    assert world[BILLS].sent[0].properties[ID].endswith("partition-0:7:0:-1"), "another ID"
    assert ATTEMPT not in world[BILLS].sent[0].properties


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


def test_a_message_that_was_given_back_is_sent_on_redelivery(world: RelayWorld) -> None:
    relay = world.relay()
    relay.offer(parked(0, due_ms=T0 + 3 * DAY))
    settle(relay)
    (again,) = world.topics
    world[again].answer(pulsar.Result.Timeout)
    settle(relay)
    assert world.given_back == [0]
    relay.offer(parked(0, due_ms=T0 + 3 * DAY))
    settle(relay)
    world[again].answer()
    settle(relay)
    assert world.acknowledged == [0]


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


def test_a_target_that_confirms_nothing_is_held_after_the_stall_time(
    world: RelayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_broker_serves_it(_: object) -> None:
        raise BrokerUnreachableError("the broker does not answer")

    relay = world.relay()
    relay.offer(parked(0, target=BILLS))
    settle(relay)
    world[BILLS].connected = False  # a throttled target keeps its connection, and is not held
    monkeypatch.setattr(world.admin, "partition_stats", no_broker_serves_it)
    world.pass_time(relay, STALL_S + 0.5)
    relay.offer(parked(1, target=BILLS))
    settle(relay)
    (held,) = world.to(HELD)
    assert held.properties[REASON] == "1 messages are not confirmed"
    world[HELD].answer()
    settle(relay)
    assert world.acknowledged == [1]
    # Its own message is in flight: the relay waits before it gives it up.
    world.pass_time(relay, GIVE_UP_S - STALL_S)
    assert len(world.to(HELD)) == 2
    world[HELD].answer()
    settle(relay)
    assert world.acknowledged == [1, 0]


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


def test_confirmations_of_a_deleted_target_are_worth_nothing(world: RelayWorld) -> None:
    relay = world.relay()
    relay.offer(parked(0))
    settle(relay)
    world[ORDERS].answer(message_id=Stored(5))
    settle(relay)
    assert world.acknowledged == [0]
    relay.offer(parked(1))
    settle(relay)
    # The client creates the topic again: it has no subscriptions, and other ledgers.
    world.admin.subscriptions[ORDERS] = set()
    world[ORDERS].answer(message_id=Stored(9))
    settle(relay)
    assert world.acknowledged == [0]
    (held,) = world.to(HELD)
    assert held.properties[REASON] == NO_RECEIVER
    world[HELD].answer()
    settle(relay)
    assert world.acknowledged == [0, 1]
    # It is written again when its subscriptions are back.
    world.advance(30)
    relay.offer(parked(2))
    settle(relay)
    assert world.opened(ORDERS) == 1
    world.admin.subscriptions[ORDERS] = {"billing"}
    world.advance(30)
    relay.offer(parked(3))
    settle(relay)
    assert world.opened(ORDERS) == 2


def test_a_message_too_large_for_dead_letters_in_every_form_is_given_back(
    world: RelayWorld,
) -> None:
    world.limits |= {ORDERS: 3, DEAD: 3}
    relay = world.relay()
    for number in range(2):  # the others go on
        relay.offer(parked(number))
        for _ in range(3):
            settle(relay)
    assert world.acknowledged == []
    assert world.given_back == [0, 1]


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
