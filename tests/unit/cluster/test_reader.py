"""Tests of reading a partition, a range of it or as it grows, with a fake reader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.cluster.reader import PartitionReader, read_range
from delaylevel.errors import BrokerError
from delaylevel.model.message import batch_size, positions_of
from delaylevel.model.position import EARLIEST, Position
from support.fakes import FakeMessage, FakeMessageId, serialized_id
from support.seeds import examples

Entry = tuple[int, int, int]
TOPIC = "persistent://public/default/orders-delay-level-partition-2"
# Each of 1 MiB and more makes a reader prefetch less.
BODIES = [bytes(mib << 20) for mib in range(6)]


class FakeReader:
    """A reader with the two ways of the client: its queue, and its answer to a question.

    A message that comes while the reader is asked misses the question, and stays in the queue.
    """

    def __init__(self, partition: Partition, queue: list[FakeMessage]) -> None:
        self._partition, self.queue = partition, queue
        self.asked: list[Callable[[Any, Any], None]] = []
        self.answers: list[Callable[[], None]] = []  # in the client's thread, not called yet
        self.may_miss = self.closed = False
        self._connected = True

    def read_next(self, timeout_millis: int) -> FakeMessage:
        partition = self._partition
        if partition.deliveries and not partition.deliveries.pop(0):
            raise pulsar.Timeout("nothing")
        if not self.queue:
            raise pulsar.Timeout("nothing")
        partition.reads += 1
        return self.queue.pop(0)

    def read_next_async(self, answer: Callable[[Any, Any], None]) -> None:
        if self.queue:
            answer(pulsar.Result.Ok, self.queue.pop(0))
            return
        assert not self.asked
        self.asked.append(answer)
        self.may_miss = True

    def arrive(self, message: FakeMessage, misses: bool) -> None:
        misses, self.may_miss = misses and self.may_miss, False
        if not self.asked or misses:
            self.queue.append(message)
            return
        answer = self.asked.pop()
        self.answers.append(lambda: answer(pulsar.Result.Ok, message))

    def has_message_available(self) -> bool:
        self._partition.availability_checks += 1
        if self._partition.breaks:
            self._partition.breaks -= 1
            self._connected = False
            return False
        return bool(self.queue)

    def topic(self) -> str:
        return TOPIC

    def is_connected(self) -> bool:
        connected, self._connected = self._connected, True
        return connected

    def close(self) -> None:
        self.closed = True
        for answer in self.asked:
            answer(pulsar.Result.AlreadyClosed, None)


class Partition:
    """A client of one partition, its messages, and a clock.

    Args:
        entries: ledger, entry and batch size (0 if not batched) of each, in order.
        deliveries: for each of the first reads, True if the broker delivers in time.
        breaks: how often the connection breaks while the client asks if there are more messages.
    """

    def __init__(
        self, entries: Iterable[Entry] = (), deliveries: Iterable[bool] = (), breaks: int = 0
    ) -> None:
        self.messages = [
            FakeMessage(FakeMessageId(Position(ledger, entry, batch), size or None))
            for ledger, entry, size in entries
            for batch in (range(size) if size else [-1])
        ]
        self.deliveries, self.breaks = list(deliveries), breaks
        self.readers: list[FakeReader] = []
        self.names: list[str] = []
        self.queues: list[int] = []  # of the readers
        self.refusals: list[Exception] = []  # of the next openings
        self.availability_checks = self.reads = self.woken = 0
        self.now_s = 100.0

    def create_reader(self, topic: str, start: Any, **options: Any) -> FakeReader:
        assert topic == TOPIC
        assert options["start_message_id_inclusive"] is True
        if self.readers and self.refusals:
            raise self.refusals.pop()
        self.names.append(options["subscription_role_prefix"])
        self.queues.append(options["receiver_queue_size"])
        first = Position(start.ledger_id(), start.entry_id(), start.batch_index())
        behind = [message for message in self.messages if message.id.position >= first]
        self.readers.append(FakeReader(self, behind))
        return self.readers[-1]

    def read(self, start: Position, end: Position) -> list[Position]:
        found = [item.position for item in read_range(self, TOPIC, start, end)]
        assert all(reader.closed for reader in self.readers)
        return found

    def reader(self) -> PartitionReader:
        return PartitionReader(self, TOPIC, EARLIEST, lambda: self.now_s)

    def append(self, size: int, misses: bool, mib: int) -> None:
        entry = len(self.messages)
        for batch in range(size) if size > 1 else [-1]:
            at = FakeMessageId(Position(7, entry, batch), size)
            self.messages.append(FakeMessage(at, BODIES[mib]))
            self.readers[-1].arrive(self.messages[-1], misses)

    def answer(self) -> None:
        for reader in self.readers:
            while reader.answers:
                reader.answers.pop(0)()

    def wake(self) -> None:
        self.woken += 1


layouts = st.lists(
    st.lists(st.sampled_from([0, 0, 1, 2, 3]), min_size=1, max_size=5), min_size=1, max_size=3
).map(
    lambda ledgers: [
        (10 * (number + 1), entry, size)
        for number, sizes in enumerate(ledgers)
        for entry, size in enumerate(sizes)
    ]
)


@examples(60)
@given(layouts, st.data())
def test_a_range_has_exactly_its_messages(layout: list[Entry], data: st.DataObject) -> None:
    """Also where some are missing in a batch, which are passed over."""
    client = Partition(layout)
    for message in client.messages:
        message.value = data.draw(st.sampled_from(BODIES[:3]))
    stored = [message.id.position for message in client.messages]
    fronts = [Position(ledger, entry) for ledger, entry, _ in layout]
    ends = sorted({*stored, *fronts, *(front.next_entry for front in fronts)})
    end = data.draw(st.sampled_from(ends))
    start = data.draw(st.sampled_from([EARLIEST, *ends]))
    missing = data.draw(st.just(set()) | st.sets(st.sampled_from(stored)))
    client.messages = [each for each in client.messages if each.id.position not in missing]
    expected = [each for each in stored if start <= each < end and each not in missing]
    assert client.read(start, end) == expected
    if (
        expected
        and end in (expected[-1].next, expected[-1].next_entry)
        and len(client.readers) == 1
        and not missing
    ):
        # The last message shows the end of the range, so the reader does not wait.
        assert client.availability_checks == 0
        assert client.reads == len(expected)


appended = st.tuples(
    st.just("append"), st.sampled_from([1, 2, 3]), st.booleans(), st.sampled_from([0, 0, 1, 2, 5])
)
waited = st.tuples(st.just("wait"), st.sampled_from([0.001, 0.03, 0.3, 2.0]))
other = st.tuples(st.sampled_from(["answer", "fetch"]))


@examples(100)
@given(st.lists(st.one_of(appended, waited, other, other), max_size=40))
def test_a_reader_that_is_asked_keeps_the_order_and_misses_nothing(
    steps: list[tuple[Any, ...]],
) -> None:
    partition = Partition()
    reader = partition.reader()
    got: list[Position] = []
    until_s = 0.0

    def fetch() -> None:
        nonlocal until_s
        while True:
            message = reader.receive(0)
            if message is None:
                break
            got.extend(each.id.position for each in reader.burst(message))
        until_s = reader.ask(partition.wake)

    fetch()
    for kind, *values in steps:
        if kind == "append":
            partition.append(*values)
        elif kind == "wait":
            partition.now_s += values[0]
        elif kind == "answer":
            partition.answer()
        else:
            fetch()
        assert got == [message.id.position for message in partition.messages[: len(got)]]
    for _ in range(6):  # all times at which a reader looks again
        partition.answer()
        partition.now_s = max(partition.now_s, until_s)
        fetch()
    assert got == [message.id.position for message in partition.messages]


def test_an_answer_wakes_the_one_who_asked() -> None:
    partition = Partition()
    reader = partition.reader()
    assert reader.receive(0) is None
    assert partition.now_s < reader.ask(partition.wake) < partition.now_s + 0.1
    partition.append(1, misses=False, mib=0)
    assert (partition.woken, reader.receive(0)) == (0, None)
    partition.answer()
    assert partition.woken == 1
    assert reader.has_message_available()
    message = reader.receive(0)
    assert message is not None
    assert message.id.position == Position(7, 0)
    assert len(partition.readers) == 1


def test_nothing_follows_an_encrypted_batch_that_the_client_compares_with_its_end() -> None:
    partition = Partition([(7, 0, 0)])
    partition.messages[0].encryption = object()
    reader = partition.reader()
    assert reader.receive(0) is not None
    partition.readers[0].queue.append(partition.messages[0])  # the client says that more follows
    assert not reader.has_message_available()
    assert not reader.has_message_available()
    assert len(partition.readers) == 2
    partition.append(1, misses=False, mib=0)
    assert reader.has_message_available()


def test_readers_do_not_share_a_name() -> None:
    client = Partition([(10, 0, 0)])
    for _ in range(2):
        client.read(EARLIEST, Position(10, 1))
    assert len(set(client.names)) == 2


@pytest.mark.parametrize("breaks", [1, 2, 5])
def test_an_answer_over_a_connection_that_breaks_does_not_end_a_range(breaks: int) -> None:
    client = Partition([(10, 0, 0), (10, 1, 0)], deliveries=[True, False], breaks=breaks)
    assert client.read(EARLIEST, Position(10, 2)) == [Position(10, 0), Position(10, 1)]
    assert client.availability_checks == breaks + 1


def test_connections_that_always_break_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delaylevel.cluster.reader._LONGEST_ASKING_S", 0.05)
    client = Partition([], breaks=10_000)
    with pytest.raises(BrokerError, match="breaks again and again"):
        client.read(EARLIEST, Position(10, 2))


def test_a_broker_that_delivers_nothing_is_an_error() -> None:
    client = Partition([(10, 0, 0)], deliveries=[False, False])
    with pytest.raises(BrokerError) as caught:
        client.read(EARLIEST, Position(10, 1))
    for part in (TOPIC, "10:1:-1", "30000 ms", "Nothing was acknowledged"):
        assert part in str(caught.value)
    assert client.readers[0].closed


def test_a_reader_is_closed_if_the_iteration_stops() -> None:
    client = Partition([(10, 0, 0), (10, 1, 0)])
    messages = read_range(client, TOPIC, EARLIEST, Position(10, 2))
    next(messages)
    messages.close()  # type: ignore[attr-defined]
    assert client.readers[0].closed


@pytest.mark.parametrize("size", [1, 7, 127, 128, 1000, 1024, 70_000])
@pytest.mark.parametrize("more", [False, True])
def test_the_batch_size_is_that_of_the_serialized_id(size: int, more: bool) -> None:
    stored = serialized_id(1 << 40, 1 << 33, 3, size, more=more)
    assert batch_size(SimpleNamespace(serialize=lambda: stored)) == size


@examples(60)
@given(layouts, st.data())
def test_the_positions_of_successive_messages_are_those_of_their_ids(
    layout: list[Entry], data: st.DataObject
) -> None:
    stored = Partition(layout).messages
    start = data.draw(st.integers(0, len(stored)))
    stop = data.draw(st.integers(start, len(stored)))
    missing = data.draw(st.sets(st.integers(start, stop)))
    some = [stored[index] for index in range(start, stop) if index not in missing]
    expected = [message.id.position for message in some]
    assert [Position(*each) for each in zip(*positions_of(some), strict=True)] == expected


def test_an_error_is_no_reason_to_ask_again_at_once() -> None:
    partition = Partition()
    reader = partition.reader()
    reader.ask(partition.wake)
    (answer,) = partition.readers[0].asked
    partition.readers[0].asked.clear()
    answer(pulsar.Result.NotConnected, None)
    assert partition.woken == 1
    assert reader.ask(partition.wake) > partition.now_s + 0.1
    assert not partition.readers[0].asked
    partition.now_s = reader.ask(partition.wake)
    reader.ask(partition.wake)
    assert len(partition.readers[0].asked) == 1


def large(entries: Iterable[Entry], sizes: Iterable[int]) -> Partition:
    """Return a partition whose messages have these sizes, in MiB."""
    partition = Partition(entries)
    for message, size in zip(partition.messages, sizes, strict=True):
        message.value = BODIES[size]
    return partition


def test_a_range_of_large_messages_is_read_with_a_short_queue() -> None:
    partition = large([(7, 0, 0), (7, 1, 0), (7, 2, 2), (7, 3, 0), (8, 0, 0)], (0, 1, 2, 1, 5, 0))
    every = [message.id.position for message in partition.messages]
    assert partition.read(EARLIEST, Position(9, 0)) == every
    assert partition.queues == [2000, 32, 16, 6]


@pytest.mark.parametrize("trouble", ["", "refused", "not connected"])
def test_a_reader_that_meets_a_large_message_prefetches_fewer(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that was received waits for no broker that is away."""
    partition = large([(7, number, 0) for number in range(4)], (0, 4, 4, 0))
    partition.refusals = [pulsar.ConnectError("away")] * (trouble == "refused")
    reader = partition.reader()
    with monkeypatch.context() as patch:
        if trouble == "not connected":
            patch.setattr(FakeReader, "is_connected", lambda self: False)
        found = [reader.receive(0) for _ in range(2)]
        assert trouble != "not connected" or partition.queues == [2000]
    found += [reader.receive(0) for _ in range(2)]
    assert found == partition.messages
    assert partition.queues == [2000, 8]
    reader.close()
    assert all(each.closed for each in partition.readers)
