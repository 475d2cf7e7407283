"""Tests of messages that are sent without a callback: their failures, counted and reported once."""

from __future__ import annotations

from collections.abc import Iterator

import pulsar
import pytest

from delaylevel.errors import UnconfirmedMessagesError
from support.openings import TWO_DAYS, OpenedProducer, Openings, ThreadDoor, openings  # noqa: F401

Result = pulsar.Result
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
