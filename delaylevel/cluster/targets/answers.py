"""The client's answers to the messages that were passed to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from delaylevel.cluster.failures import MESSAGE_REFUSALS, is_ok, result_name

from .entry_outcomes import UNPROVEN
from .liveness import Liveness
from .send_state import SendState
from .sent_message import Sent
from .verification import Verification

# Time between two looks for answers behind a message without one.
_APART_EVERY_S = 0.25


class Answers:
    """The answers of one producer after the other, and their number.

    Attributes:
        given: number of messages that were passed to the client.
        answered: number of these that have an answer.
    """

    def __init__(
        self, verification: Verification, liveness: Liveness, now_s: Callable[[], float]
    ) -> None:
        self._verification = verification
        self._liveness = liveness
        self._now_s = now_s
        self._apart_s = now_s()
        self.given = self.answered = 0

    def take(
        self, state: SendState[Sent[Any]], shared: bool, ends: deque[tuple[int, float]]
    ) -> None:
        """Process the answers that have come, in the order of the messages.

        Args:
            shared: True if the messages are for several partitions: then a message without an
                answer does not delay the confirmations of others for long.
            ends: times of `Flushes`, removed here.
        """
        in_flight = state.in_flight
        while in_flight and in_flight[0].outcome:
            confirmed, verified = self._verification.count_confirmed(in_flight)
            if confirmed:
                self._note_times(in_flight, confirmed, ends)
                self.answered += confirmed
                self._liveness.confirmed()
                state.confirmed(confirmed, verified)
            else:
                result = next(iter(in_flight[0].outcome))
                self._take_failure(state, UNPROVEN if is_ok(result) else result_name(result))
        if not in_flight:
            self.answered = self.given
            ends.clear()
        elif shared and self._now_s() - self._apart_s > _APART_EVERY_S:
            self._take_apart(state)

    def _note_times(
        self, in_flight: deque[Sent[Any]], confirmed: int, ends: deque[tuple[int, float]]
    ) -> None:
        """Note when the oldest messages were answered: at the latest when their flush had ended."""
        number, now_s = self.answered, self._now_s()
        for sent in islice(in_flight, confirmed):
            number += 1
            while ends and ends[0][0] < number:
                ends.popleft()
            sent.answered_s = ends[0][1] if ends else now_s

    def _take_apart(self, state: SendState[Sent[Any]]) -> None:
        """Process confirmations behind a message without an answer."""
        self._apart_s = self._now_s()
        for verified in (True, False):
            found = [
                sent
                for sent in state.in_flight
                if sent.outcome and self._verification.count_confirmed((sent,)) == (1, verified)
            ]
            if found:
                self.answered += len(found)
                state.confirmed_apart(found, verified)

    def _take_failure(self, state: SendState[Sent[Any]], reason: str) -> None:
        """Process the failure of the oldest message in flight."""
        self.answered += 1
        if reason in MESSAGE_REFUSALS and not state.numbered:
            state.in_flight.rotate(-1)
            state.rejected(reason)
            return
        state.failed(reason)
