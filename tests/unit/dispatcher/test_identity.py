"""Tests of the identities of messages: which of them are copies, and how compact they are."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delaylevel import OutcomeStatus, PartitionStrategy, topics
from delaylevel.dispatcher.record import identity
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionBy
from delaylevel.testing import MemoryPulsar

MINUTE = timedelta(minutes=1)
LEVELS = Levels([PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(days=1))])
#: Ways of a message: straight into the window, and through a level.
WAYS = [10 * MINUTE, timedelta(hours=2)]


@pytest.fixture(params=[1, 4])
def memory(request: pytest.FixtureRequest) -> Iterator[MemoryPulsar]:
    with MemoryPulsar() as memory:
        for name in ("orders", "invoices"):
            memory.client().subscribe(name, "app")
        targets = ("orders", "invoices")
        described = LevelTopicDescription(
            "delayed", LEVELS, targets, window_partitions=request.param
        )
        topics.create(memory.admin, described)
        yield memory


def producer_for(memory: MemoryPulsar, target: str = "orders") -> Any:
    return memory.client().create_producer(
        target, enable_delay_level_topic=True, delay_level_topic="delayed"
    )


def delivered(memory: MemoryPulsar, target: str = "orders") -> list[bytes]:
    return [message.data for message in memory.delivered(target)]


@pytest.mark.parametrize("after", WAYS)
@pytest.mark.parametrize("is_position", [False, True], ids=["ID", "position"])
def test_one_id_on_several_keys_and_targets_is_several_messages(
    memory: MemoryPulsar, after: timedelta, is_position: bool
) -> None:
    """An application may use the ID that the product gave another message."""
    producer, other, name = producer_for(memory), producer_for(memory, "invoices"), "7"
    if is_position:
        producer.send(b"first", partition_key="first", deliver_after=after)
        memory.advance(3 * timedelta(hours=1))
        name = memory.delivered("orders")[0].properties["delaylevel.id"]
        producer.send(b"copy", partition_key="first", deliver_after=after, message_id=name)
    keys = [None, "a", "b", "c", "d", "e"]
    for key in keys:
        for body in (f"{key}".encode(), b"copy"):
            producer.send(body, partition_key=key, deliver_after=after, message_id=name)
    other.send(b"invoice", deliver_after=after, message_id=name)
    memory.advance(3 * timedelta(hours=1))
    found = [body for body in delivered(memory) if body != b"first"]
    assert sorted(found) == [b"None", b"a", b"b", b"c", b"d", b"e"]
    assert delivered(memory, "invoices") == [b"invoice"]


@pytest.mark.parametrize("key", [None, "k"])
def test_another_due_time_makes_no_other_message(memory: MemoryPulsar, key: str | None) -> None:
    producer = producer_for(memory)
    options = {"partition_key": key, "message_id": "7"}
    # The first one in the window is delivered, and the others are its copies.
    producer.send(b"late", deliver_after=timedelta(hours=5), **options)
    producer.send(b"early", deliver_after=timedelta(hours=3), **options)
    memory.advance(timedelta(hours=2, minutes=57))
    producer.send(b"straight", deliver_after=MINUTE, **options)
    memory.advance(timedelta(hours=6))
    assert delivered(memory) == [b"early"]


@pytest.mark.parametrize("after", WAYS)
def test_a_cancellation_ends_the_message_of_its_key_alone(
    memory: MemoryPulsar, after: timedelta
) -> None:
    producer = producer_for(memory)
    at = memory.clock.now_ms() + after // timedelta(milliseconds=1)
    receipts = {
        key: producer.schedule(f"{key}".encode(), None, key, deliver_at=at, message_id="7")
        for key in (None, "a", "b", "c")
    }
    producer.cancel(message_id="7", deliver_at=at, partition_key="b")
    moved = producer.reschedule(
        receipts["c"], b"d", None, "d", deliver_after=2 * after, message_id="7"
    )
    memory.advance(3 * timedelta(hours=1))
    producer.cancel(receipts["a"])
    memory.advance(2 * timedelta(hours=1))
    assert sorted(delivered(memory)) == [b"None", b"a", b"d"]
    found = {key: producer.outcome(receipt) for key, receipt in receipts.items()}
    assert {key: outcome and outcome.status for key, outcome in found.items()} == {
        None: None,
        "a": OutcomeStatus.TOO_LATE,
        "b": OutcomeStatus.CANCELLED,
        "c": OutcomeStatus.CANCELLED,
    }
    assert producer.outcome(moved.receipt) is None


TARGET = "persistent://public/default/orders"
SOURCE = "public/default/orders-delay-level-hour-partition-3"

NUMBERS = st.one_of(
    st.integers(-2, 1 << 40).map(str),
    st.sampled_from(
        ["0", "1", "01", "-0", "+1", " 1", "1 ", "1\n", "1_0", "10", "\uff11", "\u0661", "-1", ""]
    ),
)
SOURCES = st.sampled_from([SOURCE, "inv", "inv:2024", "", "\n1", "a\n1", "a", ":", "a:", " a"])
IDS = st.one_of(
    st.text(max_size=20),
    st.tuples(SOURCES, NUMBERS, NUMBERS, NUMBERS).map(":".join),
)


def spelled(key: str, number: int) -> tuple[str, int] | None:
    """Return the ID and the attempt from which a compact identity was made; None for a hash."""
    source, _, attempt = key.removeprefix(f"{TARGET}\n").partition("\n")
    if not source:
        return None
    position = f"{number >> 32}:{number >> 10 & ((1 << 22) - 1)}:{(number & 1023) - 1}"
    return f"{source}:{position}", int(attempt or 0)


@given(IDS, st.integers(0, 12))
@example("inv:2024:01:02", 0)
@example(":7:1:2", 1)
@example("a\n1:7:1:2", 0)
def test_a_compact_identity_is_that_of_one_id_only(message_id: str, attempt: int) -> None:
    key, number = identity(message_id, TARGET, "", attempt)
    assert 0 <= number < 1 << 63
    assert spelled(key, number) in (None, (message_id, attempt))


@pytest.mark.parametrize(
    ("message_id", "expected"),
    [
        (f"{SOURCE}:7:1:-1", (f"{TARGET}\n{SOURCE}", 7 << 32 | 1 << 10)),
        (f"{SOURCE}:7:1:1021", (f"{TARGET}\n{SOURCE}", 7 << 32 | 1 << 10 | 1022)),
        ("inv:2024:1:2", (f"{TARGET}\ninv", 2024 << 32 | 1 << 10 | 3)),
        ("mine", (f"{TARGET}\n", 751_336_569_042_138_743)),
        (f"{SOURCE}:2147483648:1:2", (f"{TARGET}\n", 0)),
        (f"{SOURCE}:7:4194304:2", (f"{TARGET}\n", 0)),
        (f"{SOURCE}:7:1:1023", (f"{TARGET}\n", 0)),
    ],
)
def test_the_identities_of_known_ids(message_id: str, expected: tuple[str, int]) -> None:
    key, number = identity(message_id, TARGET, "")
    assert key == expected[0]
    assert not expected[1] or number == expected[1]
