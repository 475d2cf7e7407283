"""Publication of due batches, and the outcome of each of their messages.

The owner's thread calls everything here. The client's thread only reports that the broker has
answered for a target batch, by adding it to the owner's events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from delaylevel.dispatcher.journal.topic import Journal
from delaylevel.model.clock import Clock

from .batches import DueBatch
from .delay_queue import DelayQueue
from .record import WindowMessage
from .set_aside import SetAsideTopics
from .stats import SharedOwnerStats
from .targets import Target, TargetBatch, Targets, is_certain

# Number of unconfirmed batches at which no further batch is taken. Batches that wait only for
# paused targets do not count, up to the second number.
_BATCHES_AHEAD = 8
_MAX_OPEN = 400


@dataclass
class _UncommittedBatch:
    """A batch with an intent and without a commit."""

    batch: DueBatch
    messages: list[WindowMessage]
    left: int = 0  # target batches without an outcome
    refused: dict[int, str] = field(default_factory=dict)  # reasons by index


class BatchPublisher:
    """Publisher of batches: it writes their intents and commits, and sets refused messages aside.

    The client's thread calls ``answered`` with each target batch that has been flushed. The owner
    then passes the target batch to :meth:`finish`.
    """

    def __init__(
        self,
        delay_queue: DelayQueue,
        targets: Targets,
        journal: Journal,
        set_aside: SetAsideTopics,
        *,
        clock: Clock,
        stats: SharedOwnerStats,
        answered: Callable[[TargetBatch], None],
    ) -> None:
        self._queue = delay_queue
        self._targets = targets
        self._journal = journal
        self._set_aside = set_aside
        self._clock = clock
        self._stats = stats
        self._answered = answered
        self._open: dict[int, _UncommittedBatch] = {}
        self._unanswered: list[TargetBatch] = []

    def __len__(self) -> int:
        """Return the number of batches that are not completely confirmed."""
        return len(self._open)

    @property
    def unanswered(self) -> bool:
        """True if callbacks are about to come; :meth:`finish_unanswered` has to follow soon."""
        return bool(self._unanswered)

    @property
    def ready(self) -> bool:
        """True if another batch may be published."""
        if len(self._open) < _BATCHES_AHEAD:
            return True
        return len(self._open) < _MAX_OPEN and not self._waits_for_healthy_target()

    def publish(self, batch: DueBatch) -> None:
        """Write the intent of a batch, and pass its messages to their targets.

        Raises:
            BrokerError: the intent was not confirmed, or no broker serves a target now.
        """
        messages = [WindowMessage._make(record) for record in batch.records]
        opened = _UncommittedBatch(batch, messages)
        parts: dict[int, TargetBatch] = {}
        find = self._targets.find
        for index, message in enumerate(messages):
            if not message.target:
                opened.refused[index] = ""
                continue
            target = find(message)
            if isinstance(target, str):
                opened.refused[index] = target
                continue
            part = parts.get(id(target))
            if part is None:
                part = parts[id(target)] = TargetBatch(target, batch.number)
            part.indices.append(index)
        self._write_intent(batch, list(parts.values()))
        self._open[batch.number] = opened
        opened.left = len(parts)
        for part in parts.values():
            part.started_s = time.monotonic()
            part.target.send(part, [messages[index] for index in part.indices])
            self._flush(part)
        if not parts:
            self._commit(opened)

    def finish(self, part: TargetBatch) -> None:
        """Process a target batch after its flush."""
        if part not in part.target.unconfirmed:
            return  # it has its outcome already
        if part.answered:
            self._judge(part)
        else:
            # A flush does not wait for messages that the client has just taken from its queue.
            # Their callbacks are about to come, and nothing has failed.
            self._unanswered.append(part)

    def finish_unanswered(self) -> None:
        """Process the target batches that lacked callbacks after their flush."""
        unanswered, self._unanswered = self._unanswered, []
        for part in unanswered:
            self.finish(part)

    def check_targets(self) -> None:
        """Give up answers that are overdue, and retry targets that lost their producer."""
        for part in self._targets.find_stalled():
            self._judge(part)
        for target in self._targets.without_producer():
            self._recover(target)

    def _waits_for_healthy_target(self) -> bool:
        return any(
            part.number in self._open
            for target in self._targets.all()
            if not self._targets.is_paused(target)
            for part in target.unconfirmed
        )

    def _write_intent(self, batch: DueBatch, parts: list[TargetBatch]) -> None:
        targets: list[tuple[str, int]] = []
        target_index = np.empty(0, dtype=np.uint16)
        if self._targets.numbered:
            # A message that is set aside has no target: its index is one past the last.
            target_index = np.full(len(batch.records), len(parts), dtype=np.uint16)
            for place, part in enumerate(parts):
                target, count = part.target, len(part.indices)
                first = target.next_sequence_id
                targets.append((target.name, first))
                target_index[part.indices] = place
                part.sequence_ids = range(first, first + count)
                target.next_sequence_id = first + count
        intent = self._queue.intent(batch, tuple(targets), target_index)
        began = time.monotonic()
        self._journal.append(intent)
        if time.monotonic() - began > 1:
            # This process or the broker was suspended, so no target is to blame for its delay.
            self._targets.restart_timers()

    def _flush(self, part: TargetBatch) -> None:
        answered = self._answered
        part.target.producer._producer.flush_async(lambda _result: answered(part))

    def _judge(self, part: TargetBatch) -> None:
        """Decide on a target batch by its callbacks; a missing one counts as a failure."""
        target = part.target
        failures = part.failures()
        unsure = any(not is_certain(reason) for _, reason in failures)
        if unsure and self._targets.numbered:
            # Only a new producer with the same name can tell what the broker has stored.
            if target.producer is not None:
                self._targets.close_producer(target)
            return
        self._complete(part, dict(failures))
        if failures and target.producer is not None and not target.unconfirmed:
            self._targets.remove(target)

    def _complete(self, part: TargetBatch, failures: dict[int, str]) -> None:
        target = part.target
        target.complete(part)
        opened = self._open[part.number]
        if failures:
            topic, schema, _ = target.key
            self._targets.pause(topic, schema, next(iter(failures.values())))
            opened.refused.update(failures)
        elif not target.unconfirmed:
            self._targets.resume(target)
        opened.left -= 1
        if not opened.left:
            self._commit(opened)

    def _commit(self, opened: _UncommittedBatch) -> None:
        """Set the refused messages aside, and write the commit."""
        batch = opened.batch
        del self._open[batch.number]
        held: list[int] = []
        if opened.refused:
            held = batch.positions[self._set_aside.store(opened.messages, opened.refused)].tolist()
        self._journal.append_soon(self._queue.commit(batch.number, held))
        due_ms = batch.due_ms
        if opened.refused:
            due_ms = np.delete(due_ms, list(opened.refused))
        self._stats.released(due_ms, self._clock.now_ms())

    def _recover(self, target: Target) -> None:
        """Ask the broker what it has stored of a target's unconfirmed messages."""
        last = self._targets.reopen(target)
        if last is None:
            return
        for part in list(target.unconfirmed):
            failures = {
                index: "not confirmed"
                for index, number in zip(part.indices, part.sequence_ids, strict=True)
                if number > last
            }
            self._complete(part, failures)
