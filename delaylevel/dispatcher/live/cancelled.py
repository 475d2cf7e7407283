"""The search for the rows of cancelled messages.

A message is cancelled by its ID alone, which costs the owner next to nothing. The first live query
after that finds the rows of all messages that were cancelled since the last search, and lets the
owner remember them. It looks at the due times of the cancellations first, and at everything only if
a message is missing there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from delaylevel.dispatcher.delay_queue import DelayQueue
from delaylevel.dispatcher.journal.records import pack
from delaylevel.dispatcher.record import is_cancellation, unpacked
from delaylevel.structures.rows import DUE, ENTRY, LEDGER, Int64s
from delaylevel.structures.segments.payloads import FrozenPayloads

from .view import loose_messages, working

#: Due times (ms since the epoch), packed positions and IDs of messages.
Candidates: TypeAlias = "tuple[Int64s, Int64s, list[tuple[str, int]]]"
#: Number of messages of one question to the owner's thread.
_ASKED = 2_000


class CancelledSearch:
    """A search at the due times at which messages were cancelled since the last one.

    The thread of the queue makes it; another thread searches, and closes it.

    Args:
        everywhere: True to look at all messages.
    """

    def __init__(self, everywhere: bool, delay_queue: DelayQueue) -> None:
        hidden = delay_queue.cancelling.hidden
        self.cancelled = hidden.cancelled
        self.dues = hidden.begin_search(everywhere=everywhere)
        self._loose = loose_messages(delay_queue)
        self._hidden = hidden.freeze()
        dues = None
        if self.dues is not None:
            dues = np.frombuffer(self.dues.to_array(), dtype=np.uint64).astype(np.int64)
        self._frozen = [
            FrozenPayloads(dues, index.segments)
            for index in (delay_queue.pending, *delay_queue.waiting.overflows())
        ]
        for frozen in self._frozen:
            frozen.working = working

    def close(self) -> None:
        """Close the files."""
        for frozen in self._frozen:
            frozen.close()

    def candidates(self) -> Iterator[Candidates]:
        """Yield messages that may be cancelled, about `_ASKED` at a time.

        Raises:
            FileNotFoundError: a file was used up meanwhile; search again.
        """
        parts: list[Candidates] = []
        count = 0
        for part in self._parts():
            parts.append(part)
            count += len(part[2])
            if count >= _ASKED:
                yield _joined(parts)
                parts, count = [], 0
        if count:
            yield _joined(parts)

    def _parts(self) -> Iterator[Candidates]:
        for due_ms, positions, records in self._loose:
            if records:
                yield self._chosen(due_ms, positions, records)
        for frozen in self._frozen:
            for rows, payloads in frozen.payloads():
                with working():
                    records = list(map(unpacked, payloads))
                    found = self._chosen(rows[DUE], pack(rows[LEDGER], rows[ENTRY]), records)
                yield found

    def _chosen(
        self, due_ms: Int64s, positions: Int64s, records: Sequence[tuple[Any, ...]]
    ) -> Candidates:
        """Leave out the rows that are known, and cancellations."""
        known = self._hidden.have(positions).tolist()
        index = [
            at
            for at, (record, old) in enumerate(zip(records, known, strict=True))
            if not old and not is_cancellation(record)
        ]
        return due_ms[index], positions[index], [records[at][:2] for at in index]


def _joined(parts: Sequence[Candidates]) -> Candidates:
    due_ms, positions = (np.concatenate([part[at] for part in parts]) for at in (0, 1))
    return due_ms, positions, [identity for part in parts for identity in part[2]]


def _locate(
    due_ms: Int64s, positions: Int64s, identities: list[tuple[str, int]], delay_queue: DelayQueue
) -> bool:
    delay_queue.cancelling.locate(due_ms, positions, identities)
    return True


def _end(search: CancelledSearch, delay_queue: DelayQueue) -> bool:
    """Return True if only messages that were cancelled since the search began can be missing."""
    cancelling = delay_queue.cancelling
    cancelling.hidden.end_search(search.dues)
    return cancelling.unlocated <= cancelling.hidden.cancelled - search.cancelled


def locate_cancelled(
    ask: Callable[[Callable[[DelayQueue], Any], Callable[[Any], None]], Any],
) -> bool:
    """Find the rows of all messages that are cancelled now, for the next views of the queue.

    Args:
        ask: function that lets the queue's thread call a function of the queue, and returns the
            answer, or None if there is none in time. It calls a second one with a late answer.

    Returns:
        False if the queue's thread did not answer.

    Raises:
        FileNotFoundError: a file was used up meanwhile; search again.
    """
    for everywhere in (False, True):
        search = ask(partial(CancelledSearch, everywhere), CancelledSearch.close)
        if search is None:
            return False
        try:
            for found in search.candidates():
                if ask(partial(_locate, *found), _ignore) is None:
                    return False
        finally:
            search.close()
        complete = ask(partial(_end, search), _ignore)
        if complete is None or complete:
            return complete is not None
    return True


def _ignore(_: Any) -> None:
    """Drop an answer."""
