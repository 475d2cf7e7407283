"""The promises of every host that hands messages on, each once, in memory.

The hosts are the local mover, the Spark job (in its source, and behind a user's steps), the
Function, a drain, and a replay of dead letters.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any

import pulsar
import pytest
from pulsar.schema import Integer, JsonSchema, Record, String

from delaylevel import topics
from delaylevel.cluster.targets.receivers import NO_RECEIVER, NO_TOPIC
from delaylevel.errors import BrokerError
from delaylevel.functions.deployment import source_topics
from delaylevel.functions.relay import Relay
from delaylevel.model.clock import SteadyClock
from delaylevel.model.envelope import (
    ATTEMPT,
    DUE,
    EXPIRES,
    ID,
    KIND,
    REASON,
    SCHEMA,
    SOURCE,
    TARGET,
    SchemaRef,
)
from delaylevel.model.level_topic import (
    SUBSCRIPTION,
    Expired,
    FinalWindow,
    LevelTopicDescription,
    MissingTarget,
    Mover,
)
from delaylevel.model.retries import RETRY_ID
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.mover import dead_letters
from delaylevel.mover.drain import drain
from delaylevel.mover.forwarder import Forwarder
from delaylevel.mover.local import LocalMover
from delaylevel.testing import Crashed, ManualClock, MemoryPulsar
from delaylevel.testing.memory.broker import Broker
from delaylevel.testing.memory.partition import Entry, StoredMessage
from support.fakes import describe

Counts = dict[str, int]

ORDERS = "persistent://public/default/orders"
BILLS = "persistent://public/default/bills"
LEVEL_TOPIC = "persistent://public/default/orders-delay-level"
HELD = f"{LEVEL_TOPIC}-held-partition-0"
DEAD = f"{LEVEL_TOPIC}-DLQ-partition-0"
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
# A place from which a mover reads, and the time after which everything there is ready.
HOUR_3 = f"{LEVEL_TOPIC}-hour-partition-3"
READY = timedelta(days=6)


class Bench:
    """A level topic with what is stored in it, and a host that hands it on.

    Attributes:
        unstored: errors with which a topic answers all that is sent to it, by its full name, or one
            message, by its payload and the topic; ``unopened`` are those for new producers.
    """

    def __init__(self, host: str, patch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.host = host
        self.memory = MemoryPulsar(ManualClock(1_800_000_000_000), retention=False)
        self._client = self.memory.client()
        self._client.subscribe(ORDERS, "app", pulsar.ConsumerType.Shared).close()
        self.now_ms = self.memory.clock.now_ms() + READY // timedelta(milliseconds=1)
        mover = Mover.FUNCTION if host == "function" else Mover.SERVICE
        given = {"days": 6, "targets": ("orders", "bills"), "mover": mover, **changes}
        self.description = topics.create(self.memory.admin, describe(**given))
        self.unstored: dict[Any, Exception] = {}
        self.unopened: dict[str, Exception] = {}
        self._break(patch)
        self._query = SparkQuery(self, patch, steps=host == "steps")

    def _break(self, patch: pytest.MonkeyPatch) -> None:
        """Let topics refuse what `unstored` and `unopened` say."""
        store, register = Broker.store, Broker.register_schema

        def stored(
            broker: Broker, name: TopicName, messages: tuple[StoredMessage, ...], **more: Any
        ) -> Entry:
            for key in (name.full, *((each.value, name.full) for each in messages)):
                if key in self.unstored:
                    raise self.unstored[key]
            return store(broker, name, messages, **more)

        def opened(broker: Broker, name: TopicName, schema: Any) -> int | None:
            if name.full in self.unopened:
                raise self.unopened[name.full]
            return register(broker, name, schema)

        patch.setattr(Broker, "store", stored)
        patch.setattr(Broker, "register_schema", opened)

    @property
    def source(self) -> str:
        """Full name of the topic from which a host reads by default."""
        return DEAD if self.host == "replay" else HOUR_3

    def store(
        self,
        value: bytes | None = b"body",
        after_ms: int | None = HOUR_MS // 60,
        *,
        source: str | None = None,
        target: str = ORDERS,
        given: Mapping[str, str] | None = None,
        **options: Any,
    ) -> dict[str, str]:
        """Store a message in a partition of a level, and return its properties.

        It is due ``after_ms`` after the first work of the host; with None, it has no due time.
        """
        properties = {"color": "red", **(given or {})}
        if after_ms is not None:
            properties = {DUE: str(self.now_ms + after_ms), TARGET: target, **properties}
        producer = self._client.create_producer(source or self.source, batching_enabled=False)
        producer.send(value, properties=properties, **options)
        producer.close()
        return properties

    def hand_on(self) -> Counts:
        """Let time pass, and let a new process hand on what is ready; return the outcomes."""
        self.memory.clock.move_to(self.now_ms)
        report = {name: count for name, count in _HOSTS[self.host](self).items() if count}
        self.memory._check_rules()
        return report

    def pause(self) -> None:
        """Let the time pass after which a target is tried again."""
        self.memory.clock.advance(timedelta(milliseconds=self.description.hold_pause_ms))
        self.now_ms = self.memory.clock.now_ms()

    def stored(self, topic: str) -> list[StoredMessage]:
        """Return everything that was stored in a partition, in order."""
        partition = self.memory._broker.partitions.get(TopicName.parse(topic))
        entries = [] if partition is None else partition.entries
        return [message for entry in entries for message in entry.messages]

    def deliver_at(self, topic: str) -> list[int | None]:
        """Return the times until which the broker holds the entries of a partition, ms."""
        partition = self.memory._broker.partition(TopicName.parse(topic))
        return [entry.deliver_at_ms for entry in partition.entries]

    def backlog(self, source: str | None = None) -> int:
        """Return the number of messages that are not acknowledged."""
        name = TopicName.parse(source or self.source)
        stats = self.memory.admin.partition_stats(name)
        return int(stats.subscriptions[SUBSCRIPTION].backlog_entries)

    def members(self, *but: str) -> dict[str, list[bytes | None]]:
        """Return the payloads by topic, of all topics with messages but the source and others."""
        names = (name.full for name in self.memory._broker.partitions)
        found = {name: [each.value for each in self.stored(name)] for name in names}
        return {
            name: values
            for name, values in found.items()
            if values and name not in (*but, self.source)
        }

    def subscribe(self, topic: str) -> None:
        self._client.subscribe(topic, "app", pulsar.ConsumerType.Shared).close()


def _local(bench: Bench) -> Counts:
    memory = bench.memory
    mover = LocalMover(memory.client(), memory.admin, bench.description, memory.clock)
    with closing(mover):
        return mover.run_once().counts()


def _drain(bench: Bench) -> Counts:
    memory = bench.memory
    return drain(memory.client(), memory.admin, bench.description, clock=memory.clock).counts()


def _replay(bench: Bench) -> Counts:
    memory = bench.memory
    replaying = dead_letters.replay(
        memory.client(), memory.admin, bench.description, lambda _: True, clock=memory.clock
    )
    letters = list(replaying)
    failed = [one for one in letters if one.outcome in ("failed", "unconfirmed")]
    if failed:
        raise BrokerError(failed[0].reason)
    names = {"handed off": "window", "delivered": "due", "still dead": "dead"}
    return Counter(names.get(one.outcome, one.outcome) for one in letters)


def _function(bench: Bench) -> Counts:
    memory = bench.memory
    client = memory.client()
    consumer = client.subscribe(
        source_topics(bench.description),
        SUBSCRIPTION,
        consumer_type=pulsar.ConsumerType.Shared,
        negative_ack_redelivery_delay_ms=DAY_MS,
    )
    relay = Relay(
        client,
        memory.admin,
        bench.description,
        consumer,
        clock=memory.clock,
        start=lambda work: work(),
        now_s=memory.clock.monotonic_s,
    )
    idle = 0
    while idle < 5:
        with suppress(pulsar.Timeout):
            relay.offer(consumer.receive(0))
            continue
        relay._flushed_s = float("-inf")  # its clock stands still here
        relay.poll()
        idle += 1
    assert not relay.unacknowledged
    relay.carrier.close()
    client.shutdown()
    report = relay.take_report()
    if report.given_back:
        raise BrokerError(", ".join(report.given_back))
    return report.counts()


class _Process:
    """The runtime of a Python process of Spark, on the in-memory Pulsar."""

    def __init__(self, memory: MemoryPulsar, description: LevelTopicDescription) -> None:
        self.client, self.admin = memory.client(), memory.admin
        self._description, self._clock = description, SteadyClock(memory.clock)
        self._forwarder: Forwarder | None = None

    def describe(self, level_topic: str) -> LevelTopicDescription:
        return self._description

    planned_by = describe

    task_s = 0.0

    def forwarder(self, level_topic: str) -> Forwarder:
        if self._forwarder is None:
            self._forwarder = Forwarder(self.client, self.admin, self._description, self._clock)
        return self._forwarder


class SparkQuery:
    """A query with its checkpoint, without Spark: its reader works as Spark has it do.

    The end of a batch is logged before its tasks run, and the batch as complete after them. Both
    logs, ``offsets`` and ``complete``, survive the process. With ``steps``, the rows leave the
    source.
    """

    def __init__(self, bench: Bench, patch: pytest.MonkeyPatch, *, steps: bool) -> None:
        self._bench, self._patch, self._steps = bench, patch, steps
        self.offsets: list[Any] = []
        self.complete = 0

    def run(self) -> Counts:
        """Run the query in a new process until no message is ready."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable

        from delaylevel.spark_sync import driver, forwarding
        from delaylevel.spark_sync.arrow_rows import SCHEMA
        from delaylevel.spark_sync.forwarding import FORWARDED_SCHEMA, forward_rows
        from delaylevel.spark_sync.options import SyncOptions
        from delaylevel.spark_sync.source import DelayLevelStreamReader

        memory, description = self._bench.memory, self._bench.description
        here = _Process(memory, description)
        for module in (driver, forwarding):
            self._patch.setattr(module, "runtime", lambda options: here)
        options = SyncOptions((), (description.topic,), forward=not self._steps)
        reader = DelayLevelStreamReader(options, SCHEMA if self._steps else FORWARDED_SCHEMA)
        if self._steps:
            from delaylevel.spark_sync import source

            self._patch.setattr(source, "runtime", lambda options: here)
        reader._driver = driver.Driver(options, memory.clock)
        counts: Counter[str] = Counter()
        try:
            start = self.offsets[self.complete - 1] if self.complete else None
            start = start or reader.initialOffset()
            idle = 0
            while idle < 2:
                if len(self.offsets) > self.complete:
                    end = self.offsets[self.complete]  # planned before the end of a process
                else:
                    end = reader.latestOffset(start, ReadAllAvailable())
                    if end == start:
                        idle += 1
                        continue
                    self.offsets.append(end)
                for part in reader.partitions(start, end):
                    rows = reader.read(part)
                    for row in forward_rows(options, rows) if self._steps else rows:
                        for report in filter(None, row.column("report").to_pylist()):
                            counts.update(json.loads(report)[description.topic])
                self.complete += 1
                reader.commit(end)
                start = end
        finally:
            reader.stop()
        del counts["latest_ms"]
        return counts


def _spark(bench: Bench) -> Counts:
    pytest.importorskip("pyspark")
    return bench._query.run()


_HOSTS: dict[str, Callable[[Bench], Counts]] = {
    "local": _local,
    "spark": _spark,
    "steps": _spark,
    "function": _function,
    "drain": _drain,
    "replay": _replay,
}
#: All hosts, and those that find messages in the levels.
HOSTS: Collection[str] = tuple(_HOSTS)
MOVERS: Collection[str] = tuple(_HOSTS)[:4]


BROKER, TRACKER = FinalWindow.BROKER, FinalWindow.TRACKER
DAY_4 = f"{LEVEL_TOPIC}-partition-4"
MINUTE_MS = 60_000
# Whatever a replay reads was not understood or not delivered before, and does not expire.
READERS = [host for host in HOSTS if host != "replay"]

Make = Callable[..., Bench]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(host: str, final_window: FinalWindow = BROKER, **changes: Any) -> Bench:
        return Bench(host, monkeypatch, final_window=final_window, **changes)

    return make


def own_id(source: str, entry: int, bench: Bench) -> str:
    entries = bench.memory._broker.partition(TopicName.parse(source)).entries
    return f"{source.removeprefix('persistent://')}:{entries[entry].ledger}:{entry}:-1"


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("window", FinalWindow)
@pytest.mark.parametrize("after_ms", [MINUTE_MS, 0, -700])
def test_a_message_is_handed_on_unchanged(
    host: str, window: FinalWindow, after_ms: int, make: Make
) -> None:
    bench = make(host, window)
    # An event time may be any number of 64 bits, such as one in nanoseconds.
    late = (1 << 64) - 1
    own = {"partition_key": "key", "ordering_key": "order", "event_timestamp": late}
    given = [
        bench.store(b"body", after_ms, **own),
        bench.store(None, after_ms),
        bench.store(b"", after_ms),
    ]
    counter = "window" if window is TRACKER or after_ms > 0 else "due"
    assert bench.hand_on() == {counter: 3}
    assert bench.backlog() == 0
    ids = [own_id(bench.source, entry, bench) for entry in range(3)]
    places = {
        body: (identity, expected, key)
        for body, identity, expected, key in zip(
            (b"body", None, b""), ids, given, ("key", "", ""), strict=True
        )
    }
    found = bench.members()
    assert sum(len(values) for values in found.values()) == 3
    for topic in found:
        for message in bench.stored(topic):
            identity, expected, key = places.pop(message.value)
            properties = dict(message.properties)
            if host == "replay":
                properties.pop(EXPIRES, None)  # it does not expire any more
            assert properties == {**expected, ID: identity}
            keys = (message.key, message.ordering_key, message.built.event_timestamp())
            assert keys == (("key", "order", late) if key else ("", "", 0))
            if window is TRACKER:
                index = bench.description.window_partition(key, identity)
                assert topic == bench.description.window_topic.partition(index).full
            else:
                assert topic == ORDERS
        until_ms = bench.now_ms + after_ms if counter == "window" and window is BROKER else None
        assert set(bench.deliver_at(topic)) == {until_ms}, "the broker holds what is not yet due"


@pytest.mark.parametrize("host", ["spark", "steps"])
def test_a_batch_that_was_planned_by_a_clock_that_was_ahead_is_not_early(
    host: str, make: Make
) -> None:
    bench = make(host)
    due_ms = bench.now_ms - 5 * MINUTE_MS
    bench.store(after_ms=-5 * MINUTE_MS)
    bench.unstored |= dict.fromkeys((ORDERS, HELD), pulsar.Timeout("late"))
    with pytest.raises(BrokerError):
        bench.hand_on()
    bench.unstored.clear()
    bench.memory.clock.step(-timedelta(minutes=10))
    bench.now_ms = bench.memory.clock.now_ms()
    assert bench.hand_on() == {"window": 1}
    assert bench.deliver_at(ORDERS) == [due_ms], "the broker holds it"


@pytest.mark.parametrize("host", MOVERS)
@pytest.mark.parametrize(
    ("source", "after_ms", "place"),
    [
        (DAY_4, DAY_MS - 1, "hour-partition-22"),
        (DAY_4, DAY_MS + 10 * MINUTE_MS, "hour-partition-22"),
        (DAY_4, 3 * DAY_MS, "partition-2"),
        # The lead of a level is used up by a message that comes from it.
        (DAY_4, 64 * MINUTE_MS, "hour-partition-0"),
        (HOUR_3, 64 * MINUTE_MS, None),
        (HELD, 64 * MINUTE_MS, None),
        (HOUR_3, 5 * HOUR_MS, "hour-partition-4"),
        (HOUR_3, 3 * DAY_MS, "partition-2"),
        (HELD, 5 * HOUR_MS, "hour-partition-4"),
    ],
)
def test_a_message_that_is_not_near_due_is_parked_again(
    host: str, source: str, after_ms: int, place: str | None, make: Make
) -> None:
    bench = make(host)
    given = bench.store(b"early", after_ms, source=source, given={ID: "mine"})
    if place is None:
        assert bench.hand_on() == {"window": 1}
        return
    topic = f"{LEVEL_TOPIC}-{place}"
    hour = "hour" in place
    assert bench.hand_on() == {"parked": 1}
    assert bench.backlog(source) == 0
    assert bench.members(source) == {topic: [b"early"]}
    assert dict(bench.stored(topic)[0].properties) == given
    units = int(place.rpartition("-")[2]) + 1
    hand_off_ms = units * HOUR_MS - 5 * MINUTE_MS if hour else units * DAY_MS - 10 * MINUTE_MS
    until_ms = bench.now_ms + hand_off_ms if host == "function" else None
    assert bench.deliver_at(topic) == [until_ms], "only the broker of a Function holds it"


def test_a_message_that_the_broker_would_release_at_once_is_not_parked_again(make: Make) -> None:
    second, longest = timedelta(seconds=1), timedelta(seconds=9)
    levels = Levels([PartitionStrategy(partition_by=second, maximum_delay=longest)])
    bench = make("function", levels=levels)
    bench.store(b"soon", 1500, source=f"{LEVEL_TOPIC}-partition-0")
    assert bench.hand_on() == {"window": 1}
    assert bench.deliver_at(ORDERS) == [bench.now_ms + 1500]


def test_a_drain_parks_nothing_again(make: Make) -> None:
    for window in FinalWindow:
        bench = make("drain", window)
        bench.store(b"early", 5 * DAY_MS)
        assert bench.hand_on() == {"window": 1}
        (topic,) = bench.members()
        assert topic == ORDERS or "-window-" in topic


@pytest.mark.parametrize("host", READERS)
@pytest.mark.parametrize("window", FinalWindow)
def test_what_cannot_be_understood_is_a_dead_letter_between_the_others(
    host: str, window: FinalWindow, make: Make
) -> None:
    bench = make(host, window)
    bench.store(b"first")
    due = {DUE: str(bench.now_ms)}
    wrong: list[tuple[dict[str, str], str]] = [
        ({}, "delaylevel.due is missing"),
        ({DUE: "soon", TARGET: ORDERS}, "not a whole number"),
        ({**due, TARGET: "persistent://x/y/z"}, "target persistent://x/y/z is not one of"),
        ({**due, TARGET: LEVEL_TOPIC}, "is not one of level topic"),
        ({**due, TARGET: ORDERS, KIND: "teleport", ID: "a"}, "does not know this kind"),
    ]
    if window is BROKER:
        cancel = {**due, TARGET: ORDERS, KIND: "cancel", ID: "a"}
        wrong.append((cancel, "no dispatcher decides about such records"))
    for number, (properties, _) in enumerate(wrong):
        bench.store(b"%d" % number, None, given=properties, partition_key="k")
    bench.store(b"last")
    assert bench.hand_on() == {"window": 2, "dead": len(wrong)}
    assert bench.backlog() == 0
    # In a Function, some wait until the description is read again.
    letters = sorted(bench.stored(DEAD), key=lambda letter: letter.value or b"")
    for number, (letter, (given, why)) in enumerate(zip(letters, wrong, strict=True)):
        assert (letter.value, letter.key) == (b"%d" % number, "k")
        properties = dict(letter.properties)
        assert why in properties.pop(REASON)
        assert properties.pop(SOURCE) == own_id(bench.source, number + 1, bench)
        assert properties == {"color": "red", **given}
    others = [value for values in bench.members(DEAD).values() for value in values]
    assert sorted(map(str, others)) == ["b'first'", "b'last'"]


@pytest.mark.parametrize("host", READERS)
@pytest.mark.parametrize("how", ["deleted", "connected", "unfinished"])
def test_the_topic_of_dead_letters_comes_back_with_its_subscription(
    host: str, how: str, make: Make
) -> None:
    """Somebody has deleted it; a client that is connected has created it again, without any.

    Or a process that created it again has ended before it was done.
    """
    bench = make(host, TRACKER)
    admin, name = bench.memory.admin, bench.description.dead_letter_topic
    connected = how == "connected"
    if connected:
        bench.memory.client().create_producer(DEAD)
    properties = admin.partitioned_metadata(name).properties
    admin.delete(name, force=connected)
    if how == "unfinished":
        admin.create_partitioned(name, 1, properties)
    bench.store(b"wrong", None)
    assert bench.hand_on() == {"dead": 1}
    assert (bench.backlog(), bench.backlog(DEAD)) == (0, 1)
    assert connected or admin.topic_policies(name).message_ttl_s == 0


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("key", ["", "k"])
def test_a_cancellation_goes_to_the_window_partition_of_its_message(
    host: str, key: str, make: Make
) -> None:
    """Neither its due time nor its target lets it out."""
    bench = make(host, TRACKER)
    window = bench.description.window_topic
    direct = f"{window.partition(2).full.removeprefix('persistent://')}:7:1:-1"
    for number, name in enumerate(("a", direct)):
        kind = {KIND: "cancel", ID: name}
        bench.store(b"%d" % number, number * MINUTE_MS - 1, given=kind, partition_key=key or None)
    # Steps see no cancellations, so they are not among the rows that Spark counts.
    assert bench.hand_on() == ({} if host == "steps" else {"window": 2})
    hashed = bench.description.window_partition(key, "a")
    expected: dict[str, list[bytes]] = {}
    for body, index in ((b"0", hashed), (b"1", hashed if key else 2)):
        expected.setdefault(window.partition(index).full, []).append(body)
    assert bench.members() == expected


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("why", [NO_TOPIC, NO_RECEIVER, "TopicTerminated", "Timeout"])
def test_a_message_is_held_while_its_target_cannot_be_written(
    host: str, why: str, make: Make
) -> None:
    bench = make(host)
    if why != NO_TOPIC:
        bench.subscribe(BILLS)
    if why == NO_RECEIVER:
        bench.memory.admin.delete_subscription(TopicName.parse(BILLS), "app")
    elif why == "TopicTerminated":
        bench.memory.admin.terminate(TopicName.parse(BILLS))
    elif why == "Timeout":
        bench.unstored[BILLS] = pulsar.Timeout("late")
    given = bench.store(b"bill", target=BILLS, given={ID: "mine"})
    bench.store(b"order")
    assert bench.hand_on() == {"held": 1, "window": 1}
    assert bench.backlog() == 0
    assert bench.members() == {HELD: [b"bill"], ORDERS: [b"order"]}
    (held,) = bench.stored(HELD)
    assert why in held.properties[REASON]
    properties = {**held.properties, EXPIRES: "", REASON: ""}
    assert properties == {**given, ATTEMPT: "1", EXPIRES: "", REASON: ""}
    pause_ms = bench.description.hold_pause_ms
    assert bench.deliver_at(HELD) == [bench.now_ms + pause_ms if host == "function" else None]
    if host == "replay":  # it reads no held messages
        return
    bench.pause()
    assert bench.hand_on() == {"held": 1}
    attempts = [each.properties[ATTEMPT] for each in bench.stored(HELD)]
    assert attempts == ["1", "2"]
    if why == "TopicTerminated":
        return
    bench.unstored.clear()
    bench.subscribe(BILLS)
    bench.pause()
    assert bench.hand_on() == {"due": 1}
    assert dict(bench.stored(BILLS)[0].properties) == given, "with a trace of the hold"


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("policy", MissingTarget)
def test_a_target_that_does_not_exist_is_treated_by_its_policy(
    host: str, policy: MissingTarget, make: Make
) -> None:
    bench = make(host, on_missing_target=policy)
    bench.subscribe(BILLS)
    bench.memory.admin.terminate(TopicName.parse(BILLS))
    bench.memory.admin.delete(TopicName.parse(ORDERS), force=True)
    bench.store(b"order")
    bench.store(b"retry", given={RETRY_ID: "id"})  # its original is acknowledged
    bench.store(b"refused", target=BILLS)
    counts = bench.hand_on()
    assert (
        counts
        == {
            MissingTarget.HOLD: {"held": 3},
            MissingTarget.DEAD_LETTER: {"dead": 2, "held": 1},
            MissingTarget.DROP: {"dropped": 1, "dead": 1, "held": 1},
        }[policy]
    )
    # Each target is asked apart from the others, and any of them may answer first.
    held = sorted(each.value or b"" for each in bench.stored(HELD))
    kept = [b"order", b"refused", b"retry"]
    assert held == (kept if policy is MissingTarget.HOLD else [b"refused"])


@pytest.mark.parametrize("host", READERS)
@pytest.mark.parametrize("policy", Expired)
def test_an_expired_message_is_not_handed_off(host: str, policy: Expired, make: Make) -> None:
    bench = make(host, expired=policy, expire_after_ms=5_000)
    bench.store(b"default", -5_000)
    bench.store(b"in time", -4_999)
    bench.store(b"own", -1_000, given={EXPIRES: str(bench.now_ms)})
    bench.store(b"own, in time", -60_000, given={EXPIRES: str(bench.now_ms + 1)})
    bench.store(b"not due", MINUTE_MS, given={EXPIRES: str(bench.now_ms - 1)})
    held = {EXPIRES: str(bench.now_ms), ATTEMPT: "1"}
    bench.store(b"held", -60_000, given=held, source=HELD)
    assert bench.hand_on() == {"due": 2, "expired": 4}
    assert (bench.backlog(), bench.backlog(HELD)) == (0, 0)
    delivered = bench.stored(ORDERS)
    assert sorted(str(each.value) for each in delivered) == ["b'in time'", "b'own, in time'"]
    assert not any(EXPIRES in each.properties for each in delivered)
    letters = bench.stored(DEAD)
    assert len(letters) == (4 if policy is Expired.DEAD_LETTER else 0)
    assert all(each.properties[REASON].startswith("expired at ") for each in letters)
    assert all(each.properties[TARGET] == ORDERS for each in letters)


@pytest.mark.parametrize("host", HOSTS)
def test_a_message_too_large_for_its_target_is_a_dead_letter(host: str, make: Make) -> None:
    bench = make(host)
    given = bench.store(b"large", given={ID: "mine"})
    bench.store(b"small")
    bench.unstored[b"large", ORDERS] = pulsar.MessageTooBig("too big")
    assert bench.hand_on() == {"dead": 1, "window": 1}, "the target is not at fault"
    letter = dict(bench.stored(DEAD)[-1].properties)
    if host == "replay":
        del letter[EXPIRES]
    assert letter == {**given, REASON: f"too large for {ORDERS}"}
    assert bench.backlog(HOUR_3) == 0


#: The final window, the due time, and a topic of our own that gets the message.
OURS = [
    (BROKER, 5 * HOUR_MS, f"{LEVEL_TOPIC}-hour-partition-4"),
    (TRACKER, 0, f"{LEVEL_TOPIC}-window-partition-"),
    (BROKER, 0, HELD),
    (BROKER, None, DEAD),
]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("how", ["unconfirmed", "refused"])
@pytest.mark.parametrize(("window", "after_ms", "topic"), OURS)
def test_nothing_is_acknowledged_while_a_topic_of_our_own_does_not_confirm(
    host: str, how: str, window: FinalWindow, after_ms: int | None, topic: str, make: Make
) -> None:
    if (host == "drain" and after_ms) or (host == "replay" and topic == DEAD):
        return  # it does not write to that topic
    bench = make(host, window)
    if topic.endswith("-"):
        topic += str(bench.description.window_partition("k", ""))
    target = BILLS if topic == HELD else ORDERS
    bench.store(b"mine", after_ms, target=target, partition_key="k")
    if how == "refused":
        bench.unopened[topic] = pulsar.AuthorizationError("no")
    else:
        bench.unstored[topic] = pulsar.Timeout("late")
    with pytest.raises(BrokerError, match=r"AuthorizationError|Timeout"):
        bench.hand_on()
    assert bench.backlog() == 1
    assert bench.members() == {}
    bench.unstored.clear()
    bench.unopened.clear()
    bench.memory.clock.advance(timedelta(days=1))
    bench.now_ms = bench.memory.clock.now_ms()
    counts = bench.hand_on()
    assert sum(counts.values()) == 1, "it counts once"
    if after_ms:
        assert counts == {"due": 1}, "not routed by the present time"
    assert bench.backlog() == 0
    assert sum(len(values) for values in bench.members().values()) == 1


class First(Record):
    number = Integer(required=True)


class Second(Record):
    number = Integer(required=True)
    name = String(default="?", required_default=True)


@pytest.mark.parametrize("host", HOSTS)
def test_a_message_arrives_with_its_version_of_the_schema(host: str, make: Make) -> None:
    bench = make(host)
    client = bench.memory.client()
    references = []
    for record in (First, Second):
        schema = JsonSchema(record)
        client.create_producer(ORDERS, schema=schema).close()
        references.append(str(SchemaRef.of("JSON", schema.schema_info().schema())))
    lacking = str(SchemaRef("AVRO", "0" * 16))
    for number, reference in enumerate([*references, "", lacking, references[0]]):
        bench.store(b"%d" % number, 0, given={SCHEMA: reference} if reference else {})
    assert bench.hand_on() == {"due": 4, "held": 1}
    versions = {each.value: each.schema_version for each in bench.stored(ORDERS)}
    assert versions == {b"0": 0, b"1": 1, b"2": None, b"4": 0}
    (held,) = bench.stored(HELD)
    assert held.properties[REASON] == f"its registry has no schema {lacking}"
    assert held.properties[SCHEMA] == lacking


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("window", FinalWindow)
def test_a_host_may_end_after_any_event(host: str, window: FinalWindow, make: Make) -> None:
    """Another process goes on: nothing is lost, and without an end nothing is copied."""
    event = 0
    while True:
        event += 1
        bench = make(host, window)
        bodies = {b"due", b"near", b"early", b"bill"}
        bench.store(b"due", -1)
        bench.store(b"near")
        bench.store(b"early", 5 * HOUR_MS)
        bench.store(b"bill", target=BILLS)
        if host != "replay":
            bodies.add(b"unreadable")
            bench.store(b"unreadable", None)
        bench.memory.crash_after(event)
        crashed = False
        try:
            bench.hand_on()
        except Crashed:
            crashed = True
            bench.memory.crash_after(None)
            bench.hand_on()
        bench.memory.crash_after(None)
        found = Counter(value for values in bench.members().values() for value in values)
        assert found.keys() == bodies, "lost"
        assert bench.backlog() == 0
        assert crashed or set(found.values()) == {1}, "copied"
        bench.memory.close()
        if not crashed:
            break
    assert event > len(bodies)
