"""Resolution of the intents that the last owner of a window partition left open."""

from __future__ import annotations

import numpy as np

from delaylevel.cluster.targets.pool import TargetPool
from delaylevel.dispatcher.journal.topic import Journal

from .delay_queue import DelayQueue
from .flights import PoolItem, Recall
from .target_names import parse_target


class EarlierIntents:
    """The intents from before the takeover, until it is known which messages are stored.

    Without deduplication nothing is known: all messages count as not stored. If messages may be
    cancelled, the intents stay open until these are released again. With deduplication, the broker
    is asked, through the pool of targets, and an intent of what it has not stored stays open.

    Args:
        numbered: True if the messages have sequence IDs.
    """

    def __init__(
        self,
        queue: DelayQueue,
        pool: TargetPool[PoolItem],
        journal: Journal,
        *,
        numbered: bool,
    ) -> None:
        self._queue = queue
        self._numbered = numbered
        self._pool = pool
        self._journal = journal
        self._recalls: dict[int, Recall] = {}

    def __len__(self) -> int:
        """Return the number of unresolved intents."""
        return len(self._recalls)

    @property
    def targets(self) -> set[str]:
        """Names of the targets with unresolved intents."""
        return {name for each in self._recalls.values() for name, _ in each.intent.targets}

    def begin(self) -> None:
        """Ask about all messages of all intents."""
        refused = self._queue.state.refused
        for intent in self._queue.unresolved_intents():
            recall = Recall(intent)
            for index, (number, position) in enumerate(
                zip(intent.sequence_ids().tolist(), intent.positions.tolist(), strict=True)
            ):
                if number and position not in refused:
                    name, _ = intent.targets[int(intent.target_index[index])]
                    self._pool.producer(parse_target(name)).recall((recall, index), number)
                    recall.left += 1
            stays = self._numbered or self._queue.state.dispositions is not None
            if not intent.target_index.size and stays:
                # Nothing is known. It stays open: its messages cannot be cancelled, and with
                # sequence IDs they do not expire.
                self._queue.reopen(intent.number)
                continue
            self._recalls[intent.number] = recall
            if not recall.left:
                self._resolve(recall)

    def settle(self, recall: Recall, index: int, stored: bool) -> None:
        """Process the outcome of a message; write the record when it was the intent's last."""
        if stored:
            recall.stored.add(index)
        recall.left -= 1
        if not recall.left:
            self._resolve(recall)

    def _resolve(self, recall: Recall) -> None:
        number = recall.intent.number
        mask = np.zeros(recall.intent.positions.size, dtype=np.bool_)
        mask[list(recall.stored)] = True
        del self._recalls[number]
        uncertain = self._queue.cancelling.keep_uncertain(number, mask)
        if uncertain is not None:
            self._journal.append_soon(uncertain)
        self._journal.append_soon(self._queue.resolve(number, mask))
