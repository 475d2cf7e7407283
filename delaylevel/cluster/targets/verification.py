"""Verification of confirmations: they count only if they come from the topic that was opened.

A client that reconnects creates a deleted topic again. Its confirmations then come from a ledger
that was not seen before, as they also do after a rollover or when another broker serves the topic.
So the topic is looked at whenever a confirmation names a new ledger.
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
        #: Ledgers of the topic that was opened.
        self.ledgers: frozenset[Ledger] = frozenset()
        self._running = False
        self._retry_at_s = 0.0

    def begin(self, opened: Opened) -> None:
        """Forget the ledgers of an earlier producer."""
        self._opened = opened
        self.ledgers = opened.ledgers

    def knows(self, message_id: Any) -> bool:
        """Return True if a message was certainly stored in the topic that was opened."""
        if self._opened is None or self._opened.is_same_topic is None or message_id is None:
            return True
        # A message that the broker has dropped, because it knows the sequence ID, has no position:
        # perhaps it is a new topic that knows it.
        return (message_id.partition(), message_id.ledger_id()) in self.ledgers

    def count_confirmed(self, in_flight: Iterable[Sent[Any]]) -> tuple[int, bool]:
        """Return how many of the oldest messages are confirmed, and if their topic is known."""
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
            messages: confirmed messages from ledgers that are not known; none to ask if a broker
                serves the topic.
            done: function that gets the messages, and True if the topic is still the same.
        """
        if self._running or self._now_s() < self._retry_at_s:
            return
        assert self._opened is not None
        is_same_topic = self._opened.is_same_topic
        if is_same_topic is None:
            return
        ledgers = self.ledgers
        self._running = True

        def look() -> None:
            same: bool | None = None
            try:
                same = is_same_topic(ledgers)
            except Exception as error:
                log.debug("cannot look at a topic: %s", error_name(error))
            self._report(partial(self._end, messages, same, done))

        self._start(look)

    def _end(
        self,
        messages: Sequence[Sent[Any]],
        same: bool | None,
        done: Callable[[Sequence[Sent[Any]], bool], None],
    ) -> None:
        self._running = False
        if same is None:
            self._retry_at_s = self._now_s() + _RETRY_S
            return
        if same:
            ids = [message_id for sent in messages for message_id in sent.outcome.values()]
            found = {(each.partition(), each.ledger_id()) for each in ids if each is not None}
            self.ledgers |= {ledger for ledger in found if ledger[1] >= 0}
        else:
            self.ledgers = frozenset()
        done(messages, same)
