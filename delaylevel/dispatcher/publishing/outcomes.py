"""Outcomes of sent messages, and the records that release their flights.

The records, called commits here, are gathered for a fraction of a second: each costs as much as a
message. With sequence IDs they are written before the next intents at the latest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np

from delaylevel.cluster.targets.pool import TargetPool
from delaylevel.cluster.targets.send_state import SendOutcome, Sent
from delaylevel.dispatcher.delay_queue import DelayQueue
from delaylevel.dispatcher.journal.records import UNCERTAIN, DispositionKind, LowWatermark
from delaylevel.dispatcher.journal.topic import Journal
from delaylevel.dispatcher.stats import SharedOwnerStats
from delaylevel.dispatcher.turns import PUBLISHING, TURNS
from delaylevel.model.clock import Clock

from .sending import Flight, PoolItem, Recall
from .set_aside import SetAsideTopics
from .targets import parse_target, target_name

# The longest time, and the largest number of messages, without a commit after the confirmation.
_COMMIT_S = 0.25
_UNCOMMITTED = 2_000
# The longest time until a message is counted whose flight is not completely confirmed.
_COUNT_S = 1.0


class EarlierIntents:
    """The intents from before the takeover, until it is known which messages are stored.

    The broker is asked, through the pool of targets. An intent of what it has not stored stays open
    until that is released, as long as the owners use sequence IDs.

    Args:
        numbered: True if this owner does.
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
        return {each.intent.target for each in self._recalls.values()}

    def begin(self) -> None:
        """Ask about all messages of all intents."""
        refused = self._queue.state.refused
        for intent in self._queue.unresolved_intents():
            if intent.first == UNCERTAIN and self._numbered:
                # An earlier owner may still send its messages, so they do not expire.
                self._queue.reopen(intent.number)
                continue
            recall = self._recalls[intent.number] = Recall(intent)
            if intent.target:
                producer = self._pool.producer(parse_target(intent.target))
                for index, position in enumerate(intent.positions.tolist()):
                    if position not in refused:
                        producer.recall((recall, index), intent.first + index)
                        recall.left += 1
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
        for record in self._queue.resolve(number, mask):
            self._journal.append_soon(record)


class FlightOutcomes:
    """The flights, until they are released.

    Attributes:
        flights: flights with messages that have no outcome.
        uncommitted: number of messages that are confirmed, and have no commit yet.
    """

    def __init__(
        self,
        delay_queue: DelayQueue,
        pool: TargetPool[PoolItem],
        journal: Journal,
        set_aside: SetAsideTopics[Flight],
        *,
        numbered: bool,
        clock: Clock,
        stats: SharedOwnerStats,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = delay_queue
        self._pool = pool
        self._journal = journal
        self._set_aside = set_aside
        self._numbered = numbered
        self._clock = clock
        self._stats = stats
        self._now_s = now_s
        self.flights: set[Flight] = set()
        self._earlier = EarlierIntents(delay_queue, pool, journal, numbered=numbered)
        # By topic, messages and bytes of the flights of which messages are being set aside.
        self._refused_load: dict[str, tuple[int, int]] = {}
        self._confirmed: list[Flight] = []
        self._late_ms: list[int] = []  # lateness of the messages that are not counted
        self._commit_s = 0.0
        self.uncommitted = 0

    @property
    def busy(self) -> bool:
        """True while flights or earlier intents are open."""
        return bool(self.flights or self._earlier) or self.next_commit_s is not None

    @property
    def next_commit_s(self) -> float | None:
        """Monotonic time by which commits are written, in s; None if there are none."""
        return self._commit_s if self._confirmed or self._late_ms else None

    def refused_load(self, topic: str) -> tuple[int, int]:
        """Return messages and bytes of a target's flights of which some are being set aside."""
        return self._refused_load.get(topic, (0, 0))

    def resolve_earlier(self) -> None:
        """Begin to resolve the intents that the last owner left open; `process` goes on."""
        self._earlier.begin()

    def add(self, flights: Iterable[Flight]) -> None:
        """Add flights that are launched."""
        self.flights.update(flights)
        for flight in flights:
            if flight.key is None:
                self._finish(flight)

    def take_refused(self, refused: list[tuple[Flight, int]]) -> None:
        """Process messages that were refused instead of sent, which the journal knows."""
        for flight in dict.fromkeys(flight for flight, _ in refused):
            if not flight.left:
                self._finish(flight)

    @TURNS.take(PUBLISHING)
    def process(self) -> None:
        """Process the outcomes of messages that were sent."""
        refused: list[tuple[Flight, int]] = []
        done: list[Flight] = []
        stored: list[Sent[PoolItem]] = []
        for _, (sent, outcome, reason) in self._pool.poll():
            owner, index = sent.item
            if isinstance(owner, Recall):
                self._earlier.settle(owner, index, outcome is SendOutcome.STORED)
                continue
            if outcome is SendOutcome.STORED:
                stored.append(sent)
            else:
                owner.refused[index] = reason
                refused.append((owner, index))
            owner.left -= 1
            if not owner.left:
                done.append(owner)
        for flight, index, dead in self._set_aside.confirmed():
            if dead:
                flight.may_return.append(index)
            flight.aside -= 1
            if not flight.aside:
                self._commit(flight)
        self._record(refused)
        if self._numbered:
            self._resume()
        if stored:
            self._note_stored(stored)
        for flight in done:
            self._finish(flight)
        due_s = self.next_commit_s
        if due_s is not None and (self._now_s() >= due_s or len(self._late_ms) >= _UNCOMMITTED):
            self.write_commits()

    def write_commits(self) -> None:
        """Write the commits of flights that are completely confirmed, and count the messages."""
        plain: list[Flight] = []
        if self._late_ms:
            self._stats.released(np.array(self._late_ms))
            self._late_ms = []
        for flight in self._confirmed:
            if flight.counted:
                self._dispose(flight)
            if not (self._numbered or flight.may_return):
                plain.append(flight)
                continue
            held = flight.batch.positions[flight.may_return].tolist()
            self._queue.releases.at_ms = flight.confirmed_ms
            self._journal.append_soon(self._queue.commit(flight.batch.number, held))
        if plain:
            self._queue.releases.at_ms = np.repeat(
                [flight.confirmed_ms for flight in plain], [len(flight.batch) for flight in plain]
            )
            numbers = [flight.batch.number for flight in plain]
            self._journal.append_soon(self._queue.commit_all(numbers))
        self._queue.releases.at_ms = None
        self._confirmed = []
        self.uncommitted = 0

    def _dispose(self, flight: Flight) -> None:
        """Record which messages of a flight are not published; dead letters may come back."""
        kinds = {
            "held": DispositionKind.HELD,
            "dropped": DispositionKind.DROPPED,
            "expired": DispositionKind.EXPIRED,
        }
        for counter, kind in kinds.items():
            index = [
                each
                for each, (counted, _) in zip(sorted(flight.refused), flight.counted, strict=True)
                if counted == counter and each not in flight.may_return
            ]
            if index:
                number = flight.batch.number
                self._journal.append_soon(self._queue.dispose(number, kind, index))

    def _note_stored(self, stored: list[Sent[PoolItem]]) -> None:
        """Note when messages were stored, and how late."""
        self._gather(_COUNT_S)
        now_s, now_ms = self._now_s(), self._clock.now_ms()
        at_s, at_ms = now_s, now_ms
        for sent in stored:
            if sent.answered_s != at_s:
                at_s = sent.answered_s
                at_ms = now_ms - int((now_s - at_s) * 1000) if at_s else now_ms
            flight, index = sent.item
            assert isinstance(flight, Flight)
            flight.confirmed_ms = at_ms
            late_ms = at_ms - flight.dues[index]
            self._late_ms.append(late_ms if late_ms > 0 else 0)

    def _gather(self, most_s: float) -> None:
        """Gather what `write_commits` writes, for at most this time in s."""
        before_s, commit_s = self.next_commit_s, self._now_s() + most_s
        self._commit_s = commit_s if before_s is None else min(before_s, commit_s)

    def _record(self, refused: list[tuple[Flight, int]]) -> None:
        """Write refusals to the journal, with deduplication."""
        if refused and self._numbered:
            positions = np.array([int(flight.batch.positions[index]) for flight, index in refused])
            self._journal.append(self._queue.refuse(positions))

    def _resume(self) -> None:
        """Let producers go on whose refusals are in the journal."""
        suspended = self._pool.suspended()
        unresolved = self._earlier.targets
        ready = [key for key in suspended if target_name(key) not in unresolved]
        if ready:
            self._journal.append(LowWatermark(self._queue.state.low_watermark))
            for key in ready:
                self._pool.producer(key).resume()

    def _finish(self, flight: Flight) -> None:
        """Set the refused messages of a flight aside, and release it."""
        if not flight.refused:
            self._commit(flight)
            return
        messages, refused = flight.batch.messages, flight.refused
        flight.aside, flight.counted = self._set_aside.send(flight, messages, refused)
        if not flight.aside:
            self._commit(flight)
        elif flight.key is not None:
            flight.size = sum(len(message.value or b"") for message in messages)
            self._count_refused(flight.key.topic, len(messages), flight.size)

    def _count_refused(self, topic: str, messages: int, size: int) -> None:
        before, size_before = self._refused_load.pop(topic, (0, 0))
        if before + messages:
            self._refused_load[topic] = before + messages, size_before + size

    def _commit(self, flight: Flight) -> None:
        """Keep a flight for the next commits, which are written together."""
        if flight.key is not None and flight.size is not None:
            self._count_refused(flight.key.topic, -len(flight.batch), -flight.size)
        self.flights.discard(flight)
        self._set_aside.count(flight.counted)
        now_ms = self._clock.now_ms()
        if flight.refused or not flight.confirmed_ms:
            flight.confirmed_ms = now_ms
        self._gather(_COMMIT_S - (now_ms - flight.confirmed_ms) / 1000)
        self._confirmed.append(flight)
        self.uncommitted += len(flight.batch)
