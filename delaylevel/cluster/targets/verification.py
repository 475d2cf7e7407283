"""Verification of confirmations: they count only if somebody can receive from the topic.

A client that reconnects creates a deleted topic again, without its subscriptions. Its confirmations
then come from a ledger that was not seen before, as they also do after a rollover or when another
broker serves the topic. So the topic is looked at whenever a confirmation names a new ledger, and
from time to time, because applications may remove its last subscription.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from delaylevel.cluster.background import Starter
from delaylevel.cluster.failures import error_name, is_ok

from .opening import Ledger, Opened
from .sent_message import Sent

log = logging.getLogger(__name__)

_RETRY_S = 1.0
# Time between two looks at a topic whose confirmations come from known ledgers.
_LOOK_EVERY_S = 60.0


class Verification:
    """The ledgers of the topic that a producer writes to.

    One thread uses it; results come through ``report``.
    """

    def __init__(
        self,
        start: Starter,
        report: Callable[[Callable[[], None]], None],
        now_s: Callable[[], float],
    ) -> None:
        self._start = start
        self._report = report
        self._now_s = now_s
        self._opened: Opened | None = None
        #: Ledgers that the topic had while somebody could receive from it.
        self.ledgers: frozenset[Ledger] = frozenset()
        self._running = False
        self._retry_at_s = self._looked_s = 0.0

    def begin(self, opened: Opened) -> None:
        """Forget the ledgers of an earlier producer. The topic was looked at before its opening."""
        self._opened = opened
        self.ledgers = opened.ledgers
        self._looked_s = self._now_s()

    def is_outdated(self, used_s: float) -> bool:
        """Return True if the last look was long before the last message.

        Args:
            used_s: monotonic time of that message.
        """
        return used_s - self._looked_s > _LOOK_EVERY_S

    def knows(self, message_id: Any) -> bool:
        """Return True if somebody could certainly receive a message when it was stored."""
        if self._opened is None or self._opened.is_received is None or message_id is None:
            return True
        # A message that the broker has dropped, because it knows the sequence ID, has no position:
        # perhaps it is a new topic that knows it.
        return (message_id.partition(), message_id.ledger_id()) in self.ledgers

    def count_confirmed(self, in_flight: Iterable[Sent[Any]]) -> tuple[int, bool]:
        """Return how many of the oldest messages are confirmed, and if their ledgers are known."""
        count, verified, proven = 0, True, None
        for sent in in_flight:
            outcome = sent.outcome
            if outcome is not proven:
                if not outcome:
                    break
                ((result, message_id),) = outcome.items()
                if not is_ok(result) or not outcome.is_proven(message_id):
                    break
                verified = verified and self.knows(message_id)
                proven = outcome
            count += 1
        return count, verified

    def run(
        self, messages: Sequence[Sent[Any]], done: Callable[[Sequence[Sent[Any]], bool], None]
    ) -> None:
        """Look at the topic in the background, if it is time for that and it can be done.

        Args:
            messages: confirmed messages from ledgers that are not known; none to look only if a
                broker serves the topic, and if it has receivers.
            done: function that gets the messages, and True if somebody can receive from the topic.
        """
        if self._running or self._now_s() < self._retry_at_s:
            return
        assert self._opened is not None
        is_received = self._opened.is_received
        if is_received is None:
            return
        self._running = True

        def look() -> None:
            received: bool | None = None
            try:
                received = is_received()
            except Exception as error:
                log.debug("cannot look at a topic: %s", error_name(error))
            self._report(partial(self._end, messages, received, done))

        self._start(look)

    def _end(
        self,
        messages: Sequence[Sent[Any]],
        received: bool | None,
        done: Callable[[Sequence[Sent[Any]], bool], None],
    ) -> None:
        self._running = False
        if received is None:
            self._retry_at_s = self._now_s() + _RETRY_S
            return
        self._looked_s = self._now_s()
        if received:
            ids = [message_id for sent in messages for message_id in sent.outcome.values()]
            found = {(each.partition(), each.ledger_id()) for each in ids if each is not None}
            self.ledgers |= {ledger for ledger in found if ledger[1] >= 0}
        else:
            self.ledgers = frozenset()
        done(messages, received)
