"""Tests of the pool of targets on a client that answers when it is told to."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.port import PartitionStats, SubscriptionStats, TopicMetadata, TopicPolicies
from delaylevel.cluster.publisher import BULK_SETTINGS, KEY_BATCHED_SETTINGS, PRODUCER_SETTINGS
from delaylevel.cluster.targets.pool import TargetKey, TargetPool
from delaylevel.cluster.targets.producer import TargetProducer
from delaylevel.cluster.targets.receivers import NO_RECEIVER, NO_TOPIC, SOME_RECEIVED
from delaylevel.cluster.targets.send_state import Sent
from delaylevel.cluster.threads import HostLoop
from delaylevel.errors import AdminError, BrokerUnreachableError, NotFoundError
from delaylevel.model.message import ParkedMessage
from delaylevel.model.topic_name import TopicName
from support.fakes import FakeAdmin, FakeProducer, PartTimeAdmin

ORDERS = TargetKey("persistent://public/default/orders")
ZERO, ONE = ORDERS._replace(partition=0), ORDERS._replace(partition=1)
PATIENCE_S = 60.0
OK = pulsar.Result.Ok
NOBODY = BrokerUnreachableError("no address of the admin interface answers")
UNSERVED = BrokerUnreachableError("no broker serves it", address="broker")
KEPT = TopicPolicies(delete_while_inactive=False)
Outcomes = list[tuple[int, str]]


class Producer(FakeProducer):
    """An open producer whose messages have no answer until ``answer``."""

    client: Client

    def flush(self) -> None: ...

    def last_sequence_id(self) -> int:
        return self.client.last_sequence_id

    def close(self) -> None:
        self.client.open.remove(self)

    def answer(self, result: Any = OK, ledger: int = 7, *, only: slice = slice(None)) -> None:  # type: ignore[override]
        """Answer messages; all by default."""
        partition = TopicName.parse(self.topic).partition_index
        message_id = pulsar.MessageId(-1 if partition is None else partition, ledger, 1, -1)
        for callback in self.pending[only]:
            callback(result, message_id._msg_id)
        del self.pending[only]


@dataclass
class Client(FakeAdmin):
    """A client, and an admin interface for topics that all exist.

    Attributes:
        away: the error of requests for statistics of some partitions; None if all are served.
        new_partitions: number of partitions that are being added, and have no subscriptions yet.
        subscriptions: those of each topic, or of one partition by index; readers are not durable.
    """

    open: list[Producer] = field(default_factory=list)
    sent: list[Any] = field(default_factory=list)
    refusal: Exception | None = None
    openings: int = 0
    partitions: int = 0
    away: Exception | None = None
    away_partitions: Container[int] = range(2)
    new_partitions: int = 0
    subscriptions: Sequence[str] | dict[int, Sequence[str]] = ("app",)
    replicated: bool = False
    last_sequence_id: int = -1

    def create_producer(self, topic: str, **settings: Any) -> Producer:
        self.openings += 1
        if self.refusal is not None:
            raise self.refusal
        self.open.append(Producer(self, topic, settings))
        return self.open[-1]

    def within(self, timeout_s: float) -> PartTimeAdmin:
        self.impatient = PartTimeAdmin(self)
        return self.impatient

    def partitioned_metadata(self, name: TopicName) -> TopicMetadata:
        return TopicMetadata(self.partitions)

    def partition_stats(self, name: TopicName) -> PartitionStats:
        index = name.partition_index or 0
        if self.away is not None and index in self.away_partitions:
            raise self.away
        names = self.subscriptions
        names = names[index] if isinstance(names, dict) else names
        found = {name: SubscriptionStats(0, durable=name != "reader") for name in names}
        return PartitionStats(0, found, deduplication=True, replicated=self.replicated)

    def partitioned_stats(self, name: TopicName) -> dict[int, PartitionStats]:
        if not self.partitions:
            raise NotFoundError("not partitioned", status=404)
        present = range(self.partitions)
        found = {index: self.partition_stats(name.partition(index)) for index in present}
        new = range(self.partitions, self.partitions + self.new_partitions)
        return found | dict.fromkeys(new, PartitionStats(0, {}, deduplication=True))


class World:
    """A pool of targets, its slow work and its time."""

    def __init__(
        self, name: str = "", patience_s: float = PATIENCE_S, connected: bool = False
    ) -> None:
        self.client = Client()
        self.jobs: list[Callable[[], None]] = []
        self.time_s = 0.0
        self.pool: TargetPool[int] = TargetPool(
            lambda _: self.client,
            self.client,  # type: ignore[arg-type]
            name=name,
            pause_s=lambda _: 10.0,
            patience_s=patience_s,
            loop=HostLoop(self.jobs.append, lambda: self.time_s, connected=lambda: connected),
        )

    @property
    def orders(self) -> TargetProducer[int]:
        return self.pool.producer(ORDERS)

    @property
    def refusal(self) -> str | None:
        return self.pool.refusal(ORDERS.topic, "")

    def send(self, *values: int, key: TargetKey = ORDERS) -> None:
        """Send messages; their sequence IDs are the values."""
        for value in values:
            message = ParkedMessage(1, 1, -1, 0, "", "", 0, {}, b"value")
            number = value if self.pool.numbered else 0
            self.pool.producer(key).put(Sent(value, message, {}, None, number, 5, self.time_s))

    def work(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()

    def outcomes(self) -> Outcomes:
        return [(settled.item.item, settled.outcome.value) for settled in self.pool.poll()]

    def run(self, seconds: float = 0.0, step_s: float = 0.5) -> Outcomes:
        """Do all work for a time, and return the outcomes."""
        found, end_s = [], self.time_s + seconds
        for _ in range(3):
            found += self.outcomes()
            self.work()
        while self.time_s < end_s:
            self.time_s += step_s
            found += self.outcomes()
            self.work()
        return found + self.outcomes()

    def settle(self, value: int, ledger: int = 7, key: TargetKey = ORDERS) -> Outcomes:
        """Send a message, confirm it from a ledger, and return the outcomes after that."""
        self.send(value, key=key)
        found = []
        for _ in range(4):
            found += self.outcomes()
            self.work()
            for producer in self.client.open:
                producer.answer(ledger=ledger)
            self.time_s += 1.5
        return found

    def sent(self, *values: int, key: TargetKey = ORDERS) -> Producer:
        """Send messages that get no answer, and return their producer."""
        self.send(*values, key=key)
        self.run()
        return self.client.open[-1]

    def lost(self, *values: int, key: TargetKey = ORDERS) -> Producer:
        """Return a producer that has lost its connection after it has sent messages."""
        producer = self.sent(*values, key=key)
        producer.connected = False
        return producer

    def await_loss(self) -> None:
        """Let time pass until a broker serves the topic, and the producer is given up."""
        while self.orders.state.is_open:
            self.work()
            self.time_s += 0.5
            assert not self.outcomes()

    def close_idle(self) -> None:
        self.time_s += 10
        self.pool.close_idle()
        self.work()
        assert not self.client.open


@pytest.mark.parametrize("opened", [False, True])
def test_a_producer_that_opens_during_the_close_is_closed(opened: bool) -> None:
    world = World()
    world.orders.open()
    if opened:
        world.work()  # and the pool has not heard of it
    world.pool.close()
    world.work()
    assert (world.client.openings, world.client.open) == (1, [])


def test_a_target_is_tried_again_after_each_pause() -> None:
    world = World()
    world.client.refusal = pulsar.ServiceUnitNotReady("moving")
    world.send(1)
    world.run(PATIENCE_S + 1)
    assert world.refusal
    assert world.client.openings < 50, "with growing pauses"
    openings, world.client.refusal = world.client.openings, None
    world.run(11)
    assert world.refusal is None
    world.send(2)
    world.run()
    assert world.client.openings > openings
    assert world.client.open[0].pending


@pytest.mark.parametrize(("key", "partitions"), [(ONE, 0), (ORDERS, 2)])
def test_a_topic_with_sequence_ids_that_gets_or_loses_partitions_is_gone(
    key: TargetKey, partitions: int
) -> None:
    """Otherwise the client would create a topic for the partition, or mix up their IDs."""
    world = World("name")
    world.client.partitions = partitions
    world.send(1, key=key)
    assert world.run() == [(1, "refused")]
    assert not world.client.openings
    assert world.refusal not in (None, NO_TOPIC), "it exists, so nothing for it may be dropped"


def test_what_is_stored_beside_the_partitions_of_a_new_topic_is_not_received() -> None:
    """A client that reconnects may create a topic without partitions again."""
    world = World()
    producer = world.sent(1)
    world.client.partitions = 2
    producer.answer()
    assert world.run() == [(1, "refused")]


def test_a_target_may_refuse_before_there_are_messages() -> None:
    world = World()
    world.client.subscriptions = ()
    world.orders.open()
    world.run()
    assert world.refusal == NO_RECEIVER


def test_messages_that_are_too_large_together_are_sent_alone() -> None:
    """The client limits a batch by its payloads only, and the broker with all properties."""
    world = World()
    world.settle(1)
    together = world.sent(2, 3, 4)
    together.answer(only=slice(1))
    together.answer(pulsar.Result.MessageTooBig)
    assert world.run() == [(2, "stored")]
    alone = world.client.open[-1]
    assert (together.settings["batching_enabled"], alone.settings["batching_enabled"]) == (
        True,
        False,
    )
    alone.answer(pulsar.Result.MessageTooBig, only=slice(1))
    alone.answer()
    assert sorted(world.run()) == [(3, "refused"), (4, "stored")]
    assert world.refusal is None


@pytest.mark.parametrize("limit", [None, 64 << 10, 1 << 20, 8 << 20])
def test_no_batch_exceeds_the_limit_of_a_topic(limit: int | None) -> None:
    """The client does not know this limit, and would send the batch again and again."""
    world = World()
    world.client.max_message_size = lambda _: limit  # type: ignore[method-assign]
    assert world.sent(1).settings["batching_enabled"] is (limit is None or limit > 5 << 20)


@pytest.mark.parametrize(("letters", "fits"), [("x" * 60_000, True), ("é" * 60_000, False)])
def test_the_limit_of_a_topic_counts_bytes(letters: str, fits: bool) -> None:
    message = ParkedMessage(1, 1, -1, 0, "", "", 0, {}, bytes(30_000))
    assert Sent(1, message, {"name": letters}, None, 0, 30_000, 0.0).exceeds(100_000) is not fits


def test_a_producer_with_unanswered_messages_is_not_forgotten() -> None:
    world = World()
    first = world.sent(1, 2)
    first.answer(pulsar.Result.UnknownError, only=slice(1))
    assert world.outcomes() == [(1, "unknown")]  # the answer to the other one is on its way
    world.time_s += 10
    world.pool.close_idle()
    world.orders.open()
    assert world.sent(3) is first
    first.answer(pulsar.Result.UnknownError)
    world.send(4)
    world.run()
    assert first not in world.client.open


@pytest.mark.parametrize("settings", [PRODUCER_SETTINGS, BULK_SETTINGS, KEY_BATCHED_SETTINGS])
def test_no_clock_ends_a_batch(settings: dict[str, Any]) -> None:
    # With 1 ms, a loop of send_async and flush_async hangs after seconds: see PRODUCER_SETTINGS.
    assert settings["batching_max_publish_delay_ms"] >= 3_600_000


# -- lost connections


@pytest.mark.parametrize(
    ("result", "outcomes"),
    [(OK, ("stored", "stored")), (pulsar.Result.InvalidMessage, ("unknown", "refused"))],
)
def test_a_lost_producer_is_replaced_as_soon_as_a_broker_serves_the_topic(
    result: Any, outcomes: tuple[str, str]
) -> None:
    """The second refusal tells nothing about the first send."""
    world = World()
    lost = world.lost(1, 2)
    world.client.away = UNSERVED
    assert not world.run(20)  # far longer than the pause between two attempts
    assert (world.client.open, world.refusal) == ([lost], None)
    world.client.away = None
    world.await_loss()
    world.send(3)
    assert not world.run(3)
    (found,) = world.client.open
    lost.answer(only=slice(1))  # an answer that came too late counts for nothing
    assert not world.run()
    found.answer(result)
    before, later = outcomes
    assert world.run() == [(1, before), (2, before), (3, later)], "in their order"
    assert world.refusal is None, "that is the fault of the messages"


@pytest.mark.parametrize("last", [1, 2])
def test_with_sequence_ids_only_what_is_not_stored_is_sent_again(last: int) -> None:
    world = World("name")
    world.lost(1, 2, 3)
    world.client.last_sequence_id = last
    assert world.run(8) == [(value, "stored") for value in range(1, last + 1)]
    (found,) = world.client.open
    assert len(found.pending) == 3 - last


def test_a_lost_producer_that_cannot_be_replaced_leaves_its_messages_unknown() -> None:
    """Messages that were sent may be stored; the others are certainly not."""
    world = World()
    world.lost(1, 2)
    world.client.refusal = pulsar.TopicTerminated("terminated")
    world.await_loss()
    world.send(3)
    assert world.run() == [(1, "unknown"), (2, "unknown"), (3, "refused")]


def test_confirmations_of_partitions_do_not_wait_for_one_without_a_connection() -> None:
    world = World()
    world.client.partitions = 2
    world.settle(0)
    lost = world.lost(1, 2, 3, 4, 5)
    world.client.away = UNSERVED
    lost.answer(only=slice(1, None, 2))  # those of the other partition
    assert world.run(0.5) == [(2, "stored"), (4, "stored")]
    lost.answer(ledger=8, only=slice(2, 3))
    assert not world.run(0.5), "nobody could look at the topic with this ledger"
    world.client.away = None
    assert world.run(10) == [(5, "stored")]
    (found,) = world.client.open
    assert len(found.pending) == 2, "only what has no answer is sent again"


def test_a_lost_partition_is_refused_once_and_takes_no_room_from_the_others() -> None:
    world = World("name", patience_s=5.0)
    world.client.partitions = 2
    world.lost(1, 2, 3, 4, 5, key=ZERO)
    healthy = world.sent(1, key=ONE)
    world.client.away, world.client.away_partitions = UNSERVED, {0}
    assert world.pool.load_of(ORDERS.topic, without_lost=True)[0] == 6
    refusals = []
    for value in range(2, 30):
        world.time_s += 0.5
        world.send(value, key=ONE)
        if value == 6:
            assert world.pool.load_of(ORDERS.topic, without_lost=True)[0] == 2
            assert world.pool.load_of(ORDERS.topic)[0] == 7
        healthy.answer()
        world.outcomes()
        world.work()
        refusals.append(world.refusal)
    first = next(index for index, reason in enumerate(refusals) if reason)
    assert all(refusals[first:])


def test_a_target_that_confirms_again_takes_messages_at_once() -> None:
    world = World(patience_s=5.0)
    world.settle(0)
    lost = world.lost(1)
    world.client.away = UNSERVED
    world.run(6)
    assert world.refusal
    lost.answer()
    assert world.outcomes() == [(1, "stored")]
    assert world.refusal is None


def test_a_target_is_not_to_blame_for_a_suspended_process() -> None:
    world = World()
    world.settle(0)
    producer = world.lost(1)
    world.time_s += 1000
    assert not world.run()
    assert world.refusal is None
    producer.answer()
    assert world.outcomes() == [(1, "stored")]


def test_an_opening_does_not_fail_for_a_suspension_of_the_process() -> None:
    world = World(patience_s=5.0)
    world.send(1)
    world.time_s += 1000
    assert not world.run()
    assert world.client.open[0].pending


def test_a_name_that_another_process_holds_is_waited_for() -> None:
    """A broker needs some seconds to notice that the process hangs."""
    world = World("name", patience_s=5.0)
    world.client.refusal = pulsar.ProducerBusy("in use")
    world.send(1)
    assert not world.run(25)
    world.client.refusal = None
    world.run(2)
    assert world.client.open[0].pending


def test_a_name_is_free_only_after_the_last_producer_is_closed() -> None:
    world = World("name")
    world.settle(1)
    world.orders.give_up()
    world.send(2)
    assert not world.outcomes()
    assert len(world.jobs) == 1  # the close
    world.run()
    assert (len(world.client.open), world.client.openings) == (1, 2)


def test_a_throttled_target_keeps_its_producer_while_it_is_connected() -> None:
    world = World(patience_s=5.0)
    world.sent(1)
    assert not world.run(200)
    assert world.refusal is None
    assert world.run(102) == [(1, "unknown")]
    assert world.refusal


# -- receivers


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize(
    ("target", "outcome"),
    [
        ({"subscriptions": ()}, "refused"),
        ({"subscriptions": ("reader",)}, "refused"),
        ({"subscriptions": (), "retains": lambda _: True}, "stored"),
        ({"subscriptions": (), "topic_policies": lambda _: KEPT}, "stored"),
        ({"subscriptions": (), "replicated": True}, "stored"),
    ],
)
def test_a_target_that_nobody_can_receive_from_is_not_written(
    target: dict[str, Any], outcome: str, numbered: bool
) -> None:
    """Nothing is known here of what it had before; it is written once it has a subscription."""
    world = World("name" if numbered else "")
    vars(world.client).update(target)
    assert world.settle(1) == [(1, outcome)]
    assert bool(world.client.openings) is (outcome == "stored")
    assert world.refusal == (NO_RECEIVER if outcome == "refused" else None)
    if outcome == "refused":
        world.orders.resume()
        world.client.subscriptions = ("app",)
        assert world.settle(2) == [(2, "stored")]


def test_each_partition_is_looked_at_by_itself() -> None:
    world = World("name")
    world.client.partitions = 2
    world.client.subscriptions = {0: ("app",), 1: ()}
    assert world.settle(1, key=ZERO) == [(1, "stored")]
    assert world.settle(1, key=ONE) == [(1, "refused")]
    world = World("name")
    world.client.partitions = 2
    world.client.away, world.client.away_partitions = UNSERVED, {0}
    world.send(1, key=ZERO)
    assert world.settle(1, key=ONE) == [(1, "stored")]


def test_messages_wait_until_new_partitions_have_their_subscriptions() -> None:
    world = World()
    world.client.partitions, world.client.new_partitions = 2, 2
    assert world.settle(1) == []
    assert not world.client.openings
    world.client.partitions, world.client.new_partitions = 4, 0
    assert world.settle(2) == [(1, "stored"), (2, "stored")]
    # They may stay without: then the target is refused.
    world = World()
    world.client.partitions = 2
    world.client.subscriptions = {0: ("app",), 1: ()}
    world.send(1)
    assert not world.run(PATIENCE_S - 1)
    assert world.run(3) == [(1, "refused")]
    assert (world.client.openings, world.refusal) == (0, SOME_RECEIVED)


def test_what_is_stored_while_partitions_are_added_is_stored() -> None:
    world = World()
    world.client.partitions = 2
    assert world.settle(1) == [(1, "stored")]
    world.client.new_partitions = 2

    def all_stored(values: range) -> bool:
        found = [each for value in values for each in world.settle(value, ledger=value)]
        return found == [(value, "stored") for value in values]

    assert all_stored(range(2, 20))
    world.client.partitions, world.client.new_partitions = 4, 0
    world.client.subscriptions = {0: ("app",), 1: ("app",), 2: (), 3: ()}
    assert all_stored(range(20, 40))
    world.client.subscriptions = {0: ("app",), 1: (), 2: (), 3: ()}
    assert world.settle(40, ledger=40) == [(40, "refused")]


def test_the_end_of_the_last_subscription_is_noticed_while_messages_are_sent() -> None:
    world = World()
    found = world.settle(1)
    world.client.subscriptions = ()
    for value in range(2, 30):  # each takes some seconds
        found += world.settle(value)
    outcomes = [outcome for _, outcome in found]
    assert outcomes.count("stored") in range(8, 14)
    assert outcomes == sorted(outcomes, reverse=True), "refused from then on"


def test_confirmations_are_verified_before_another_producer_is_opened() -> None:
    world = World()
    world.sent(1).answer()
    assert not world.outcomes()  # the ledger is new, so the topic is looked at
    world.jobs.clear()  # and the admin interface does not answer yet
    world.orders.give_up()
    world.run()
    world.orders.open()
    world.run()
    assert world.client.openings == 1


def test_a_look_verifies_only_what_was_confirmed_before_it() -> None:
    """A later confirmation may be that of a topic that was created again since."""
    world = World()
    producer = world.sent(1, 2)
    producer.answer(only=slice(1))
    assert not world.outcomes()
    producer.answer(ledger=8)
    assert not world.outcomes()
    (look,) = world.jobs
    world.jobs.clear()
    look()
    assert world.outcomes() == [(1, "stored")]


# -- without the admin interface


def known(name: str = "", ledger: int = 7) -> World:
    """Return a world with a closed target that was open, and without the admin interface."""
    world = World(name, connected=True)
    assert world.settle(1, ledger) == [(1, "stored")]
    world.close_idle()
    world.client.away = NOBODY
    return world


@pytest.mark.parametrize("name", ["", "name"])
@pytest.mark.parametrize("hangs", [False, True])
def test_a_known_target_is_opened_soon_without_the_admin_interface(name: str, hangs: bool) -> None:
    world = known(name)
    if hangs:
        world.client.away = AssertionError("an opening waits for the whole timeout")
        world.client.impatient.failure = NOBODY
    for value in (2, 3):
        assert world.settle(value) == [(value, "stored")]
        world.close_idle()


def test_one_ledger_that_is_known_does_not_verify_the_others() -> None:
    world = World()
    world.settle(1)
    producer = world.sent(2, 3)
    world.client.away = NOBODY
    producer.answer(ledger=8, only=slice(1))
    producer.answer()
    looks = 0
    for _ in range(100):
        assert not world.outcomes()
        looks += len(world.jobs)
        world.work()
        world.time_s += 0.05
    assert looks < 10, "not again and again"
    world.client.away = None
    assert world.run(2) == [(2, "stored"), (3, "stored")]
    world.client.away = NOBODY
    assert world.settle(4, ledger=8) == [(4, "stored")], "the new ledger is known now"
    assert world.settle(5) == [(5, "stored")], "as is the old one"


def test_a_topic_that_was_created_again_meanwhile_keeps_nothing() -> None:
    world = known()
    world.settle(2, ledger=8)
    world.client.away = NotFoundError("no such topic", status=404)
    assert world.settle(3, ledger=8)[0] == (2, "refused")


@pytest.mark.parametrize("why", ["new", "no ledger", "no receiver", "not connected", "not served"])
def test_other_targets_wait_for_the_admin_interface(why: str) -> None:
    """Those without a ledger that had receivers, and all while brokers do not serve them or us."""
    world = World(connected=why != "not connected")
    if why == "no ledger":
        world.orders.open()
        world.run()
        world.close_idle()
    elif why == "no receiver":
        world.settle(0)
        world.client.subscriptions = ()
        assert world.settle(1, ledger=8) == [(1, "refused")]
        world.client.subscriptions = ("app",)
    elif why != "new":
        world.settle(1)
        world.close_idle()
    world.client.away = UNSERVED if why == "not served" else NOBODY
    openings = world.client.openings
    assert not world.settle(2)
    assert world.client.openings == openings
    world.client.away = None
    assert world.settle(3) == [(2, "stored"), (3, "stored")]


@pytest.mark.parametrize(
    ("question", "error"),
    [("retains", NOBODY), ("topic_policies", AdminError("no gateway", status=502))],
)
def test_an_unknown_policy_is_not_nobody(
    question: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = known()
    world.client.away, world.client.subscriptions = None, ()

    def away(_: TopicName) -> bool:
        raise error

    monkeypatch.setattr(world.client, question, away)
    assert world.settle(2) == [(2, "stored")]


def test_a_sequence_id_of_a_new_topic_settles_nothing() -> None:
    """The client created the topic again when it reconnected, and its confirmation was lost."""
    world = World("name", connected=True)
    world.settle(1)
    world.lost(2)
    world.client.away, world.client.last_sequence_id = NOBODY, 2
    assert not world.run(100)
    # The broker drops the message that it has, and reports no position.
    (again,) = world.client.open
    assert again.pending
    again.answer(ledger=-1)
    assert not world.run(8), "nobody knows yet if it is the same topic"
    world.client.away, world.client.subscriptions = None, ()
    assert world.run(5) == [(2, "refused")]


@pytest.mark.parametrize(("last", "outcome"), [(1, "refused"), (2, "stored")])
@pytest.mark.parametrize("opened", [False, True])
def test_a_target_with_messages_of_an_earlier_process_waits_for_the_admin_interface(
    last: int, outcome: str, opened: bool
) -> None:
    world = known("name")
    openings = world.client.openings
    if opened:
        world.orders.open()
        world.work()  # it is open as it was before, and the producer has not heard of it
    world.orders.recall(2, 2)
    assert not world.run(15)
    assert world.client.openings == openings + opened
    assert not world.client.open
    world.client.away, world.client.last_sequence_id = None, last
    assert world.run(6) == [(2, outcome)]
    assert world.refusal is None


def test_a_deduplicated_message_is_perhaps_known_by_a_new_topic() -> None:
    """The client's second reconnect sends it to the topic that the first one has created."""
    world = World("name")
    assert world.settle(1) == [(1, "stored")]
    assert world.settle(2, ledger=-1) == [(2, "stored")], "it is the same topic"
    world.client.subscriptions = ()
    assert world.settle(3, ledger=-1) == [(3, "refused")]
