"""Tests of reading a range of a partition, with a fake reader."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pulsar
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delaylevel.cluster.reader import PartitionReader, read_range
from delaylevel.errors import BrokerError
from delaylevel.model.message import ParkedMessage, batch_size, positions_of
from delaylevel.model.position import EARLIEST, Position
from support.fakes import FakeMessage, FakeMessageId, serialized_id

TOPIC = "persistent://public/default/orders-delay-level-partition-2"


@dataclass
class FakeReader:
    client: PartitionClient
    messages: list[FakeMessage]
    closed: bool = False
    connected: bool = True

    def read_next(self, timeout_millis: int) -> FakeMessage:
        self.client.timeouts.append(timeout_millis)
        if self.client.deliveries and not self.client.deliveries.pop(0):
            raise pulsar.Timeout("nothing")
        if not self.messages:
            raise pulsar.Timeout("nothing")
        self.client.reads += 1
        return self.messages.pop(0)

    def has_message_available(self) -> bool:
        self.client.availability_checks += 1
        if self.client.breaks:
            self.client.breaks -= 1
            self.connected = False
            return False
        return bool(self.messages)

    def topic(self) -> str:
        return TOPIC

    def is_connected(self) -> bool:
        connected, self.connected = self.connected, True
        return connected

    def close(self) -> None:
        self.closed = True


@dataclass
class PartitionClient:
    """A fake client of a partition with given entries.

    Attributes:
        entries: ledger, entry and batch size (0 if not batched) of each, in order.
        deliveries: for each of the first reads, True if the broker delivers in time.
        breaks: how often the connection breaks while the client asks if there are more messages.
    """

    entries: list[tuple[int, int, int]]
    deliveries: list[bool] = field(default_factory=list)
    readers: list[FakeReader] = field(default_factory=list)
    given: list[dict[str, Any]] = field(default_factory=list)
    timeouts: list[int] = field(default_factory=list)
    breaks: int = 0
    availability_checks: int = 0
    reads: int = 0

    def all(self) -> list[FakeMessage]:
        return [
            FakeMessage(FakeMessageId(Position(ledger, entry, batch), size or None))
            for ledger, entry, size in self.entries
            for batch in (range(size) if size else [-1])
        ]

    def create_reader(self, topic: str, start: Any, **options: Any) -> FakeReader:
        assert topic == TOPIC
        assert options["start_message_id_inclusive"] is True
        self.given.append(options)
        first = Position(start.ledger_id(), start.entry_id(), start.batch_index())
        behind = [message for message in self.all() if message.id.position >= first]
        self.readers.append(FakeReader(self, behind))
        return self.readers[-1]


def read(client: PartitionClient, start: Position, end: Position, **options: Any) -> list[Position]:
    found = [item.position for item in read_range(client, TOPIC, start, end, **options)]
    assert all(reader.closed for reader in client.readers)
    return found


layouts = st.lists(
    st.lists(st.sampled_from([0, 0, 1, 2, 3]), min_size=1, max_size=5), min_size=1, max_size=3
).map(
    lambda ledgers: [
        (10 * (number + 1), entry, size)
        for number, sizes in enumerate(ledgers)
        for entry, size in enumerate(sizes)
    ]
)


@settings(max_examples=300)
@given(layouts, st.data())
def test_a_range_has_exactly_its_messages(
    layout: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    client = PartitionClient(layout)
    stored = [message.id.position for message in client.all()]
    fronts = [Position(ledger, entry) for ledger, entry, _ in layout]
    ends = sorted({*stored, *fronts, *(front.next_entry for front in fronts)})
    end = data.draw(st.sampled_from(ends))
    start = data.draw(st.sampled_from([EARLIEST, *ends]))
    expected = [position for position in stored if start <= position < end]
    assert read(client, start, end) == expected
    if (
        expected
        and end in (expected[-1].next, expected[-1].next_entry)
        and len(client.readers) == 1
    ):
        # The last message shows the end of the range, so the reader does not wait.
        assert client.availability_checks == 0
        assert client.reads == len(expected)


@settings(max_examples=300)
@given(layouts, st.data())
def test_messages_that_are_missing_in_a_batch_are_passed_over(
    layout: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    client = PartitionClient(layout)
    every = client.all()
    missing = data.draw(st.sets(st.integers(0, len(every) - 1)))
    kept = [message for number, message in enumerate(every) if number not in missing]
    end = data.draw(st.sampled_from([message.id.position for message in every]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "all", lambda: kept)
        expected = [item.id.position for item in kept if item.id.position < end]
        assert read(client, EARLIEST, end) == expected


def test_a_pause_within_a_batch_is_no_end() -> None:
    client = PartitionClient([(10, 0, 3)], deliveries=[True, False, True, False, True])
    positions = [Position(10, 0, batch) for batch in range(3)]
    assert read(client, EARLIEST, Position(10, 1)) == positions


def test_an_empty_range_opens_no_reader() -> None:
    client = PartitionClient([(10, 0, 0)])
    assert read(client, Position(10, 1), Position(10, 1)) == []
    assert read(client, Position(10, 2), Position(10, 1)) == []
    assert client.readers == []


def test_all_fields_of_a_message_are_read() -> None:
    (message,) = read_range(PartitionClient([(10, 0, 0)]), TOPIC, EARLIEST, Position(10, 1))
    assert message == ParkedMessage(10, 0, -1, 11, "key", "order", 12, {"a": "b"}, b"body")
    assert message.stable_id(TOPIC) == f"{TOPIC.removeprefix('persistent://')}:10:0:-1"


@pytest.mark.parametrize("value", [None, b"", b"\x00"])
def test_null_and_empty_values_differ(value: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    client = PartitionClient([(10, 0, 0)])
    given = [FakeMessage(FakeMessageId(Position(10, 0), None), value)]
    monkeypatch.setattr(client, "all", lambda: given)
    (message,) = read_range(client, TOPIC, EARLIEST, Position(10, 1))
    assert message.value == value
    assert (message.value is None) == (value is None)


def test_a_partition_reader_receives_later_messages() -> None:
    client = PartitionClient([(10, 0, 0), (10, 1, 2), (10, 2, 0)])
    reader = PartitionReader(client, TOPIC, Position(10, 1))
    first = reader.receive(200)
    assert reader.has_message_available()
    burst = [message.id.position for message in reader.burst(first)]
    assert burst == [Position(10, 1, 0), Position(10, 1, 1), Position(10, 2)]
    assert reader.receive(300) is None
    assert not reader.has_message_available()
    assert client.timeouts == [200, 1, 1, 1, 300]
    reader.close()
    assert client.readers[0].closed


def test_the_rest_of_an_unfinished_burst_is_read_later() -> None:
    client = PartitionClient([(10, 0, 0), (10, 1, 0), (10, 2, 0)])
    reader = PartitionReader(client, TOPIC, EARLIEST)
    for message in reader.burst(reader.receive(200)):
        if message.id.position == Position(10, 1):
            break
    following = reader.receive(200)
    assert following is not None
    assert following.id.position == Position(10, 2)


def test_readers_do_not_share_a_name() -> None:
    client = PartitionClient([(10, 0, 0)])
    for _ in range(2):
        read(client, EARLIEST, Position(10, 1))
    one, other = client.given
    assert one["subscription_role_prefix"] != other["subscription_role_prefix"]


def test_trimmed_entries_are_skipped() -> None:
    client = PartitionClient([(10, 0, 0)])
    # The range covers entries that the broker no longer has.
    assert read(client, EARLIEST, Position(10, 5)) == [Position(10, 0)]
    assert client.availability_checks == 3
    assert read(PartitionClient([]), Position(3, 0), Position(10, 5)) == []


@pytest.mark.parametrize("breaks", [1, 2, 5])
def test_an_answer_over_a_connection_that_breaks_does_not_end_a_range(breaks: int) -> None:
    client = PartitionClient([(10, 0, 0), (10, 1, 0)], deliveries=[True, False], breaks=breaks)
    assert read(client, EARLIEST, Position(10, 2)) == [Position(10, 0), Position(10, 1)]
    assert client.availability_checks == breaks + 1


def test_connections_that_always_break_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delaylevel.cluster.reader._LONGEST_ASKING_S", 0.05)
    client = PartitionClient([], breaks=10_000)
    with pytest.raises(BrokerError, match="breaks again and again"):
        read(client, EARLIEST, Position(10, 2))


def test_a_range_may_end_in_a_later_ledger() -> None:
    client = PartitionClient([(10, 0, 2), (12, 0, 0), (12, 1, 0)])
    assert read(client, EARLIEST, Position(12, 1)) == [
        Position(10, 0, 0),
        Position(10, 0, 1),
        Position(12, 0),
    ]


def test_a_slow_broker_is_awaited() -> None:
    client = PartitionClient([(10, 0, 0), (10, 1, 0)], deliveries=[False, True, False, True])
    end = Position(10, 2)
    assert read(client, EARLIEST, end, poll_timeout_ms=5000) == [Position(10, 0), Position(10, 1)]
    # The first wait is short, for ranges without messages. It is long if there are more.
    assert client.timeouts == [200, 5000, 200, 5000]


def test_a_broker_that_delivers_nothing_is_an_error() -> None:
    client = PartitionClient([(10, 0, 0)], deliveries=[False, False])
    with pytest.raises(BrokerError) as caught:
        read(client, EARLIEST, Position(10, 1), poll_timeout_ms=5000)
    for part in (TOPIC, "10:1:-1", "5000 ms", "Nothing was acknowledged"):
        assert part in str(caught.value)
    assert client.readers[0].closed


def test_a_reader_is_closed_if_the_iteration_stops() -> None:
    client = PartitionClient([(10, 0, 0), (10, 1, 0)])
    messages = read_range(client, TOPIC, EARLIEST, Position(10, 2))
    next(messages)
    messages.close()  # type: ignore[attr-defined]
    assert client.readers[0].closed


@dataclass
class Bytes:
    data: bytes

    def serialize(self) -> bytes:
        return self.data


@pytest.mark.parametrize("size", [1, 7, 127, 128, 1000, 1024, 70_000])
@pytest.mark.parametrize("more", [False, True])
def test_the_batch_size_is_that_of_the_serialized_id(size: int, more: bool) -> None:
    assert batch_size(Bytes(serialized_id(1 << 40, 1 << 33, 3, size, more=more))) == size


def test_an_unbatched_id_has_no_batch_size() -> None:
    assert batch_size(Bytes(b"")) == 0
    assert batch_size(Bytes(serialized_id(5, 3, -1, None))) == 0
    # These are the client's bytes of an unbatched ID. Its negative batch index takes ten bytes.
    assert batch_size(pulsar.MessageId(-1, 5, 3, -1)) == 0
    assert batch_size(pulsar.MessageId(-1, 5, 3, 2)) == 0


@settings(max_examples=300)
@given(layouts, st.data())
def test_the_positions_of_successive_messages_are_those_of_their_ids(
    layout: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    stored = PartitionClient(layout).all()
    start = data.draw(st.integers(0, len(stored)))
    stop = data.draw(st.integers(start, len(stored)))
    missing = data.draw(st.sets(st.integers(start, stop)))
    some = [stored[index] for index in range(start, stop) if index not in missing]
    expected = [message.id.position for message in some]
    assert [Position(*each) for each in zip(*positions_of(some), strict=True)] == expected
