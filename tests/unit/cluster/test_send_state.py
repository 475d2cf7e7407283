"""Tests of the state of messages given to a producer that is lost, and replaced."""

from __future__ import annotations

from dataclasses import dataclass

from delaylevel.cluster.targets.send_state import SendOutcome, SendState

STORED, UNKNOWN = SendOutcome.STORED, SendOutcome.UNKNOWN


@dataclass
class Item:
    number: int
    maybe_stored: bool = False


def take(state: SendState[Item]) -> Item | None:
    """Take the next message for the producer, as its owner does; None if there is none now."""
    if not state.is_open or state.suspended or not state.unsent:
        return None
    state.in_flight.append(state.unsent.popleft())
    return state.in_flight[-1]


def lost(numbered: bool) -> SendState[Item]:
    """Return the state after a producer with two messages was lost; a third was not sent."""
    state: SendState[Item] = SendState(numbered)
    state.opened(-1)
    for number in (1, 2):
        state.unsent.append(Item(number))
        take(state)
    state.unsent.append(Item(3))
    state.lost()
    return state


def taken(state: SendState[Item]) -> list[int]:
    return [item.number for item in iter(lambda: take(state), None)]


def test_a_message_of_a_lost_producer_is_never_refused_for_certain() -> None:
    state = lost(numbered=False)
    state.opened(-1)
    state.refuse_unsent("TopicTerminated")
    outcomes = [(each.item.number, each.outcome) for each in state.settled()]
    assert outcomes == [(1, UNKNOWN), (2, UNKNOWN), (3, SendOutcome.REFUSED)]


def test_the_last_sequence_id_that_is_stored_is_not_sent_again() -> None:
    state = lost(numbered=True)
    state.opened(2)
    assert [(each.item.number, each.outcome) for each in state.settled()] == [
        (1, STORED),
        (2, STORED),
    ]
    assert taken(state) == [3]
