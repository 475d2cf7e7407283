"""Tests of effectively-once hand-offs on a fake broker that deduplicates, and fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.cluster.targets import receivers
from delaylevel.errors import BrokerError
from delaylevel.model.delivery import Sequence, sequence_id
from delaylevel.model.envelope import ATTEMPT, DUE, EXPIRES, ID, SCHEMA, TARGET, SchemaRef
from delaylevel.model.level_topic import Expired, FinalWindow
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import source_partitions
from delaylevel.mover import forwarder as forwarder_module
from delaylevel.mover.forwarder import Forwarder
from delaylevel.testing import ManualClock
from support.fakes import FakeAdmin, describe
from support.seeds import examples

from .test_forwarder import BILLS, DEAD, HELD, ORDERS, T0, Waiting

DESCRIPTION = describe(
    targets=("orders", "bills"),
    final_window=FinalWindow.BROKER,
    hold_pause_ms=1000,
    expired=Expired.DEAD_LETTER,
)
SOURCE = source_partitions(DESCRIPTION)[0]
UNKNOWN = "persistent://public/default/unknown"  # not a target of the level topic
LIMIT = 100
REFUSED = pulsar.ProducerBlockedQuotaExceededException("full")
AWAY = pulsar.ServiceUnitNotReady("moving")


class Crash(BaseException):
    """The end of the process."""


@dataclass
class Broker:
    """Topics, and for each name of a producer the last sequence ID that it has stored there.

    Attributes:
        openings: the errors of the next openings of targets; None for a success.
        flushes: for the next flushes of targets, how many messages are confirmed, and how many
            more are stored although they fail; None for a flush without failures.
        crash_after: number of calls before the process ends.
    """

    topics: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    last: dict[tuple[str, str], int] = field(default_factory=dict)
    openings: list[Exception | None] = field(default_factory=list)
    flushes: list[tuple[int, int] | None] = field(default_factory=list)
    crash_after: int = -1
    names: set[tuple[str, str]] = field(default_factory=set)
    log: list[str] = field(default_factory=list)

    def call(self) -> None:
        self.crash_after -= 1
        if self.crash_after == 0:
            raise Crash

    def create_producer(self, topic: str, **given: Any) -> Producer:
        self.call()
        if topic.startswith((ORDERS + "-delay", BILLS + "-delay")):
            error = None
        else:
            error = self.openings.pop(0) if self.openings else None
        if error is not None:
            raise error
        self.names.add((topic, given.get("producer_name", "")))
        return Producer(self, topic, given.get("producer_name", ""))

    def store(self, producer: Producer, message: dict[str, Any]) -> None:
        self.call()
        key = producer.topic, producer.name
        number = message["sequence_id"]
        if producer.name:
            if number <= self.last.get(key, -1):
                return
            self.last[key] = number
        self.topics.setdefault(producer.topic, []).append(message)
        self.log.append(f"{producer.topic} {message['properties'][ID]}")

    def ids(self, *topics: str) -> list[str]:
        return [
            message["properties"][ID] for topic in topics for message in self.topics.get(topic, ())
        ]


@dataclass(eq=False)
class Producer:
    broker: Broker
    topic: str
    name: str
    pending: list[tuple[dict[str, Any], Callable[[Any, Any], Any]]] = field(default_factory=list)
    broken: bool = False

    def send_async(self, value: bytes, callback: Any, **given: Any) -> None:
        self.broker.call()
        if len(value) > LIMIT and self.topic in (ORDERS, BILLS):
            callback(pulsar.Result.MessageTooBig, None)
        elif self.broken:
            callback(pulsar.Result.ProducerBlockedQuotaExceededException, None)
        else:
            self.pending.append((given, callback))

    def flush(self) -> None:
        pending, self.pending = self.pending, []
        target = "delay-level" not in self.topic
        flushes = self.broker.flushes
        fault = flushes.pop(0) if target and pending and flushes else None
        confirmed, unconfirmed = (len(pending), 0) if fault is None else fault
        for index, (message, callback) in enumerate(pending):
            if index < confirmed + unconfirmed:
                self.broker.store(self, message)
            if index < confirmed:
                callback(pulsar.Result.Ok, None)
            else:
                self.broken = True
                callback(pulsar.Result.ProducerBlockedQuotaExceededException, None)

    def last_sequence_id(self) -> int:
        return self.broker.last.get((self.topic, self.name), -1)

    def is_connected(self) -> bool:
        return True

    def close(self) -> None: ...


def message(entry: int, target: str = ORDERS, size: int = 4, **own: Any) -> ParkedMessage:
    properties = {DUE: str(T0 + 60_000), TARGET: target, ID: str(entry)}
    properties |= own.pop("properties", {})
    found = ParkedMessage(7, entry, 0, T0, "key", "", 0, properties, b"x" * size)
    return found._replace(**own)


def held_ids(broker: Broker, _admin: object, topic: Any) -> frozenset[tuple[str, str, str, int]]:
    return frozenset(
        (own[ID], own[TARGET], found["partition_key"] or "", int(own[ATTEMPT]))
        for found in broker.topics.get(topic.full, ())
        for own in (found["properties"],)
    )


def run(
    broker: Broker,
    messages: list[ParkedMessage],
    *,
    first_run: bool = False,
    admin: FakeAdmin | None = None,
    epoch: int = 10_000,
    pause_ms: int = 0,
    now_ms: int = T0,
) -> Any:
    """Forward a batch in a new process.

    Args:
        epoch: number of messages between two flushes.
        pause_ms: time between two messages.
        now_ms: present time for routing, ms since the epoch.
    """
    clock = ManualClock(T0)
    given: Any = admin or FakeAdmin()
    sequence = Sequence("query", SOURCE.topic, first_run)
    made = Forwarder(
        broker, given, DESCRIPTION, clock, sequence=sequence, start=lambda work: work()
    )
    made._hand_offs._woken = Waiting(clock)  # type: ignore[assignment]
    with (
        patch.object(forwarder_module, "held_ids", held_ids),
        patch.object(forwarder_module, "EPOCH_MESSAGES", epoch),
    ):
        for each in messages:
            made.forward(SOURCE, each, now_ms)
            clock.advance(timedelta(milliseconds=pause_ms))
        report = made.flush()
    made.close()
    return report


def test_names_of_producers_are_those_that_the_broker_knows() -> None:
    broker, admin = Broker(), FakeAdmin(partitions={ORDERS: 3})
    lacking = SchemaRef.parse("AVRO:0123456789abcdef")
    plain = {SCHEMA: str(lacking)}
    with patch.object(receivers, "target_schema", lambda *_: None):
        run(
            broker,
            [message(1), message(2, key=""), message(3, key="", properties=plain)],
            admin=admin,
        )
    name = Sequence("query", SOURCE.topic).producer_name
    partitions = {number: sequence_id(7, number, 0) % 3 for number in (2, 3)}
    assert broker.names == {
        (HELD, name),
        (ORDERS, name),
        (f"{ORDERS}-partition-{partitions[2]}", f"{name}-keyless"),
        (f"{ORDERS}-partition-{partitions[3]}", f"{name}-{lacking}-keyless"),
    }


def test_nothing_follows_a_refused_message_before_its_record() -> None:
    broker = Broker()
    messages = [message(1), message(2, size=LIMIT + 1), message(3), message(4, BILLS)]
    report = run(broker, messages)
    assert broker.ids(DEAD) == ["2"]
    assert (report.window, report.dead.total()) == (3, 1)
    assert broker.log.index(f"{DEAD} 2") < broker.log.index(f"{ORDERS} 3")
    # A replay stores nothing twice.
    before = dict(Counter(broker.log))
    run(broker, messages)
    assert dict(Counter(broker.log)) == before


def test_messages_are_sent_again_after_a_failed_record() -> None:
    broker, clock = Broker(), ManualClock(T0)
    given: Any = FakeAdmin()
    forwarder = Forwarder(
        broker,
        given,
        DESCRIPTION,
        clock,
        sequence=Sequence("query", SOURCE.topic, first_run=True),
        start=lambda work: work(),
    )
    forwarder._hand_offs._woken = Waiting(clock)  # type: ignore[assignment]
    messages = [message(1), message(2, size=LIMIT + 1), message(3)]
    failing = patch.object(forwarder._too_large, "store", side_effect=BrokerError("away"))
    with patch.object(forwarder_module, "held_ids", held_ids):
        for each in messages[:2]:
            forwarder.forward(SOURCE, each, T0)
        with failing, pytest.raises(BrokerError, match="away"):
            forwarder.flush()
        for each in messages:
            forwarder.forward(SOURCE, each, T0)
        forwarder.flush()
    assert broker.ids(ORDERS) == ["1", "3"]
    assert broker.ids(DEAD) == ["2"]
    assert not broker.ids(HELD)


def test_the_broker_is_asked_after_a_refusal_in_flight() -> None:
    broker = Broker(flushes=[(1, 2)], openings=[None, REFUSED, REFUSED])
    report = run(broker, [message(number) for number in range(1, 6)], first_run=True)
    assert broker.ids(ORDERS) == ["1", "2", "3", "4", "5"]
    assert (report.window, report.held) == (5, {})


def test_a_first_run_holds_what_a_target_refuses_and_a_replay_does_not_know() -> None:
    broker = Broker(openings=[REFUSED] * 100)
    messages = [message(number) for number in range(1, 4)]
    with pytest.raises(BrokerError, match=rf"{ORDERS}.*Quota.*nothing was acknowledged"):
        run(broker, messages)
    assert broker.log == []
    broker.openings = [REFUSED]
    assert run(broker, messages, first_run=True).held == {ORDERS: 3}
    assert broker.ids(HELD) == ["1", "2", "3"]
    # The target has recovered since; nothing is sent twice.
    assert run(broker, messages).held == {ORDERS: 3}
    assert broker.ids(ORDERS, HELD) == ["1", "2", "3"]


def test_a_held_message_does_not_stand_for_others_of_its_id() -> None:
    broker = Broker(openings=[REFUSED])
    own = {ID: "7"}
    held = message(1, properties=own)
    run(broker, [held], first_run=True)
    assert broker.ids(HELD) == ["7"]
    others = [message(2, BILLS, properties=own), message(3, key="other", properties=own)]
    report = run(broker, [held, *others])
    assert report.held == {ORDERS: 1}
    assert broker.ids(ORDERS, BILLS) == ["7", "7"]


def test_nothing_follows_messages_that_are_held_without_asking_their_target() -> None:
    # The target is used again while the records of the fourth and fifth message are missing.
    messages = [message(number) for number in range(1, 7)]
    for crash_after in range(1, 40):
        broker = Broker(openings=[REFUSED], crash_after=crash_after)
        with suppress(Crash):
            run(broker, messages, first_run=True, epoch=3, pause_ms=400)
        broker.crash_after = -1
        run(broker, messages)
        assert sorted(broker.ids(ORDERS, HELD)) == ["1", "2", "3", "4", "5", "6"]


openings = st.lists(st.sampled_from([None, None, REFUSED, AWAY]), max_size=12)
faults = st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 3))), max_size=8)
sizes = st.sampled_from([4, 4, 4, LIMIT + 1])
batches = st.lists(
    st.tuples(st.sampled_from([ORDERS, BILLS, ORDERS, UNKNOWN]), sizes), min_size=1, max_size=9
)
runs = st.lists(st.tuples(openings, faults, st.integers(-1, 60)), max_size=4)


@examples(80)
@given(batches, runs, st.sampled_from([2, 3, 10_000]), st.sampled_from([0, 400, 1100]))
def test_every_message_is_in_one_place_once(
    batch: list[tuple[str, int]],
    attempts: list[tuple[list[Exception | None], list[tuple[int, int] | None], int]],
    epoch: int,
    pause_ms: int,
) -> None:
    broker = Broker()
    messages = [message(number, *each) for number, each in enumerate(batch, 1)]
    done = False
    for index, (given_openings, given_faults, crash_after) in enumerate([*attempts, ([], [], -1)]):
        broker.openings, broker.flushes = list(given_openings), list(given_faults)
        broker.crash_after = crash_after
        try:
            run(broker, messages, first_run=index == 0, epoch=epoch, pause_ms=pause_ms)
            done = True
            break
        except (BrokerError, Crash):
            pass
    assert done
    found = broker.ids(ORDERS, BILLS, HELD, DEAD)
    assert sorted(found, key=int) == [str(number) for number in range(1, len(batch) + 1)]
    assert set(broker.ids(DEAD)) <= {
        str(number)
        for number, (target, size) in enumerate(batch, 1)
        if size > LIMIT or target == UNKNOWN
    }


@given(
    batches,
    st.sets(st.integers(1, 40)),
    runs,
    st.sampled_from([2, 3, 10_000]),
    st.integers(0, 3),
)
def test_messages_that_expire_between_two_runs_are_not_lost(
    batch: list[tuple[str, int]],
    expiring: set[int],
    attempts: list[tuple[list[Exception | None], list[tuple[int, int] | None], int]],
    epoch: int,
    expires_in: int,
) -> None:
    broker = Broker()
    expiry = {EXPIRES: str(T0 + expires_in)}
    messages = [
        message(number, *each, properties=expiry if number in expiring else {})
        for number, each in enumerate(batch, 1)
    ]
    for index, (given_openings, given_faults, crash_after) in enumerate([*attempts, ([], [], -1)]):
        broker.openings, broker.flushes = list(given_openings), list(given_faults)
        broker.crash_after = crash_after
        with suppress(BrokerError, Crash):
            run(broker, messages, first_run=index == 0, epoch=epoch, now_ms=T0 + index)
            break
    found = Counter(broker.ids(ORDERS, BILLS, HELD, DEAD))
    assert set(found) == {str(number) for number in range(1, len(batch) + 1)}
    # A message that an earlier run has handed off may expire, too.
    again = {int(each) for each, count in found.items() if count > 1}
    assert again <= expiring
    assert max(found.values(), default=0) <= 2
