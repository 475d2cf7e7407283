"""Decisions on cancellations: which messages are certainly never published.

A decision is a journal record before it is an outcome. `Cancellations` decides and makes the
records; it does no input or output. A message is cancelled only if neither this owner nor an
earlier one can have sent it: it is pending, and was not due some seconds after the takeover. An
owner sends only what is due, and only within a second after its journal confirmed a record. So what
was due later was not sent by an earlier owner, not even by one that was suspended or cut off.

For the ID of a cancellation, the first of these that applies:

==========================================  =======================================================
the ID                                      decision
==========================================  =======================================================
is cancelled                                ``cancelled``, again
was held, dropped or expired                ``unknown``, with the reason
was released                                ``too late``, with the time if it is known
is being published                          none: it waits for the release
was refused by its target before            none: it waits, because the held topic may have it
was due before the takeover, or up to       none: it waits for the release, because an earlier
5 s after it                                owner may have sent it. While its target is paused,
                                            this holds only for what was due before the pause.
is pending                                  ``cancelled``, after a Disposition record
is anything else                            none: it waits for the message until its due time plus
                                            a grace period, then ``unknown``. Everything that was
                                            stored before that time must have been read.
==========================================  =======================================================

A cancellation that waits for its message is a row among the pending messages, which may be on disk.
Only its ID is kept in memory, so that the message is cancelled when it arrives.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from delaylevel.dispatcher.intents import IdColumns
from delaylevel.dispatcher.journal.records import Disposition, DispositionKind, Record
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.positions import (
    Mask,
    id_columns,
    joined_keys,
    remove_ids,
    save_ids,
    seen_ids,
    unseen_ids,
)
from delaylevel.dispatcher.record import Cancellation
from delaylevel.structures.id_set import RemovableIds
from delaylevel.structures.rows import Int64s

#: Number of messages of which the time is known, at least.
_MESSAGES = 100_000
# A lookup goes through all blocks. Releases of a few messages are joined to blocks of this size.
_BLOCK = 1_000
_SINGLE = 200
Identity = tuple[str, int]
#: Time after a takeover up to which an earlier owner may send what is due, ms: one second after the
#: last record that its journal confirmed, and a difference of the clocks.
UNCLEAR_MS = 5_000
_REASONS = {
    DispositionKind.HELD: "its target could not be written: the message is held, or was",
    DispositionKind.DROPPED: "dropped: its target does not exist",
    DispositionKind.EXPIRED: "expired",
}


class _Block(NamedTuple):
    """Messages that were released one after another.

    Attributes:
        key_index: index of each message's key, shape (n,).
    """

    keys: Sequence[str]
    key_index: npt.NDArray[np.integer]
    ids: Int64s
    at_ms: Int64s


class RecentReleases:
    """The release times of the last messages, by ID; it is the ``on_release`` of a journal state.

    Attributes:
        at_ms: time of the next releases, ms since the epoch; None for now. An array has one for
            each message.
    """

    def __init__(self, now_ms: Callable[[], int], most: int = _MESSAGES) -> None:
        self.at_ms: int | Int64s | None = None
        self.now_ms = now_ms
        self._most = most
        self._size = 0
        self._blocks: deque[_Block] = deque()
        self._last: list[_Block] = []  # those that are not joined yet
        self._last_size = 0

    def __call__(
        self, keys: Sequence[str], key_index: npt.NDArray[np.integer], ids: Int64s
    ) -> None:
        """Remember released messages; the arguments are those of ``save_ids``."""
        at_ms = self.now_ms() if self.at_ms is None else self.at_ms
        self._last.append(_Block(keys, key_index, ids, np.full(ids.size, at_ms)))
        self._size += ids.size
        self._last_size += ids.size
        if self._last_size >= _BLOCK or len(self._last) >= _SINGLE:
            self._blocks.append(_joined(self._last))
            self._last, self._last_size = [], 0
        while self._blocks and self._size - self._blocks[0].ids.size >= self._most:
            self._size -= self._blocks.popleft().ids.size

    def times_of(self, wanted: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Return the release times that are known, ms since the epoch, by key and ID."""
        found: dict[tuple[str, int], int] = {}
        numbers = np.array([number for _, number in wanted], dtype=np.int64)
        identities = set(wanted)
        for block in (*reversed(self._last), *reversed(self._blocks)):
            if len(found) == len(identities):
                break
            for index in reversed(np.flatnonzero(np.isin(block.ids, numbers)).tolist()):
                identity = block.keys[int(block.key_index[index])], int(block.ids[index])
                if identity in identities:
                    found.setdefault(identity, int(block.at_ms[index]))
        return found


def _joined(parts: Sequence[_Block]) -> _Block:
    """Return successive releases as one block."""
    keys, key_index = joined_keys((part.keys, part.key_index) for part in parts)
    return _Block(
        keys,
        key_index,
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.at_ms for part in parts]),
    )


class AwaitedIds:
    """A set of IDs by key that counts repetitions, which are rare.

    Keys, indices and IDs are those of ``save_ids``.
    """

    def __init__(self) -> None:
        self._ids = RemovableIds()
        self._again: Counter[tuple[str, int]] = Counter()

    def __len__(self) -> int:
        """Return the number of distinct IDs."""
        return len(self._ids)

    def seen(self, keys: Sequence[str], key_index: npt.NDArray[np.integer], ids: Int64s) -> Mask:
        """Return which IDs are in the set, shape (n,)."""
        return seen_ids(self._ids, keys, key_index, ids)

    def add(self, keys: Sequence[str], key_index: npt.NDArray[np.integer], ids: Int64s) -> None:
        """Add each ID once more."""
        unseen = unseen_ids([self._ids], keys, key_index, ids)
        save_ids(self._ids, keys, key_index[unseen], ids[unseen])
        for index, number in zip(key_index[~unseen].tolist(), ids[~unseen].tolist(), strict=True):
            self._again[keys[index], number] += 1

    def remove(self, keys: Sequence[str], key_index: npt.NDArray[np.integer], ids: Int64s) -> None:
        """Remove each ID once; one that is missing does no harm."""
        if self._again:
            last = np.ones(ids.size, dtype=np.bool_)
            for row, (index, number) in enumerate(
                zip(key_index.tolist(), ids.tolist(), strict=True)
            ):
                identity = keys[index], number
                if identity in self._again:
                    last[row] = False
                    self._again[identity] -= 1
                    if not self._again[identity]:
                        del self._again[identity]
            key_index, ids = key_index[last], ids[last]
        remove_ids(self._ids, keys, key_index, ids)


CANCELLED, TOO_LATE, UNKNOWN = "cancelled", "too late", "unknown"


@dataclass(slots=True)
class Request:
    """A cancellation without a decision.

    Attributes:
        position: its packed position; None if it is among the pending messages, too.
        waited: True if it has waited for its message until its time was over.
        read_ms: time up to which everything that was stored is known to be read, ms since the
            epoch; 0 if that is not known.
    """

    cancellation: Cancellation
    position: int | None
    deadline_ms: int
    waited: bool = False
    read_ms: int = 0

    @property
    def identity(self) -> Identity:
        """The ID of the message."""
        return self.cancellation[:2]


class CancelDecision(NamedTuple):
    """The outcome of a cancellation.

    Attributes:
        outcome: ``cancelled``, ``too late`` or ``unknown``.
        position: packed position of the cancellation; None if another decision follows for it.
        released_ms: time of the release, ms since the epoch; None if it is not known.
    """

    cancellation: Cancellation
    outcome: str
    position: int | None
    decided_ms: int
    released_ms: int | None = None
    reason: str = ""


class Cancellations:
    """The cancellations of one window partition.

    Args:
        launched: IDs of the batches that are being published, by number.

    Attributes:
        early: IDs for which cancellations wait among the pending messages.
        revoked: number of cancelled messages that are still among the pending or waiting ones.
    """

    def __init__(
        self,
        state: JournalState,
        pending_ids: RemovableIds,
        launched: Mapping[int, IdColumns],
        releases: RecentReleases,
        grace_ms: int,
    ) -> None:
        self._state = state
        self._pending_ids = pending_ids
        self._launched = launched
        self._releases = releases
        self._grace_ms = grace_ms
        self.early = AwaitedIds()
        self.rows = self.revoked = 0
        self._undecided: list[Request] = []
        self._ended: list[Cancellation] = []
        self._awaited: dict[Identity, list[Request]] = {}
        self._unproven: list[Request] = []
        # IDs of pending messages that an earlier owner may have sent or set aside.
        self._unclear = RemovableIds()

    def __bool__(self) -> bool:
        """Return True if `decide` has something to decide."""
        return bool(self._undecided)

    @property
    def needs_filter(self) -> bool:
        """True if pending messages have to be looked at before they are published."""
        return bool(self.revoked or self.rows)

    def add(self, position: int, cancellation: Cancellation) -> None:
        """Add a cancellation that was read."""
        self._undecided.append(self._request(cancellation, position))

    def add_waited(self, position: int, cancellation: Cancellation) -> None:
        """Add a cancellation that comes from among the pending messages."""
        self.rows -= 1
        self._undecided.append(self._request(cancellation, position, waited=True))

    def arrived(self, cancellation: Cancellation) -> None:
        """Decide on a message that arrived after its cancellation."""
        self._undecided.append(self._request(cancellation, None))

    def unclear(self, keys: Sequence[str], key_index: npt.NDArray[np.integer], ids: Int64s) -> None:
        """Take note of pending messages that may have been sent; arguments as ``save_ids``."""
        save_ids(self._unclear, keys, key_index, ids)

    def released(
        self, keys: Sequence[str], key_index: npt.NDArray[np.integer], ids: Int64s
    ) -> None:
        """Take note of messages that are released; arguments as ``save_ids``."""
        if len(self._unclear):
            remove_ids(self._unclear, keys, key_index, ids)

    def decide_again(
        self, keys: Sequence[str], key_index: npt.NDArray[np.integer], ids: Int64s
    ) -> None:
        """Decide on the cancellations that wait for these messages; arguments as ``save_ids``."""
        if not self._awaited:
            return
        for index, number in zip(key_index.tolist(), ids.tolist(), strict=True):
            self._undecided += self._awaited.pop((keys[index], number), ())

    @property
    def proof_ms(self) -> int | None:
        """Time up to which everything has to be read for a decision, ms since the epoch, or None.

        It may be in the future.
        """
        return min((each.deadline_ms for each in self._unproven), default=None)

    def everything_is_read(self, until_ms: int) -> None:
        """Take note that everything is read that was stored before a time, ms since the epoch."""
        unproven, self._unproven = self._unproven, []
        for request in unproven:
            if request.deadline_ms <= until_ms:
                request.read_ms = until_ms
                self._undecided.append(request)
            else:
                self._unproven.append(request)

    def decide(
        self, now_ms: int, until: int
    ) -> tuple[list[Record], list[CancelDecision], list[Request]]:
        """Decide on everything that was added.

        Args:
            until: packed position above that of all messages.

        Returns:
            Records, which are applied; decisions, to be published once the journal has confirmed
            the records; and the cancellations that have to wait among the pending messages.
        """
        requests, self._undecided = self._undecided, []
        records: list[Record] = []
        dispositions = self._state.dispositions
        keys, key_index, ids = id_columns([each.cancellation for each in requests], None)
        kinds = dispositions.kinds_of(keys, key_index, ids)
        cancelled, released, unclear, pending = (
            seen_ids(memory, keys, key_index, ids).tolist()
            for memory in (
                dispositions.cancelled,
                self._state.memory,
                self._unclear,
                self._pending_ids,
            )
        )
        launched = self._are_launched(keys, key_index, ids)
        revoked: dict[Identity, None] = {}
        late: list[Request] = []
        early: list[Request] = []
        decisions: list[CancelDecision] = []
        for row, request in enumerate(requests):
            identity = request.identity
            if cancelled[row] or identity in revoked:
                decisions.append(self._decided(request, CANCELLED, now_ms))
            elif row in kinds:
                decisions.append(self._decided(request, UNKNOWN, now_ms, _REASONS[kinds[row]]))
            elif released[row]:
                late.append(request)
            elif launched[row] or unclear[row]:
                self._awaited.setdefault(identity, []).append(request)
            elif pending[row]:
                revoked[identity] = None
                decisions.append(self._decided(request, CANCELLED, now_ms))
            elif request.position is None:
                continue  # the cancellation is among the pending messages, and comes from there
            elif not request.waited:
                early.append(request)
            elif request.read_ms < request.deadline_ms:
                self._unproven.append(request)
            else:
                reason = f"no such message was there {self._grace_ms} ms after its due time"
                decisions.append(self._decided(request, UNKNOWN, now_ms, reason))
        if revoked:
            records.append(self._cancel(revoked, until))
        times = self._releases.times_of([each.identity for each in late])
        for request in late:
            decision = self._decided(request, TOO_LATE, now_ms)
            decisions.append(decision._replace(released_ms=times.get(request.identity)))
        self._forget_waited()
        self.wait_for([each.cancellation for each in early])
        return records, decisions, early

    def wait_for(self, cancellations: Sequence[Cancellation]) -> None:
        """Take note of cancellations that are put among the pending messages."""
        if cancellations:
            self.early.add(*id_columns(cancellations, None))

    def _forget_waited(self) -> None:
        """Take note of decisions on cancellations that come from among the pending messages."""
        ended, self._ended = self._ended, []
        if ended:
            self.early.remove(*id_columns(ended, None))

    def _request(
        self, cancellation: Cancellation, position: int | None, waited: bool = False
    ) -> Request:
        deadline_ms = cancellation.due_ms + self._grace_ms
        return Request(cancellation, position, deadline_ms, waited)

    def _decided(
        self, request: Request, outcome: str, now_ms: int, reason: str = ""
    ) -> CancelDecision:
        if request.waited:
            self._ended.append(request.cancellation)
        return CancelDecision(
            request.cancellation, outcome, request.position, now_ms, reason=reason
        )

    def _cancel(self, revoked: dict[Identity, None], until: int) -> Disposition:
        lookup: dict[str, int] = {}
        index = [lookup.setdefault(key, len(lookup)) for key, _ in revoked]
        ids = np.array([number for _, number in revoked], dtype=np.int64)
        key_index = np.array(index, dtype=np.int64)
        record = Disposition(DispositionKind.CANCELLED, tuple(lookup), key_index, ids, until)
        self._state.apply(record)
        self.revoked += len(revoked)
        return record

    def _are_launched(
        self, keys: list[str], key_index: npt.NDArray[np.integer], ids: Int64s
    ) -> Mask:
        """Return which IDs are in batches that are being published, shape (n,)."""
        mask = np.zeros(ids.size, dtype=np.bool_)
        listed: set[Identity] = set()
        for columns in self._launched.values():
            found = np.isin(columns.ids, ids)
            if not found.any():
                continue
            listed.update(
                (columns.keys[index], number)
                for index, number in zip(
                    columns.key_index[found].tolist(), columns.ids[found].tolist(), strict=True
                )
            )
        if listed:
            rows = zip(key_index.tolist(), ids.tolist(), strict=True)
            mask[:] = [(keys[index], number) in listed for index, number in rows]
        return mask
