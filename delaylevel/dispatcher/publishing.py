"""What leaves a window: batches that are published, and what becomes of each of their messages.

The thread that owns the window calls all of this; the client's own says when a slice of a batch
has been answered for, by putting it among the owner's events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from delaylevel.dispatcher.journal.state import encode
from delaylevel.dispatcher.journal.topic import Journal
from delaylevel.model.clock import Clock
from delaylevel.model.level_topic import LevelTopicDescription, MissingTarget
from delaylevel.mover import hop

from .delay_queue import Batch, DelayQueue
from .record import WindowMessage
from .stats import SharedOwnerStats
from .targets import OwnTopic, Target, TargetBatch, Targets, certain, target_name

# So many batches may be unconfirmed before the next one is taken, unless they wait for a target
# that stands still.
_BATCHES_AHEAD = 8
_MOST_OPEN = 400


@dataclass
class _Open:
    """A batch whose intent is logged and which is not confirmed in whole."""

    batch: Batch
    messages: list[WindowMessage]
    left: int = 0
    refused: dict[int, str] = field(default_factory=dict)


class BatchPublisher:
    """Publishes batches, sets aside what is refused, and writes down what is done.

    Args:
        window: that the batches are of.
        lanes: the ways to the business topics.
        release_log: where intents are written before, and what is done after.
        held, dead: for what cannot be published now, and ever.
        description: returns the level topic as it is now.
        clock: the present time.
        numbered: the broker deduplicates.
        figures: of the window partition.
        answered: takes a slice in the client's thread; it is to come back to :meth:`finish`.
    """

    def __init__(
        self,
        window: DelayQueue,
        lanes: Targets,
        release_log: Journal,
        held: OwnTopic,
        dead: OwnTopic,
        *,
        description: Callable[[], LevelTopicDescription],
        clock: Clock,
        numbered: bool,
        figures: SharedOwnerStats,
        answered: Callable[[TargetBatch], None],
    ) -> None:
        self._queue = window
        self._lanes = lanes
        self._log = release_log
        self._held = held
        self._dead = dead
        self._description = description
        self._clock = clock
        self._numbered = numbered
        self._figures = figures
        self._answered = answered
        self._open: dict[int, _Open] = {}
        self._unanswered: list[TargetBatch] = []

    def __len__(self) -> int:
        """Return how many batches are not confirmed in whole."""
        return len(self._open)

    @property
    def unanswered(self) -> bool:
        """Whether a callback is a moment away: :meth:`look_again` is to be called soon."""
        return bool(self._unanswered)

    @property
    def ready(self) -> bool:
        """Whether another batch may be published."""
        if len(self._open) < _BATCHES_AHEAD:
            return True
        return len(self._open) < _MOST_OPEN and not self._moving()

    def publish(self, batch: Batch) -> None:
        """Log what is to be published, and give it to the lanes."""
        messages = [WindowMessage._make(record) for record in batch.records]
        opened = _Open(batch, messages)
        parts: dict[int, TargetBatch] = {}
        find = self._lanes.find
        for index, message in enumerate(messages):
            if not message.target:
                opened.refused[index] = ""
                continue
            lane = find(message)
            if isinstance(lane, str):
                opened.refused[index] = lane
                continue
            part = parts.get(id(lane))
            if part is None:
                part = parts[id(lane)] = TargetBatch(lane, batch.number)
            part.indices.append(index)
        self._log_intent(batch, list(parts.values()))
        self._open[batch.number] = opened
        opened.left = len(parts)
        for part in parts.values():
            part.started_s = time.monotonic()
            part.lane.send(part, [messages[index] for index in part.indices])
            self._flush(part)
        if not parts:
            self._confirm(opened)

    def finish(self, part: TargetBatch) -> None:
        """The broker has answered for a slice, or the client has given up waiting."""
        if part not in part.lane.waiting:
            return  # settled meanwhile
        if part.answered:
            self._judge(part)
        else:
            # A flush does not wait for what was just taken from the client's queue: the callback
            # is a moment away, and nothing has failed.
            self._unanswered.append(part)

    def look_again(self) -> None:
        """Finish what was flushed and had callbacks to come."""
        unanswered, self._unanswered = self._unanswered, []
        for part in unanswered:
            self.finish(part)

    def look_after(self) -> None:
        """Give up what should have been answered long ago, and ask after lanes in doubt."""
        for part in self._lanes.watch():
            self._judge(part)
        for lane in self._lanes.in_doubt():
            self._resolve(lane)

    def _moving(self) -> bool:
        """Say whether any open batch waits for a lane that does confirm."""
        return any(
            part.number in self._open
            for lane in self._lanes.all()
            if not self._lanes.refuses(lane)
            for part in lane.waiting
        )

    def _log_intent(self, batch: Batch, parts: list[TargetBatch]) -> None:
        """Write down what is to be published; where that took long, this process stood still."""
        outlets: list[tuple[str, int]] = []
        outlet_index = np.empty(0, dtype=np.uint16)
        if self._numbered:
            # What goes to the held or the dead-letter topic has no outlet: one behind the last.
            outlet_index = np.full(len(batch.records), len(parts), dtype=np.uint16)
            for place, part in enumerate(parts):
                lane, count = part.lane, len(part.indices)
                first = lane.next_sequence_id
                outlets.append((target_name(*lane.key), first))
                outlet_index[part.indices] = place
                part.sequence_ids = list(range(first, first + count))
                lane.next_sequence_id = first + count
        intent = self._queue.intent(batch, tuple(outlets), outlet_index)
        began = time.monotonic()
        self._log.append(encode(intent))
        if time.monotonic() - began > 1:
            self._lanes.forgive()

    def _flush(self, part: TargetBatch) -> None:
        answered = self._answered
        part.lane.producer._producer.flush_async(lambda _result: answered(part))

    def _judge(self, part: TargetBatch) -> None:
        """Settle a slice by its outcomes; one that is missing counts as a failure."""
        lane = part.lane
        failures = part.failures()
        unsure = any(not certain(reason) for _, reason in failures)
        if unsure and lane.numbered:
            # Only a new producer of that name can say what the broker has stored.
            if lane.producer is not None:
                self._lanes.doubt(lane)
            return
        self._settle(part, dict(failures))
        if failures and lane.producer is not None and not lane.waiting:
            self._lanes.drop(lane)

    def _settle(self, part: TargetBatch, failures: dict[int, str]) -> None:
        lane = part.lane
        lane.settled(part)
        opened = self._open[part.number]
        if failures:
            target, schema, _ = lane.key
            self._lanes.refuse(target, schema, next(iter(failures.values())))
            opened.refused.update(failures)
        elif not lane.waiting:
            self._lanes.accept(lane)
        opened.left -= 1
        if not opened.left:
            self._confirm(opened)

    def _confirm(self, opened: _Open) -> None:
        """Set aside what was refused, and write down that the batch is done."""
        batch = opened.batch
        del self._open[batch.number]
        held = self._set_aside(opened) if opened.refused else ()
        done = self._queue.confirm(batch.number, held)
        self._log.append_soon(encode(done))
        due_ms = batch.due_ms
        if opened.refused:
            due_ms = np.delete(due_ms, list(opened.refused))
        self._figures.released(due_ms, self._clock.now_ms())

    def _set_aside(self, opened: _Open) -> Sequence[int]:
        """Store what cannot be published in the held or the dead-letter topic."""
        until_ms = hop.held_until_ms(self._description(), self._clock.now_ms())
        held: list[tuple[WindowMessage, dict[str, str], int | None]] = []
        dead: list[tuple[WindowMessage, dict[str, str], int | None]] = []
        positions: list[int] = []
        for index, reason in sorted(opened.refused.items()):
            message = opened.messages[index]
            if not message.target:
                dead.append((message, message.properties, None))
                continue
            policy = hop.missing_target_policy(self._description(), reason)
            if policy is MissingTarget.DROP:
                self._figures.dropped()
                continue
            positions.append(int(opened.batch.positions[index]))
            if policy is MissingTarget.DEAD_LETTER:
                dead.append((message, message.abandoned_properties(), None))
                continue
            held.append((message, message.held_properties(reason), until_ms))
            self._figures.held(message.target)
        if held:
            self._held.send(held)
        if dead:
            self._dead.send(dead)
            self._figures.dead(len(dead))
        return positions

    def _resolve(self, lane: Target) -> None:
        """Ask the broker what it has of a lane whose producer was given up."""
        last = self._lanes.resolve(lane)
        if last is None:
            return
        for part in list(lane.waiting):
            failures = {
                index: "not confirmed"
                for index, number in zip(part.indices, part.sequence_ids, strict=True)
                if number > last
            }
            self._settle(part, failures)
