"""Tests of a partition's producer while it opens, with openings that a test scripts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pulsar
import pytest
from pulsar.schema import BytesSchema

from delaylevel.cluster.threads import in_thread
from delaylevel.errors import LevelTopicError
from delaylevel.producer.client_calls import GroupCommit, ignore
from delaylevel.producer.partition import Opening, PartitionProducer
from support.world import eventually

Result = pulsar.Result
NO_ARGUMENTS: dict[str, Any] = dict.fromkeys(
    ("properties", "partition_key", "ordering_key", "event_timestamp", "deliver_at")
)


class OpenedProducer:
    """A producer of the client; it confirms its messages in a flush.

    Attributes:
        taken: bodies of the messages, in order.
        closed: True after a close.
        flushes: number of flushes.
    """

    _schema = BytesSchema()

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.closed = False
        self.flushes = 0
        self._lock = threading.Lock()
        self._pending: list[Callable[..., Any]] = []

    def send_async(self, body: bytes, callback: Callable[..., Any], **_: Any) -> None:
        if self.closed:
            callback(Result.AlreadyClosed, None)
            return
        with self._lock:
            self.taken.append(body)
            self._pending.append(callback)

    def flush(self) -> None:
        with self._lock:
            self.flushes += 1
            pending, self._pending = self._pending, []
        for number, callback in enumerate(pending):
            callback(Result.Ok, number)

    def close(self) -> None:
        self.closed = True

    def is_connected(self) -> bool:
        return not self.closed


class Openings:
    """The openings of one partition, which a test ends.

    Attributes:
        attempts: the ``done`` functions of the openings so far.
        check: outcome of the check before each opening.
        ready: producers to which messages may go directly.
        given: number of messages given to producers.
    """

    def __init__(self) -> None:
        self.attempts: list[Callable[[Any, Exception | None], None]] = []
        self.check: Callable[[], None] = lambda: None
        self.ready: list[Any] = []
        self.given = 0

    def partition(self, **settings: Any) -> PartitionProducer:
        def count(number: int) -> None:
            self.given += number

        opening = Opening(
            topic=lambda: "persistent://public/default/orders-delay-level-partition-3",
            check=lambda: self.check(),
            open=lambda topic, done: self.attempts.append(done),
            start=in_thread,
            opened=self.ready.append,
            given=count,
        )
        return PartitionProducer(opening, {"batching_enabled": True, **settings})

    def end(self, attempt: int = 0, error: Exception | None = None) -> OpenedProducer:
        eventually(lambda: len(self.attempts) > attempt, "an opening", 10)
        producer = OpenedProducer()
        self.attempts[attempt](None if error else producer, error)
        return producer


@pytest.fixture
def openings() -> Openings:
    return Openings()


class Results(list[Any]):
    """Results of callbacks, in their order."""

    def __call__(self, result: Any, message_id: Any) -> None:
        assert message_id is not None or result != Result.Ok
        self.append(result)

    def wait(self, count: int) -> list[Any]:
        eventually(lambda: len(self) >= count, f"{count} results", 10)
        return list(self)


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run a call in a thread; its value or exception is appended to the list."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def test_messages_wait_in_order_until_the_producer_is_open(openings: Openings) -> None:
    partition, results = openings.partition(), Results()
    for number in range(5):
        partition.send_async(b"%d" % number, results, NO_ARGUMENTS)
    assert (openings.given, results, partition.is_connected()) == (0, [], True)
    producer = openings.end()
    eventually(lambda: openings.ready == [producer], "the direct way", 10)
    partition.send_async(b"5", results, NO_ARGUMENTS)
    assert producer.taken == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert openings.given == 6
    partition.flush()
    assert results == [Result.Ok] * 6
    assert len(openings.attempts) == 1


def test_a_callback_may_send_to_a_partition_that_is_not_open(openings: Openings) -> None:
    # The client's thread must return from the callback, or no opening ever ends.
    first, second, results = openings.partition(), openings.partition(), Results()
    first.send_async(b"1", lambda *_: second.send_async(b"2", results, NO_ARGUMENTS), NO_ARGUMENTS)
    producer = openings.end(0)
    eventually(lambda: producer.taken, "the first message", 10)
    first.flush()
    other = openings.end(1)
    eventually(lambda: other.taken == [b"2"], "the second message", 10)


def test_many_threads_open_it_once_and_keep_their_order(openings: Openings) -> None:
    partition = openings.partition(block_if_queue_full=True, max_pending_messages=100)

    def send(thread: int) -> None:
        for number in range(100):
            partition.send_async(b"%d %d" % (thread, number), lambda *_: None, NO_ARGUMENTS)

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(50)]
    for each in threads:
        each.start()
    producer = openings.end()
    for each in threads:
        each.join(60)
    eventually(lambda: len(producer.taken) == 5000, "all messages", 10)
    sent = [tuple(map(int, body.split())) for body in producer.taken]
    for thread in range(50):
        assert [number for sender, number in sent if sender == thread] == list(range(100))
    assert len(openings.attempts) == 1


def test_a_full_queue_refuses_messages_at_once(openings: Openings) -> None:
    partition, results = openings.partition(max_pending_messages=2), Results()
    for _ in range(4):
        partition.send_async(b"x", results, NO_ARGUMENTS)
    assert results == [Result.ProducerQueueIsFull] * 2
    with pytest.raises(pulsar.ProducerQueueIsFull):
        partition.send(b"x", NO_ARGUMENTS)
    assert len(eventually(openings.end, "an opening").taken) <= 2


def test_a_full_queue_waits_for_room(openings: Openings) -> None:
    partition = openings.partition(max_pending_messages=1, block_if_queue_full=True)
    partition.send_async(b"1", lambda *_: None, NO_ARGUMENTS)
    thread, _ = in_background(lambda: partition.send_async(b"2", lambda *_: None, NO_ARGUMENTS))
    thread.join(0.05)
    assert thread.is_alive()
    producer = openings.end()
    thread.join(10)
    eventually(lambda: producer.taken == [b"1", b"2"], "both messages", 10)


def test_messages_time_out_and_make_room_while_it_opens(openings: Openings) -> None:
    settings = {"max_pending_messages": 1, "block_if_queue_full": True, "send_timeout_millis": 50}
    partition, results = openings.partition(**settings), Results()
    for _ in range(3):
        partition.send_async(b"x", results, NO_ARGUMENTS)
    flushed = Results()
    partition.await_opening(lambda error: flushed.append(type(error)))
    assert results.wait(3) == [Result.Timeout] * 3
    assert flushed.wait(1) == [pulsar.Timeout]
    with pytest.raises(pulsar.Timeout):
        partition.send(b"x", NO_ARGUMENTS)


def test_trouble_with_the_broker_is_tried_again_while_messages_wait(openings: Openings) -> None:
    partition, results = openings.partition(), Results()
    partition.send_async(b"x", results, NO_ARGUMENTS)
    openings.end(0, pulsar.ConnectError("x"))
    eventually(lambda: not partition.is_connected(), "the failure", 10)
    openings.end(1, pulsar.ServiceUnitNotReady("x"))
    producer = openings.end(2)
    eventually(lambda: producer.taken == [b"x"], "the message", 10)
    assert partition.is_connected()


def test_it_is_not_opened_for_messages_that_timed_out(openings: Openings) -> None:
    partition, results = openings.partition(send_timeout_millis=20), Results()
    partition.send_async(b"x", results, NO_ARGUMENTS)
    results.wait(1)
    openings.end(0, pulsar.ConnectError("x"))
    eventually(lambda: partition._worker is None, "the end of the thread", 10)
    assert (len(openings.attempts), partition.is_connected()) == (1, True)


def test_a_refusal_ends_all_that_wait_and_the_next_message_tries_again(openings: Openings) -> None:
    partition, results = openings.partition(), Results()
    for _ in range(3):
        partition.send_async(b"x", results, NO_ARGUMENTS)
    thread, outcome = in_background(lambda: partition.send(b"x", NO_ARGUMENTS))
    eventually(lambda: partition._queue.messages == 4, "the queue", 10)
    openings.end(0, pulsar.AuthorizationError("x"))
    assert results.wait(3) == [Result.AuthorizationError] * 3
    thread.join(10)
    assert type(outcome[0]) is pulsar.AuthorizationError
    partition.send_async(b"again", results, NO_ARGUMENTS)
    producer = openings.end(1)
    eventually(lambda: producer.taken == [b"again"], "the message", 10)


def test_a_deleted_level_topic_is_not_opened(openings: Openings) -> None:
    def check() -> None:
        raise LevelTopicError("level topic orders-delay-level was deleted")

    openings.check = check
    partition, results = openings.partition(), Results()
    partition.send_async(b"x", results, NO_ARGUMENTS)
    assert results.wait(1) == [Result.TopicNotFound]
    with pytest.raises(LevelTopicError, match="was deleted"):
        partition.send(b"x", NO_ARGUMENTS)
    assert openings.attempts == []


def test_a_check_that_hangs_does_not_use_up_the_send_timeout(openings: Openings) -> None:
    hanging = threading.Event()
    openings.check = lambda: bool(hanging.wait(30)) and None
    partition, results = openings.partition(send_timeout_millis=2000), Results()
    partition.send_async(b"x", results, NO_ARGUMENTS)
    producer = openings.end()
    eventually(lambda: producer.taken == [b"x"], "the message", 10)
    hanging.set()
    assert results == []


def test_close_ends_what_waits_and_closes_a_producer_that_opens_later(openings: Openings) -> None:
    partition, results = openings.partition(), Results()
    for _ in range(3):
        partition.send_async(b"x", results, NO_ARGUMENTS)
    eventually(lambda: openings.attempts, "an opening", 10)
    ended: list[Any] = []
    partition.close_async(ended.append)
    assert (ended, results) == ([None], [Result.AlreadyClosed] * 3)
    eventually(lambda: partition._worker is None, "the end of the thread", 10)
    producer = openings.end()
    assert (producer.closed, producer.taken) == (True, [])
    assert openings.ready == []
    partition.send_async(b"x", results, NO_ARGUMENTS)
    assert results[3:] == [Result.AlreadyClosed]
    with pytest.raises(pulsar.AlreadyClosed):
        partition.send(b"x", NO_ARGUMENTS)


def test_a_callback_that_fails_or_sends_more_stops_nothing(openings: Openings) -> None:
    settings = {"max_pending_messages": 1, "block_if_queue_full": True, "send_timeout_millis": 50}
    partition, results = openings.partition(**settings), Results()
    partition.send_async(b"x", lambda *_: 1 / 0, NO_ARGUMENTS)
    # Only the thread that calls back could make room in the queue.
    again = lambda *_: [partition.send_async(b"y", results, NO_ARGUMENTS) for _ in range(3)]  # noqa: E731
    partition.send_async(b"x", again, NO_ARGUMENTS)
    assert results.wait(3) == [Result.Timeout] * 3


def test_wrong_types_are_refused_in_the_call(openings: Openings) -> None:
    partition = openings.partition()
    with pytest.raises(TypeError):
        partition.send_async(b"x", ignore, {**NO_ARGUMENTS, "properties": {"a": 1}})  # type: ignore[arg-type]
    assert openings.attempts == []


def test_a_message_that_is_alone_is_flushed_at_once(openings: Openings) -> None:
    partition = openings.partition()
    thread, outcome = in_background(lambda: partition.send(b"1", NO_ARGUMENTS))
    producer = openings.end()
    thread.join(10)
    assert (outcome, producer.flushes) == ([0], 1)
    eventually(lambda: openings.ready, "the direct way", 10)
    partition.send(b"2", NO_ARGUMENTS)
    assert (producer.taken, producer.flushes) == ([b"1", b"2"], 2)


def test_messages_of_many_threads_share_flushes(openings: Openings) -> None:
    partition = openings.partition()
    partition.send_async(b"opens", lambda *_: None, NO_ARGUMENTS)
    producer = openings.end()
    eventually(lambda: openings.ready, "the direct way", 10)
    begun, go_on, flush = threading.Event(), threading.Event(), producer.flush

    def slow() -> None:
        flush()
        begun.set()
        go_on.wait(10)

    producer.flush = slow  # type: ignore[method-assign]
    sends = [in_background(lambda: partition.send(b"x", NO_ARGUMENTS))]
    begun.wait(10)
    sends += [in_background(lambda: partition.send(b"x", NO_ARGUMENTS)) for _ in range(20)]
    commit: Any = partition._commit
    assert isinstance(commit, GroupCommit)
    eventually(lambda: len(commit._followers) == 20, "the other threads", 10)
    go_on.set()
    for thread, _ in sends:
        thread.join(10)
    assert all(isinstance(outcome[0], int) for _, outcome in sends)
    assert producer.flushes == 2
    assert not commit._flushing
