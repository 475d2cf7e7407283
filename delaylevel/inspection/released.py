"""What the release log of a window partition says is released, without the ids it remembers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.reader import messages_in_range
from delaylevel.dispatcher.journal.records import pack
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.errors import NotFoundError
from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.position import EARLIEST, Position
from delaylevel.model.topic_name import TopicName
from delaylevel.structures.deduplicator import Deduplicator

Released = Callable[[Sequence[tuple[int, int, int]]], list[bool]]
_TRIES = 4


@dataclass(frozen=True)
class LogLimit:
    """How much of a log is worth reading.

    Attributes:
        records: a snapshot is a few, a release is two.
        bytes: of all of them.
    """

    records: int
    bytes: int


class LongLogError(Exception):
    """The log is longer than the caller wants to read."""


class _Forgetful(Deduplicator):
    """Remembers no id: there may be a hundred million of them, and inspection asks for none."""

    def save(self, id: int, key: str) -> None:  # noqa: A002 - the name that callers know
        pass

    def save_all(self, ids: Any, key: str) -> None:
        pass

    def restore(self, data: bytes, key: str) -> None:
        pass


class _Positions(JournalState):
    """The same state, positions only."""

    def __init__(self, capacity: int = 2) -> None:
        super().__init__(2)
        self.memory = _Forgetful(2)


def released_by_log(
    client: Any, admin: TopicAdmin, log: TopicName, limit: LogLimit | None = None
) -> Released:
    """Read a release log, and return what says which positions are released by it.

    Args:
        client: a ``pulsar.Client``.
        admin: the cluster.
        log: the partition of the log topic.
        limit: give up where there is more to read; None for no limit.

    Returns:
        For places (ledger, entry, batch index; -1 where it was not batched) whether each is
        released. Nothing is, where there is no log.

    Raises:
        LongLogError: there is more.
        DamagedJournalError: a record is not as it was written.
    """
    state: JournalState = _Positions()
    for _ in range(_TRIES):
        # The front before the end: a dispatcher that lets go of old records writes a snapshot
        # first, and what is between a newer front and an older end would be no whole state.
        start = _front(admin, log)
        try:
            last = admin.last_message_id(log)
        except NotFoundError:
            last = None
        if last is None:
            break
        with closing(messages_in_range(client, log.full, start, last.next_entry)) as found:
            state = _Positions.read(_limited((message.data() for message, *_ in found), limit))
        if _front(admin, log) == start:
            break
        # What was read may have been deleted meanwhile: again, from the newer snapshot.

    def released(places: Sequence[tuple[int, int, int]]) -> list[bool]:
        columns = np.array(places, dtype=np.int64).reshape(-1, 3)
        entry_ids = columns[:, 1] << 10 | np.maximum(columns[:, 2], 0)
        found: list[bool] = state.is_released(pack(columns[:, 0], entry_ids)).tolist()
        return found

    return released


def _front(admin: TopicAdmin, log: TopicName) -> Position:
    try:
        return admin.mark_delete_position(log, SUBSCRIPTION).next_entry
    except NotFoundError:
        return EARLIEST


def last_written_ms(client: Any, admin: TopicAdmin, log: TopicName) -> int:
    """Return when the last record of a log was written; 0 where there is none.

    A dispatcher releases in due order and writes it down: by then it has released what was due,
    and since then nothing.
    """
    try:
        last = admin.last_message_id(log)
    except NotFoundError:
        last = None
    if last is None:
        return 0
    with closing(
        messages_in_range(client, log.full, last.entry_start, last.next_entry, queue=1)
    ) as found:
        return max((message.publish_timestamp() for message, *_ in found), default=0)


def _limited(records: Iterable[bytes], limit: LogLimit | None) -> Iterator[bytes]:
    size = 0
    for number, record in enumerate(records):
        size += len(record)
        if limit is not None and (number >= limit.records or size > limit.bytes):
            raise LongLogError
        yield record
