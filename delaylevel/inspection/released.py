"""Released positions of a window partition, read from its journal; needs the extra ``window``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from threading import Lock
from typing import Any, cast

import numpy as np

from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.reader import messages_in_range
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.journal.topic import counting
from delaylevel.errors import NotFoundError
from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName
from delaylevel.structures.deduplicator import Deduplicator
from delaylevel.structures.positions import LAST_INDEX, pack
from delaylevel.topics.scan import pending_start

_ATTEMPTS = 4
# Threads share a journal, and a look-up may change the order in which IDs are kept.
_LOOKING = Lock()


class _DiscardingDeduplicator(Deduplicator):
    """A deduplicator that keeps no ID: a journal may have a hundred million, none needed here."""

    def save(self, id: int, key: str) -> None:  # noqa: A002 - the name in the superclass
        pass

    def save_all(self, ids: Any, key: str) -> None:
        pass

    def restore(self, data: bytes, key: str) -> None:
        pass


class JournalView(JournalState):
    """The released and the cancelled messages of a window partition. It can be pickled."""

    def __init__(self, capacity: int = 2) -> None:
        super().__init__(capacity)
        self.memory = _DiscardingDeduplicator(capacity)

    def stored(self, messages: Sequence[Any]) -> list[bool]:
        """Return which messages are not released; see `snapshot.StoredRule`."""
        rows = [(each.ledger, each.entry, each.batch) for each in messages]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 3)
        # The batch index of an entry without a batch is -1.
        entry_ids = columns[:, 1] << 10 | np.clip(columns[:, 2], 0, LAST_INDEX)
        found: list[bool] = (~self.is_released(pack(columns[:, 0], entry_ids))).tolist()
        return found

    def is_cancelled(self, message_id: str, target: str, key: str, attempt: int) -> bool:
        """Return True if a message is cancelled; ``attempt`` is its number of refusals."""
        with _LOOKING:
            return self.cancelled.contains(message_id, target, key, attempt)


def released_by_journal(client: Any, admin: TopicAdmin, journal: TopicName) -> JournalView:
    """Read a journal; without one, no position is released."""
    view = JournalView()
    for _ in range(_ATTEMPTS):
        # The front is read before the end. A dispatcher writes a snapshot before it deletes older
        # records, so the records from a newer front to an older end may lack a whole state.
        start = pending_start(admin, journal)
        try:
            last = admin.last_message_id(journal)
        except NotFoundError:
            last = None
        if last is None:
            break
        with closing(messages_in_range(client, journal.full, start, last.next_entry)) as found:
            entries = ((each.data(), Position(*at)) for each, *at in found)
            view = cast(JournalView, JournalView.read(counting(entries), 2))
        if pending_start(admin, journal) == start:
            break
        # Some of these records may have been deleted before they were read. The newer snapshot
        # that replaces them is behind the new front.
    return view
