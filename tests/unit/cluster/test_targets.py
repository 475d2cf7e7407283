"""Tests of the pool of targets on a client that answers when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.port import PartitionStats, SubscriptionStats, TopicMetadata, TopicPolicies
from delaylevel.cluster.publisher import BULK_SETTINGS, KEY_BATCHED_SETTINGS, PRODUCER_SETTINGS
from delaylevel.cluster.targets import receivers
from delaylevel.cluster.targets.opener import Opened
from delaylevel.cluster.targets.pool import TargetKey, TargetPool
from delaylevel.cluster.targets.producer import Flushes
from delaylevel.cluster.targets.receivers import NO_RECEIVER, SOME_RECEIVED
from delaylevel.cluster.targets.send_state import EntryOutcomes, Sent
from delaylevel.cluster.threads import HostLoop
from delaylevel.errors import BrokerUnreachableError, NotFoundError
from delaylevel.model.message import ParkedMessage
from delaylevel.model.topic_name import TopicName

ORDERS = TargetKey("persistent://public/default/orders")
PATIENCE_S = 60.0


@dataclass(eq=False)
class Producer:
    client: Client
    topic: str
    settings: dict[str, Any]
    sent: list[tuple[bytes, Callable[[Any, Any], Any]]] = field(default_factory=list)

    def send_async(self, value: bytes, callback: Callable[[Any, Any], Any], **_: Any) -> None:
        self.sent.append((value, callback))

    def flush(self) -> None: ...

    def is_connected(self) -> bool:
        return True

    def last_sequence_id(self) -> int:
        return self.client.last_sequence_id

    def close(self) -> None:
        self.client.connected.remove(self)


@dataclass
class Client:
    """A client, and an admin interface for topics that all exist.

    Attributes:
        connected: the producers that are not closed.
        refusal: the error of each opening; None for a success.
        away: the error of requests for statistics of some partitions; None if all are served.
        new_partitions: number of partitions that are being added, and have no subscriptions yet.
        subscriptions: the durable subscriptions of each topic, or those of one partition by index.
        retained: True if the topics have a retention.
        kept: True if their own policies keep them without subscriptions.
        replicated: True if their messages are copied to another cluster.
        readers: number of readers of each topic.
        last_sequence_id: the last sequence ID that each topic has stored.
    """

    connected: list[Producer] = field(default_factory=list)
    refusal: Exception | None = None
    openings: int = 0
    partitions: int = 0
    away: Exception | None = None
    away_partitions: Container[int] = range(2)
    new_partitions: int = 0
    subscriptions: Sequence[str] | dict[int, Sequence[str]] = ("app",)
    retained: bool = False
    kept: bool = False
    replicated: bool = False
    readers: int = 0
    last_sequence_id: int = -1

    def create_producer(self, topic: str, **settings: Any) -> Producer:
        self.openings += 1
        if self.refusal is not None:
            raise self.refusal
        producer = Producer(self, topic, settings)
        self.connected.append(producer)
        return producer

    def topic_exists(self, name: TopicName) -> bool:
        return True

    def partitioned_metadata(self, name: TopicName) -> TopicMetadata:
        return TopicMetadata(self.partitions)

    def partition_stats(self, name: TopicName) -> PartitionStats:
        if self.away is not None and (name.partition_index or 0) in self.away_partitions:
            raise self.away
        names = self.subscriptions
        if isinstance(names, dict):
            names = names[name.partition_index or 0]
        found = dict.fromkeys(names, SubscriptionStats(0, None, "Shared", True, ()))
        for number in range(self.readers):
            found[f"reader-{number}"] = SubscriptionStats(0, None, "Exclusive", durable=False)
        return PartitionStats(0, found, deduplication=True, replicated=self.replicated)

    def retains(self, name: TopicName) -> bool:
        return self.retained

    def topic_policies(self, name: TopicName) -> TopicPolicies:
        return TopicPolicies(delete_while_inactive=False if self.kept else None)

    def partitioned_stats(self, name: TopicName) -> dict[int, PartitionStats]:
        if not self.partitions:
            raise NotFoundError("not partitioned", status=404)
        found = {
            index: self.partition_stats(name.partition(index)) for index in range(self.partitions)
        }
        new = range(self.partitions, self.partitions + self.new_partitions)
        return found | dict.fromkeys(new, PartitionStats(0, {}, deduplication=True))

    def max_message_size(self, name: TopicName) -> int | None:
        return None


class World:
    """A pool of targets, its slow work and its time."""

    def __init__(
        self, name: str = "", patience_s: float = PATIENCE_S, connected: bool = False
    ) -> None:
        self.client = Client()
        self.jobs: list[Callable[[], None]] = []
        self.time_s = 0.0
        self.loop = HostLoop(self.jobs.append, lambda: self.time_s)
        self.pool: TargetPool[int] = TargetPool(
            lambda _: self.client,
            self.client,  # type: ignore[arg-type]
            name=name,
            pause_s=lambda: 10.0,
            patience_s=patience_s,
            connected=lambda: connected,
            loop=self.loop,
        )

    def send(self, item: int, key: TargetKey = ORDERS, number: int = 0) -> None:
        self.pool.producer(key).put(Sent(item, message(), {}, None, number, 5, self.time_s))

    def work(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()

    def outcomes(self) -> list[tuple[int, str]]:
        return [(settled.item.item, settled.outcome.value) for _, settled in self.pool.poll()]


def message(value: bytes = b"value", **properties: str) -> ParkedMessage:
    return ParkedMessage(1, 1, -1, 0, "", "", 0, properties, value)


def test_a_producer_that_opens_during_the_close_is_closed() -> None:
    world = World()
    world.pool.producer(ORDERS).open()
    world.work()  # it is open, and the pool has not heard of it
    assert world.client.connected
    world.pool.close()
    world.work()
    assert not world.client.connected


def test_a_target_is_tried_again_after_each_pause() -> None:
    world = World()
    world.client.refusal = pulsar.ServiceUnitNotReady("moving")
    world.send(1)
    while world.pool.refusal(ORDERS.topic, "") is None:
        world.work()
        world.outcomes()
        world.time_s += 0.5
    world.work()
    world.outcomes()
    world.client.refusal = None
    openings = world.client.openings
    world.time_s += 10.5  # the pause is over
    world.outcomes()
    assert world.pool.refusal(ORDERS.topic, "") is None
    world.send(2)
    for _ in range(3):
        world.outcomes()
        world.work()
    assert world.client.openings > openings
    assert world.client.connected[0].sent


def test_no_topic_is_created_for_a_partition_that_is_gone() -> None:
    world = World("name")
    key = ORDERS._replace(partition=3)
    world.send(1, key, 1)
    world.outcomes()
    world.work()
    assert world.outcomes() == [(1, "refused")]
    assert not world.client.openings


def test_a_stalled_partition_is_refused_once_while_another_confirms() -> None:
    world = World("name", patience_s=5.0)
    world.client.partitions = 2
    keys = [ORDERS._replace(partition=index) for index in range(2)]
    for number, key in enumerate(keys, 1):
        world.send(number, key, number)
    for _ in range(3):
        world.outcomes()
        world.work()
    stalled, healthy = world.client.connected
    stalled.is_connected = lambda: False  # type: ignore[method-assign]
    world.client.away = BrokerUnreachableError("the broker does not answer")
    world.client.away_partitions = {0}
    refusals: list[str | None] = []
    for number in range(3, 30):
        world.time_s += 0.5
        world.send(number, keys[1], number)
        for _, callback in healthy.sent:
            callback(pulsar.Result.Ok, None)
        healthy.sent.clear()
        world.outcomes()
        world.work()
        refusals.append(world.pool.refusal(ORDERS.topic, ""))
    first = next(index for index, reason in enumerate(refusals) if reason)
    assert all(refusals[first:])


def test_confirmations_are_verified_before_another_producer_is_opened() -> None:
    world = World()
    producer = world.pool.producer(ORDERS)
    world.send(1)
    producer.open()
    world.work()
    world.outcomes()
    (first,) = world.client.connected
    _, callback = first.sent[0]
    callback(pulsar.Result.Ok, pulsar.MessageId(-1, 7, 1, -1)._msg_id)
    assert not world.outcomes()  # the ledger is new, so the topic is looked at
    world.jobs.clear()  # and the admin interface does not answer yet
    producer.give_up()
    producer.open()
    world.outcomes()
    world.work()
    world.outcomes()
    assert world.client.openings == 1


def test_a_producer_with_unanswered_messages_is_not_forgotten() -> None:
    world = World()
    producer = world.pool.producer(ORDERS)
    world.send(1)
    world.send(2)
    producer.open()
    world.work()
    world.outcomes()
    (first,) = world.client.connected
    first.sent[0][1](pulsar.Result.UnknownError, None)
    assert world.outcomes() == [(1, "unknown")]  # the answer to the other one is on its way
    producer.open()
    world.send(3)
    for _ in range(3):
        world.outcomes()
        world.work()
    first.sent[1][1](pulsar.Result.UnknownError, None)
    world.send(4)
    for _ in range(3):
        world.outcomes()
        world.work()
    assert first not in world.client.connected


@pytest.mark.parametrize("settings", [PRODUCER_SETTINGS, BULK_SETTINGS, KEY_BATCHED_SETTINGS])
def test_no_clock_ends_a_batch(settings: dict[str, Any]) -> None:
    # With 1 ms, a loop of send_async and flush_async hangs after seconds: see PRODUCER_SETTINGS.
    assert settings["batching_max_publish_delay_ms"] >= 3_600_000


def lose(world: World, key: TargetKey, messages: int = 2) -> Producer:
    """Send messages with a producer that has lost its connection; return it."""
    for number in range(1, messages + 1):
        world.send(number, key, number)
    for _ in range(3):
        world.outcomes()
        world.work()
    (producer,) = world.client.connected
    producer.is_connected = lambda: False  # type: ignore[method-assign]
    return producer


def test_a_lost_producer_is_replaced_as_soon_as_a_broker_serves_the_topic() -> None:
    world = World()
    lost = lose(world, ORDERS)
    world.client.away = BrokerUnreachableError("the broker does not answer")
    for _ in range(40):  # 20 s, far longer than the pause between two attempts
        world.time_s += 0.5
        assert not world.outcomes()
        world.work()
        assert world.client.connected == [lost]
    assert world.pool.refusal(ORDERS.topic, "") is None
    world.client.away = None
    for _ in range(5):
        world.time_s += 0.5
        assert not world.outcomes()
        world.work()
    (found,) = world.client.connected
    assert found is not lost
    assert len(found.sent) == 2
    lost.sent[0][1](pulsar.Result.Ok, None)  # an answer that came too late counts for nothing
    assert not world.outcomes()
    for _, callback in found.sent:
        callback(pulsar.Result.Ok, None)
    assert world.outcomes() == [(1, "stored"), (2, "stored")]


def test_a_lost_producer_that_cannot_be_replaced_leaves_its_messages_unknown() -> None:
    """Messages that were sent may be stored; the others are certainly not."""
    world = World()
    lose(world, ORDERS)
    world.client.refusal = pulsar.TopicTerminated("terminated")
    for _ in range(11):
        world.time_s += 0.5
        assert not world.outcomes()
    world.work()  # a broker serves the topic
    assert not world.outcomes()
    world.send(3)
    found = []
    for _ in range(4):
        world.work()
        found += world.outcomes()
    assert found == [(1, "unknown"), (2, "unknown"), (3, "refused")]


def test_a_target_without_a_connection_is_refused_in_the_end() -> None:
    world = World()
    lose(world, ORDERS)
    world.client.away = BrokerUnreachableError("the broker does not answer")
    found: list[tuple[int, str]] = []
    while world.pool.refusal(ORDERS.topic, "") is None:
        world.time_s += 0.5
        found += world.outcomes()
        world.work()
    assert PATIENCE_S < world.time_s < PATIENCE_S + 2
    assert found == [(1, "unknown"), (2, "unknown")]


def test_confirmations_of_partitions_do_not_wait_for_one_without_a_connection() -> None:
    world = World()
    world.client.partitions = 2
    lost = lose(world, ORDERS, 4)
    world.client.away = BrokerUnreachableError("the broker does not answer")
    for _, callback in lost.sent[1::2]:  # those of the other partition
        callback(pulsar.Result.Ok, None)
    world.time_s += 0.5
    assert world.outcomes() == [(2, "stored"), (4, "stored")]
    world.client.away = None
    for _ in range(20):
        world.time_s += 0.5
        assert not world.outcomes()
        world.work()
    (found,) = world.client.connected
    assert len(found.sent) == 2, "only what has no answer is sent again"


def test_a_lost_partition_takes_no_room_from_the_others() -> None:
    world = World("name")
    world.client.partitions = 2
    lose(world, ORDERS._replace(partition=0), 5)
    world.send(6, ORDERS._replace(partition=1), 1)
    assert world.pool.load_of(ORDERS.topic, without_lost=True)[0] == 6
    world.time_s += 2
    assert world.pool.load_of(ORDERS.topic, without_lost=True)[0] == 1
    assert world.pool.load_of(ORDERS.topic)[0] == 6


def test_a_partition_is_looked_at_whatever_becomes_of_the_others() -> None:
    world = World("name")
    world.client.partitions = 2
    world.client.away = BrokerUnreachableError("the broker does not answer")
    world.client.away_partitions = {0}
    for index in range(2):
        key = ORDERS._replace(partition=index)
        world.send(index, key, 1)
    for _ in range(3):
        world.outcomes()
        world.work()
    (found,) = world.client.connected
    assert found.topic == TopicName.parse(ORDERS.topic).partition(1).full


@pytest.mark.parametrize("shared", [False, True])
def test_the_next_flush_of_partitions_begins_when_the_last_one_has_ended(shared: bool) -> None:
    """The client would take it for the same flush, and end no batch."""
    ends: list[Callable[[Any], None]] = []
    reports: list[Callable[[], None]] = []
    core: Any = SimpleNamespace(flush_async=ends.append)
    opened = Opened(None, shared=shared)

    def flush(given: int = 3) -> None:
        flushes.begin(opened, core, EntryOutcomes(), given)

    flushes = Flushes(flush, reports.append, HostLoop())
    for given in (1, 2, 3):
        flush(given)
    assert len(ends) == (1 if shared else 3)
    ends[0](None)
    reports.pop()()
    assert flushes.ended == 1
    assert len(ends) == (2 if shared else 3)
    ends[-1](None)
    reports.pop()()
    assert flushes.ended == 3
    flush()
    assert len(ends) == (2 if shared else 3), "nothing is new"


NOBODY = BrokerUnreachableError("no address of the admin interface answers")


def settle(world: World, value: int, ledger: int, key: TargetKey = ORDERS) -> list[tuple[int, str]]:
    """Send a message, confirm it from a ledger, and return the outcomes after that."""
    world.send(value, key, value)
    found = []
    for _ in range(4):
        found += world.outcomes()
        world.work()
        for producer in world.client.connected:
            for _, callback in producer.sent:
                stored = pulsar.MessageId(key.partition, ledger, value, -1)
                callback(pulsar.Result.Ok, stored._msg_id)
            producer.sent.clear()
        world.time_s += 1.5
    return found


def close_idle(world: World) -> None:
    world.time_s += 10
    world.pool.close_idle()
    world.work()
    assert not world.client.connected


def test_a_known_target_is_opened_without_the_admin_interface() -> None:
    world = World(connected=True)
    assert settle(world, 1, ledger=7) == [(1, "stored")]
    for value in (2, 3):
        close_idle(world)
        world.client.away = NOBODY
        assert settle(world, value, ledger=7) == [(value, "stored")]


@pytest.mark.parametrize("numbered", [False, True])
def test_a_known_target_is_opened_soon_while_the_admin_interface_hangs(
    numbered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receivers, "_LOOK_S", 0.05)
    world = World("name" if numbered else "", connected=True)
    assert settle(world, 1, ledger=7) == [(1, "stored")]
    hanging, questions = threading.Event(), []

    def hang(name: TopicName) -> TopicMetadata:
        questions.append(name)
        hanging.wait()
        raise NOBODY

    with monkeypatch.context() as patch:
        patch.setattr(world.client, "partitioned_metadata", hang)
        for value in (2, 3):
            close_idle(world)
            assert settle(world, value, ledger=7) == [(value, "stored")]
        assert len(questions) == 1, "no thread for each opening"
    hanging.set()
    close_idle(world)
    assert settle(world, 4, ledger=7) == [(4, "stored")]


def test_a_confirmation_from_a_new_ledger_waits_for_the_admin_interface() -> None:
    world = World(connected=True)
    settle(world, 1, ledger=7)
    close_idle(world)
    world.client.away = NOBODY
    assert not settle(world, 2, ledger=8), "it may come from a new topic of the same name"
    assert settle(world, 3, ledger=7) == [(3, "stored")]
    world.client.away = None
    assert settle(world, 4, ledger=8) == [(2, "stored"), (4, "stored")]
    # The new ledger is known now.
    close_idle(world)
    world.client.away = NOBODY
    assert settle(world, 5, ledger=8) == [(5, "stored")]


def test_a_message_without_an_answer_is_not_stored() -> None:
    world = World()
    settle(world, 1, ledger=7)
    for value in (2, 3):
        world.send(value, number=value)
    assert not world.outcomes()
    (producer,) = world.client.connected
    _, callback = producer.sent.pop(0)
    callback(pulsar.Result.Ok, pulsar.MessageId(-1, 7, 2, -1)._msg_id)
    assert world.outcomes() == [(2, "stored")]


def test_a_topic_that_was_created_again_meanwhile_keeps_nothing() -> None:
    world = World(connected=True)
    settle(world, 1, ledger=7)
    close_idle(world)
    world.client.away = NOBODY
    settle(world, 2, ledger=8)
    world.client.away = NotFoundError("no such topic", status=404)
    assert settle(world, 3, ledger=8)[0][1] != "stored"


@pytest.mark.parametrize("known", [False, True])
def test_other_targets_wait_for_the_admin_interface(known: bool) -> None:
    """Those that were never open, and all while the host's own topics are not served."""
    world = World(connected=not known)
    if known:
        settle(world, 1, ledger=7)
        close_idle(world)
    world.client.away = NOBODY
    openings = world.client.openings
    assert not settle(world, 2, ledger=7)
    assert world.client.openings == openings
    world.client.away = None
    assert settle(world, 3, ledger=7) == [(2, "stored"), (3, "stored")]


def test_a_sequence_id_of_a_new_topic_settles_nothing() -> None:
    """The client created the topic again when it reconnected, and its confirmation was lost."""
    world = World("name", connected=True)
    assert settle(world, 1, ledger=7) == [(1, "stored")]
    world.send(2, number=2)
    world.outcomes()
    (producer,) = world.client.connected
    producer.is_connected = lambda: False  # type: ignore[method-assign]
    world.client.away = NOBODY
    world.client.last_sequence_id = 2
    for _ in range(200):
        world.time_s += 0.5
        assert not world.outcomes()
        world.work()
        if world.client.openings == 2 and world.client.connected[0].sent:
            break
    # The broker drops the message that it has, and reports no position.
    (again,) = world.client.connected
    again.sent.pop()[1](pulsar.Result.Ok, pulsar.MessageId(-1, -1, -1, -1)._msg_id)
    for _ in range(5):
        world.time_s += 1.5
        assert not world.outcomes(), "nobody knows yet if it is the same topic"
        world.work()
    world.client.away, world.client.subscriptions = None, ()
    found = []
    for _ in range(3):
        world.time_s += 1.5
        found += world.outcomes()
        world.work()
    assert found == [(2, "refused")]


def test_a_target_with_messages_of_an_earlier_process_waits_for_the_admin_interface() -> None:
    world = World("name", connected=True)
    assert settle(world, 1, ledger=7) == [(1, "stored")]
    close_idle(world)
    world.client.away, openings = NOBODY, world.client.openings
    world.pool.producer(ORDERS).recall(2, 2)
    for _ in range(10):
        world.time_s += 1.5
        assert not world.outcomes()
        world.work()
    assert world.client.openings == openings
    world.client.away, world.client.last_sequence_id = None, 2
    for _ in range(4):
        world.time_s += 1.5
        if found := world.outcomes():
            assert found == [(2, "stored")]
            return
        world.work()
    pytest.fail("no outcome")


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize(
    ("target", "outcome"),
    [
        ({"subscriptions": ()}, "refused"),
        ({"subscriptions": (), "readers": 1}, "refused"),
        ({"subscriptions": (), "retained": True}, "stored"),
        ({"subscriptions": (), "kept": True}, "stored"),
        ({"subscriptions": (), "replicated": True}, "stored"),
    ],
)
def test_a_target_that_nobody_can_receive_from_is_not_written(
    target: dict[str, Any], outcome: str, numbered: bool
) -> None:
    """Nothing is known here of what it had before; it is written once it has a subscription."""
    world = World("name" if numbered else "")
    vars(world.client).update(target)
    assert settle(world, 1, ledger=7) == [(1, outcome)]
    assert bool(world.client.openings) is (outcome == "stored")
    assert world.pool.refusal(ORDERS.topic, "") == (NO_RECEIVER if outcome == "refused" else None)
    if outcome == "refused":
        world.pool.producer(ORDERS).resume()
        world.client.subscriptions = ("app",)
        assert settle(world, 2, ledger=7) == [(2, "stored")]


@pytest.mark.parametrize("partition", [0, 1])
def test_a_partition_that_is_written_needs_a_receiver(partition: int) -> None:
    world = World("name")
    world.client.partitions = 2
    world.client.subscriptions = {0: ("app",), 1: ()}
    key = ORDERS._replace(partition=partition)
    assert settle(world, 1, 7, key) == [(1, "stored" if partition == 0 else "refused")]


def test_a_target_is_refused_if_some_partitions_stay_without_a_receiver() -> None:
    world = World()
    world.client.partitions = 2
    world.client.subscriptions = {0: ("app",), 1: ()}
    found = settle(world, 1, ledger=7)
    assert found == [], "perhaps they are just being added"
    while not found and world.time_s < 2 * PATIENCE_S:
        found += world.outcomes()
        world.work()
        world.time_s += 1.0
    assert found == [(1, "refused")]
    assert not world.client.openings
    assert world.pool.refusal(ORDERS.topic, "") == SOME_RECEIVED


def test_messages_wait_until_new_partitions_have_their_subscriptions() -> None:
    world = World()
    world.client.partitions, world.client.new_partitions = 2, 2
    assert settle(world, 1, ledger=7) == []
    assert not world.client.openings
    world.client.partitions, world.client.new_partitions = 4, 0
    assert settle(world, 2, ledger=7) == [(1, "stored"), (2, "stored")]


def test_what_is_stored_while_partitions_are_added_is_stored() -> None:
    world = World()
    world.client.partitions = 2
    assert settle(world, 1, ledger=7) == [(1, "stored")]
    world.client.new_partitions = 2
    found = [each for value in range(2, 20) for each in settle(world, value, ledger=value)]
    assert found == [(value, "stored") for value in range(2, 20)]
    world.client.partitions, world.client.new_partitions = 4, 0
    world.client.subscriptions = {0: ("app",), 1: ("app",), 2: (), 3: ()}
    found = [each for value in range(20, 40) for each in settle(world, value, ledger=value)]
    assert found == [(value, "stored") for value in range(20, 40)]
    world.client.subscriptions = {0: ("app",), 1: (), 2: (), 3: ()}
    assert settle(world, 40, ledger=40) == [(40, "refused")]


def test_an_unknown_retention_is_not_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(connected=True)
    settle(world, 1, ledger=7)
    close_idle(world)
    world.client.subscriptions = ()

    def away(_: TopicName) -> bool:
        raise NOBODY

    monkeypatch.setattr(world.client, "retains", away)
    assert settle(world, 2, ledger=7) == [(2, "stored")]


def test_the_end_of_the_last_subscription_is_noticed_while_messages_are_sent() -> None:
    world = World()
    found = settle(world, 1, ledger=7)
    world.client.subscriptions = ()
    for value in range(2, 30):  # each takes some seconds
        found += settle(world, value, ledger=7)
    outcomes = [outcome for _, outcome in found]
    assert outcomes.count("stored") in range(8, 14)
    assert outcomes == sorted(outcomes, reverse=True), "refused from then on"


def test_ledgers_that_were_known_before_an_opening_still_are() -> None:
    world = World(connected=True)
    settle(world, 1, ledger=7)
    close_idle(world)
    world.pool.producer(ORDERS).open()
    world.work()
    world.outcomes()
    world.client.away = NOBODY
    assert settle(world, 2, ledger=7) == [(2, "stored")]


def test_a_producer_that_is_given_up_is_not_looked_at_again_and_again() -> None:
    world = World()
    lost = lose(world, ORDERS, 3)
    world.time_s += 6
    lost.sent[0][1](pulsar.Result.UnknownError, None)  # no more messages for this producer
    looks = 0
    while world.time_s < PATIENCE_S / 2:
        world.outcomes()
        looks += len(world.jobs)
        world.work()
        world.time_s += 0.05
    assert looks < 5


def test_a_deduplicated_message_is_perhaps_known_by_a_new_topic() -> None:
    """The client's second reconnect sends it to the topic that the first one has created."""
    world = World("name")
    assert settle(world, 1, ledger=7) == [(1, "stored")]
    assert settle(world, 2, ledger=-1) == [(2, "stored")], "it is the same topic"
    world.client.subscriptions = ()
    assert settle(world, 3, ledger=-1) == [(3, "refused")]
