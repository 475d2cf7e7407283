"""One contract for both producers, while level producers are being opened and when they are closed.

The asyncio producer is the synchronous one but for its waiting, so each test runs with both. Only
the synchronous one sends without a callback.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import pulsar
import pulsar.asyncio
import pytest

from delaylevel.cluster.client_parts.aio import check_create_producer
from delaylevel.errors import (
    DelayLevelError,
    InvalidInputError,
    LevelTopicError,
    UnconfirmedMessagesError,
)
from delaylevel.producer import client_calls
from delaylevel.producer.aio import AsyncDelayLevelClient
from delaylevel.producer.client_calls import result_of
from support.openings import (  # noqa: F401  # noqa: F401
    TWO_DAYS,
    Door,
    LoopDoor,
    Open,
    OpenedProducer,
    Openings,
    ThreadDoor,
    door_of,
    openings,
)
from support.world import eventually

Result = pulsar.Result
NO_ROOM: dict[str, Any] = {"max_pending_messages": 1, "block_if_queue_full": True}
in_threads = pytest.mark.parametrize("door_of", [ThreadDoor], indirect=True)
in_a_loop = pytest.mark.parametrize("door_of", [LoopDoor], indirect=True)


def flushed(door: Door, *sends: Future[Any]) -> list[Any]:
    """Flush until all messages have a result, and return these."""
    door.wait_for_calls()
    door.flush().result(60)
    while not all(sent.done() for sent in sends):
        door.flush().result(60)
    return [sent.result() for sent in sends]


def failing(error: Exception) -> Any:
    def describe() -> Any:
        raise error

    return describe


@pytest.mark.parametrize("settings", [{}, {"max_pending_messages": 7, "block_if_queue_full": True}])
def test_messages_keep_their_order_through_the_opening(
    door_of: Open, openings: Openings, settings: dict[str, Any]
) -> None:
    door = door_of(**settings)
    sends = [door.send(b"%d" % number) for number in range(20)]
    eventually(lambda: openings.calls, "the opening")
    flush = door.flush()
    assert not any(waits.done() for waits in (*sends, flush))
    level = openings.end()
    # These come while those that waited are about to continue.
    sends += [door.send(b"%d" % number) for number in range(20, 40)]
    assert flush.result(60) == Result.Ok
    assert set(flushed(door, *sends)) == {Result.Ok}
    assert level.stored == [b"%d" % number for number in range(40)]
    assert len(openings.calls) == 1
    assert door.producer.sent() == {"DAY": 40, "HOUR": 0, "window": 0, "straight": 0}


@pytest.mark.parametrize("refused", ["ProducerBusy", "AuthorizationError", "InvalidConfiguration"])
def test_a_refusal_ends_all_that_wait_and_the_next_message_tries_again(
    door_of: Open, openings: Openings, refused: str
) -> None:
    door = door_of()
    sends = [door.send(b"%d" % number) for number in range(3)]
    door.wait_for_calls()
    flush = door.flush()
    openings.end(error=getattr(pulsar, refused)("no"))
    result = getattr(Result, refused)
    assert [sent.result(60) for sent in sends] == [result] * 3
    assert flush.result(60) in (result, Result.Ok)
    again = door.send(b"again")
    level = openings.end(2)
    assert flushed(door, again) == [Result.Ok]
    assert level.stored == [b"again"]
    assert door.close().result(60) == Result.Ok
    assert level.closed


def test_transient_failures_are_repeated_until_the_send_timeout(
    door_of: Open, openings: Openings
) -> None:
    door = door_of(send_timeout_millis=1500)
    sent = door.send(b"0")
    openings.end(1, pulsar.ServiceUnitNotReady("away"))
    eventually(lambda: not door.producer.is_connected(), "the failure")
    flush = door.flush()
    openings.end(2, pulsar.ConnectError("away"))
    assert sent.result(60) == flush.result(60) == Result.Timeout
    # A later message is stored by the attempt that is under way, or by the next.
    later = door.send(b"1")
    level = openings.end(3)
    assert flushed(door, later) == [Result.Ok]
    assert level.stored == [b"1"]
    assert door.producer.is_connected()


def test_no_producer_is_opened_for_messages_that_timed_out(
    door_of: Open, openings: Openings
) -> None:
    door = door_of(send_timeout_millis=20)
    assert door.send(b"0").result(60) == Result.Timeout
    openings.end(1, pulsar.ConnectError("away"))
    eventually(door.producer.is_connected, "the end of the attempts")
    assert len(openings.calls) == 1


def test_what_waits_for_an_opening_is_bounded(door_of: Open, openings: Openings) -> None:
    door = door_of(max_pending_messages=5)
    sends = [door.send(b"%d" % number) for number in range(8)]
    assert [sent.result(60) for sent in sends[5:]] == [Result.ProducerQueueIsFull] * 3
    level = openings.end()
    assert flushed(door, *sends[:5]) == [Result.Ok] * 5
    assert level.stored == [b"0", b"1", b"2", b"3", b"4"]


def test_messages_that_time_out_make_room(door_of: Open, openings: Openings) -> None:
    door = door_of(send_timeout_millis=50, **NO_ROOM)
    sends = [door.send(b"%d" % number) for number in range(3)]
    assert [sent.result(60) for sent in sends] == [Result.Timeout] * 3


@pytest.mark.parametrize(
    "describe",
    [lambda: None, failing(LevelTopicError("it was deleted; the message was not sent"))],
)
def test_a_deleted_level_topic_is_not_opened(
    door_of: Open, openings: Openings, describe: Any
) -> None:
    door = door_of(describe)
    sent = door.send(b"x")
    eventually(sent.done, "the refusal")
    error = sent.exception()
    if error is None:
        assert sent.result() == Result.TopicNotFound
    else:  # asyncio raises our error itself
        assert isinstance(error, DelayLevelError)
        assert "was deleted" in str(error)
    assert openings.calls == []


def test_a_check_that_hangs_does_not_use_up_the_send_timeout(
    door_of: Open, openings: Openings
) -> None:
    hanging = threading.Event()
    door = door_of(lambda: hanging.wait(60), send_timeout_millis=2000)
    sent = door.send(b"x")
    openings.end()
    assert flushed(door, sent) == [Result.Ok]
    hanging.set()


# -- closing


@pytest.mark.parametrize("error", [None, pulsar.ProducerBusy("busy"), OSError("no token file")])
def test_close_waits_for_what_is_being_opened_and_closes_it(
    door_of: Open, openings: Openings, error: Exception | None
) -> None:
    door = door_of()
    sends = [door.send(b"%d" % number) for number in range(3)]
    door.wait_for_calls()
    close = door.close()
    eventually(lambda: door.producer.closed, "the close")
    assert not close.done()
    assert not door.business.closed
    level = openings.end(error=error)
    results = [sent.exception(60) or sent.result() for sent in sends]
    assert set(results) <= {error, Result.Ok if error is None else result_of(error)}
    assert close.exception(60) in (None, error)
    assert level.stored == ([] if error else [b"0", b"1", b"2"])
    assert (level.closed, door.business.closed) == (error is None, True)


def test_a_closed_producer_sends_nothing(door_of: Open, openings: Openings) -> None:
    door = door_of()
    sent = door.send(b"1")
    level = openings.end()
    assert flushed(door, sent) == [Result.Ok]
    assert door.close().result(60) == Result.Ok
    assert (level.stored, level.closed, door.business.closed) == ([b"1"], True, True)
    for delay in (None, TWO_DAYS, 2 * TWO_DAYS):
        assert door.send(b"2", deliver_after=delay).result(60) == Result.AlreadyClosed
    assert len(openings.calls) == 1, "a producer was opened for them"


# -- threads and callbacks of the synchronous producer


@in_threads
def test_many_threads_open_it_once_and_keep_their_order(door_of: Open, openings: Openings) -> None:
    door = door_of(block_if_queue_full=True, max_pending_messages=100)

    def send(thread: int) -> None:
        for number in range(100):
            body = b"%d %d" % (thread, number)
            door.producer.send_async(body, lambda *_: None, deliver_after=TWO_DAYS)

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(50)]
    for each in threads:
        each.start()
    level = openings.end()
    for each in threads:
        each.join(60)
    eventually(lambda: len(level.taken) == 5000, "all messages")
    sent = [tuple(map(int, body.split())) for body in level.taken]
    for thread in range(50):
        assert [number for sender, number in sent if sender == thread] == list(range(100))
    assert len(openings.calls) == 1


@in_threads
def test_a_callback_may_send_to_a_partition_that_is_not_open(
    door_of: Open, openings: Openings
) -> None:
    # The client's thread must return from the callback, or no opening ever ends.
    send = door_of().producer.send_async
    send(
        b"1",
        lambda *_: send(b"2", lambda *_: None, deliver_after=2 * TWO_DAYS),
        deliver_after=TWO_DAYS,
    )
    level = openings.end()
    eventually(lambda: level.taken, "the first message")
    level.flush()
    other = openings.end(2)
    eventually(lambda: other.taken == [b"2"], "the second message")


@in_threads
def test_a_callback_that_fails_or_sends_more_stops_nothing(
    door_of: Open, openings: Openings
) -> None:
    door, results = door_of(send_timeout_millis=50, **NO_ROOM), list[Any]()

    def send(callback: Any) -> None:
        door.producer.send_async(b"x", callback, deliver_after=TWO_DAYS)

    send(lambda *_: 1 / 0)
    # Only the thread that calls back could make room in the queue.
    send(lambda *_: [send(lambda result, _: results.append(result)) for _ in range(3)])
    eventually(lambda: len(results) == 3, "the callbacks")
    assert results == [Result.Timeout] * 3


@in_threads
def test_a_producer_that_opens_after_the_end_is_closed(door_of: Open, openings: Openings) -> None:
    door = door_of()
    sent = door.send(b"1")
    eventually(lambda: openings.calls, "the opening")
    for close in door.producer.closes():  # as at the exit of a process
        close(lambda *_: None)
    assert sent.result(60) == Result.AlreadyClosed
    (partition,) = door.producer._parked.values()
    eventually(lambda: partition._worker is None, "the end of the thread that opens it")
    level = openings.end()
    eventually(lambda: level.closed, "the close")
    assert level.stored == []


@in_threads
def test_a_flush_that_fails_behind_the_opening_opens_no_second_producer(
    door_of: Open, openings: Openings
) -> None:
    class Extended(OpenedProducer):
        """A producer of an application, with an error of its own."""

        def flush(self) -> None:
            super().flush()
            raise RuntimeError("no trace")

    door, level = door_of(), Extended()
    waiting = threading.Thread(
        target=door.producer.send, args=(b"1",), kwargs={"deliver_after": TWO_DAYS}
    )
    waiting.start()
    eventually(lambda: openings.calls, "the opening")
    openings.calls[0](level, None)
    waiting.join(60)
    (partition,) = door.producer._parked.values()
    eventually(lambda: not partition.is_outstanding(), "the end of the thread that opens it")
    door.send(b"2")
    door.wait_for_calls()
    assert (level.taken, len(openings.calls)) == ([b"1", b"2"], 1)


# -- cancelled calls, turns in a queue and event loops of the asyncio producer


@in_a_loop
def test_a_cancelled_call_disturbs_no_message(door_of: Open, openings: Openings) -> None:
    door, complaints = door_of(), list[dict[str, Any]]()
    door.loop.set_exception_handler(lambda _, each: complaints.append(each))
    sends = [door.send(b"0"), door.send(b"1")]
    eventually(lambda: openings.calls, "the opening")
    flush = door.flush()
    door.wait_for_calls()
    flush.cancel()
    sends[0].cancel()
    door.wait_for_calls()
    level = openings.end()
    assert door.close().result(60) == sends[1].result(60) == Result.Ok
    assert (level.stored, level.closed) == ([b"0", b"1"], True)
    assert complaints == [], "the client calls back for nobody"


@pytest.mark.parametrize("steps", range(6))
@in_a_loop
def test_a_send_that_is_cancelled_while_it_waits_for_room_leaves_the_room_to_others(
    door_of: Open, openings: Openings, steps: int
) -> None:
    door = door_of(**NO_ROOM)
    sends = [door.send(b"%d" % number) for number in range(3)]
    level = openings.end()
    for _ in range(steps):
        door.wait_for_calls()
    sends[1].cancel()
    while not sends[2].done():
        door.flush().result(60)
    assert level.stored in ([b"0", b"2"], [b"0", b"1", b"2"])
    last = door.send(b"3")
    assert door.close().result(60) == last.result(60) == Result.Ok


@in_a_loop
def test_a_second_close_waits_for_the_first_and_a_later_one_is_refused(
    door_of: Open, openings: Openings
) -> None:
    door = door_of()
    sent = door.send(b"0")
    eventually(lambda: openings.calls, "the opening")
    first = door.close()
    door.wait_for_calls()
    first.cancel()
    second = door.close()
    door.wait_for_calls()
    assert not second.done()
    level = openings.end()
    assert second.result(60) == sent.result(60) == Result.Ok
    assert (level.stored, level.closed, door.business.closed) == ([b"0"], True, True)
    assert door.close().result(60) == Result.AlreadyClosed


@in_a_loop
def test_a_producer_belongs_to_its_event_loop(door_of: Open, openings: Openings) -> None:
    door = door_of()
    producer = door.producer
    door.send(b"1")
    eventually(lambda: openings.calls, "the opening")
    for call in (producer.send, lambda _: producer.flush(), lambda _: producer.close()):
        with pytest.raises(InvalidInputError, match="create one in each event loop"):
            asyncio.run(call(b"2"))
    door.end()
    openings.end()  # the outcome comes for a loop that is closed


@in_a_loop
def test_the_exit_ends_the_messages_of_an_event_loop_and_producer_that_have_gone(
    door_of: Open, openings: Openings
) -> None:
    """The client calls back when it is destroyed, and the process aborts if Python has ended."""

    class Hanging(OpenedProducer):
        def flush(self) -> None:
            pass

    door, level = door_of(), Hanging()
    door.send(b"1")
    eventually(lambda: openings.calls, "the opening")
    openings.calls[0](level, None)
    (partition,) = door.producer._parked.values()
    eventually(lambda: not partition.is_outstanding(), "the end of the thread that opens it")
    door.end()
    lanes = set(door.producer._lanes.values())
    (lane,) = lanes & set(client_calls.at_exit.works)
    assert lane.is_outstanding()
    assert partition in client_calls.at_exit._producers, "its owner may be dropped"
    for close in partition.closes():
        close(client_calls.ignore)
    assert not lane.is_outstanding()


@pytest.mark.parametrize("steps", range(4))
def test_a_cancelled_creation_leaves_nothing_to_the_event_loop(steps: int) -> None:
    complaints: list[dict[str, Any]] = []

    async def create() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, each: complaints.append(each))
        creation = loop.create_task(check_create_producer("orders", {}))
        for _ in range(steps):
            await asyncio.sleep(0)
        creation.cancel()
        await asyncio.wait([creation])
        await asyncio.sleep(0)

    asyncio.run(create())
    assert complaints == []


def test_closing_a_client_leaves_no_callback_behind() -> None:
    """The client's thread may be in a callback when the program ends, and abort the process."""

    core = Mock(spec=["close"])
    core.close.side_effect = [None, pulsar.AlreadyClosed("closed before")]

    async def close() -> None:
        client = AsyncDelayLevelClient("pulsar://127.0.0.1:1")
        client._client.close()
        client._client = core
        await client.close()

    asyncio.run(close())
    with pytest.raises(pulsar.asyncio.PulsarException, match="closed before") as raised:
        asyncio.run(close())
    assert raised.value.error() == Result.AlreadyClosed


FULL, TIMEOUT = Result.ProducerQueueIsFull, Result.Timeout


@pytest.fixture
def door(openings: Openings) -> Iterator[ThreadDoor]:
    found = ThreadDoor({})
    yield found
    found.end()


@pytest.fixture
def level(door: ThreadDoor, openings: Openings) -> OpenedProducer:
    """The producer of a partition, which has stored a message."""
    door.producer.send_async(b"opens", None, deliver_after=TWO_DAYS)
    opened = openings.end()
    door.producer.flush()
    return opened


def test_every_failure_is_counted_and_reported_once(
    door: ThreadDoor, level: OpenedProducer
) -> None:
    level.results = [FULL, Result.Ok, FULL, TIMEOUT, FULL]
    door.business.results = [TIMEOUT, FULL]
    for _ in range(7):
        door.producer.send_async(b"parked", None, deliver_after=TWO_DAYS)
    door.producer.send_async(b"straight", None)
    with pytest.raises(UnconfirmedMessagesError) as reported:
        door.producer.flush()
    assert reported.value.reasons == {"ProducerQueueIsFull": 3, "Timeout": 2}
    assert reported.value.count == 5
    assert isinstance(reported.value, pulsar.PulsarException)
    text = str(reported.value)
    assert text.startswith("5 messages sent without a callback failed (")
    for part in ("Timeout: 2", "block_if_queue_full=True", "may be stored or not", "callback"):
        assert part in text
    door.producer.flush()
    # What no flush reports, the close does.
    door.producer.send_async(b"straight", None)
    with pytest.raises(UnconfirmedMessagesError, match=r"1 message sent .*ProducerQueueIsFull: 1"):
        door.producer.close()
    assert (door.business.closed, level.closed) == (True, True)


def test_outcomes_that_follow_the_flush_are_awaited(door: ThreadDoor) -> None:
    door.business.late = True
    for _ in range(3):
        door.business.results = [Result.Ok, TIMEOUT, Result.Ok]
        for _ in range(3):
            door.producer.send_async(b"straight", None)
        with pytest.raises(UnconfirmedMessagesError, match=r"1 message .*Timeout: 1"):
            door.producer.flush()
    door.producer.close()


def test_a_failed_flush_is_raised_and_the_cause_of_the_report(
    door: ThreadDoor, level: OpenedProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise pulsar.Timeout("flush")

    monkeypatch.setattr(door.business, "flush", fail)
    door.producer.send_async(b"parked", None, deliver_after=TWO_DAYS)
    with pytest.raises(pulsar.Timeout, match="flush"):
        door.producer.flush()
    assert level.stored == [b"opens", b"parked"], "the others are flushed, too"
    level.results = [TIMEOUT]
    door.producer.send_async(b"parked", None, deliver_after=TWO_DAYS)
    with pytest.raises(UnconfirmedMessagesError) as reported:
        door.producer.flush()
    assert isinstance(reported.value.__cause__, pulsar.Timeout)


def test_an_outcome_that_does_not_come_is_no_success(
    door: ThreadDoor, level: OpenedProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    door.producer.send_async(b"parked", None, deliver_after=TWO_DAYS)
    with monkeypatch.context() as patched:
        patched.setattr("delaylevel.producer.producer._PATIENCE_S", 0.05)
        patched.setattr(level, "flush", lambda: None)
        with pytest.raises(UnconfirmedMessagesError, match=r"1 message .*Timeout: 1"):
            door.producer.flush()
        door.producer.flush()  # it is reported once
    level.flush()  # it comes after all
    level.late, level.results = True, [FULL]
    door.producer.send_async(b"parked", None, deliver_after=TWO_DAYS)
    with pytest.raises(UnconfirmedMessagesError, match=r"1 message .*ProducerQueueIsFull: 1"):
        door.producer.flush()
    assert level.stored == [b"opens", b"parked"]
