"""The driver's side of the streaming source: partition locks, offsets and input ranges.

For each source partition, an offset holds the first position after the batch. It also holds the
time of the plan.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from operator import attrgetter
from typing import Any

from pyspark.sql.datasource import InputPartition

from delaylevel.cluster.failures import is_admin_away
from delaylevel.cluster.locks import PartitionLock
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.cluster.reader import acknowledged_by_others, messages_in_range
from delaylevel.cluster.threads import GrowingPause
from delaylevel.errors import (
    AlreadyRunningError,
    BrokerError,
    ConfigError,
    DataLossError,
    LevelTopicError,
)
from delaylevel.model.clock import Clock, SteadyClock, SystemClock
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.position import EARLIEST, Position, SourcePartition, source_partitions
from delaylevel.mover.ready import NextChecks, ReadyRange, ReadySearch, search_all
from delaylevel.mover.service import check_movable

from .forwarding import InputRange, Runtime, runtime
from .options import SyncOptions

log = logging.getLogger(__name__)

Offset = dict[str, Any]


def make_offset(
    now_ms: int,
    positions: Mapping[str, Position],
    skipped: Mapping[str, Position] | None = None,
) -> Offset:
    """Return the end of a batch that is planned at a time: the first position after it.

    ``skipped`` is its start where it follows lost messages: a replay starts there again.
    """
    found: Offset = {"now_ms": now_ms, "positions": positions, "skipped": skipped or {}}
    for name in ("positions", "skipped"):
        found[name] = {topic: str(at) for topic, at in sorted(found[name].items())}
    return found


def positions_of(offset: Offset, name: str = "positions") -> dict[str, Position]:
    """Return the positions of an offset by partition, or those that were ``skipped``."""
    if "positions" not in offset:
        raise ConfigError(
            "the checkpoint is that of another Spark query: give the job a folder of its own "
            "(--checkpoint)"
        )
    return {topic: Position.parse(text) for topic, text in offset.get(name, {}).items()}


# A killed mover keeps its locks for some seconds; a live one keeps them for longer than this.
_LOCK_TIMEOUT_S = 15.0
_WARM_UP_RANGES = 4


class Driver:
    """State of the streaming source on the driver: partition locks, and the next searches."""

    def __init__(self, options: SyncOptions, clock: Clock | None = None) -> None:
        self._options = options
        self._runtime: Runtime = runtime(options)
        self._clock = SteadyClock(clock or SystemClock())
        self._locks: dict[str, PartitionLock] = {}
        self._described: dict[str, LevelTopicDescription] = {}
        self._warnings: dict[str, RepeatedWarning] = {}
        self._sources: dict[str, SourcePartition] = {}
        # The level topics that are not served now, with the reason, and their known partitions.
        self._given_up: dict[str, BrokerError] = {}
        self._left: dict[str, SourcePartition] = {}
        self._acknowledged: dict[str, Position] = {}  # the first position that is not
        self._next_checks = NextChecks(self._clock)
        self._pauses: dict[str, GrowingPause] = {}  # of the partitions whose last search failed
        # Earliest due times of the ranges of the batch that was chosen last, ms since the epoch.
        self._due_ms: dict[str, int] = {}
        self._fixed_now_ms: int | None = None
        self._warm = False
        self._ready_search = ReadySearch(
            self._runtime.client,
            self._runtime.admin,
            lambda: all(lock.connected for lock in self._locks.values()),
            "Spark job",
        )
        self._warning = RepeatedWarning(log, "Spark job")
        try:
            self._refresh()
        except BaseException:
            self.close()  # what is locked already
            raise

    @property
    def once(self) -> bool:
        """True if the time is fixed, so that a run ends when no more messages are ready."""
        return self._fixed_now_ms is not None

    def initial_offset(self) -> Offset:
        """Return the first message of every partition that is not acknowledged."""
        return make_offset(0, self._acknowledged)

    def latest_offset(self, start: Offset, max_messages: int | None) -> Offset:
        """Return the end of a batch of ready messages; a limited one has what is due first."""
        self._refresh()
        is_first, self._warm = not self._warm, True
        if is_first and not self.once:
            # A batch without messages, which warms up: see `input_ranges`.
            return make_offset(self._clock.now_ms(), {**self._acknowledged, **positions_of(start)})
        now_ms = self._next_checks.start_pass()
        if self._fixed_now_ms is not None:
            now_ms = self._fixed_now_ms
        positions = positions_of(start)
        # A partition that is new to this query starts at its first unacknowledged message. Its
        # start is logged before anything of it is read, so that a replay reads the same.
        new = {topic: at for topic, at in self._acknowledged.items() if topic not in positions}
        due = [
            source
            for topic, source in self._sources.items()
            if topic in positions and self._next_checks[topic] <= now_ms
        ]
        found = search_all(
            lambda source: self._search(source, positions[source.topic], now_ms), due
        )
        skipped: dict[str, Position] = {}
        ready: list[ReadyRange] = []
        failures: list[BrokerError] = []
        for source, outcome in zip(due, found, strict=True):
            topic = source.topic
            if isinstance(outcome, BrokerError):
                pause_s = self._pauses.setdefault(topic, GrowingPause()).next_s()
                self._next_checks[topic] = now_ms + int(1000 * pause_s)
                failures.append(outcome)
                continue
            self._pauses.pop(topic, None)
            begin, item = outcome
            self._next_checks[topic] = item.next_check_ms
            if begin != positions[topic]:
                skipped[topic] = positions[topic] = begin
            if item.end > begin:
                ready.append(item)
        self._report(failures)
        self._due_ms = {item.source.topic: item.due_ms for item in ready}
        if max_messages is None:
            positions.update((item.source.topic, item.end) for item in ready)
        else:
            positions.update(self._earliest_due_first(ready, positions, max_messages))
        if not ready and not new and not skipped:
            return start
        return make_offset(now_ms, {**positions, **new}, skipped)

    def input_ranges(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return the messages between two offsets, as a range for each partition."""
        # Spark starts a task for each, in this order: the earliest due first.
        # If there are none (in the first batch of a run), return some empty ranges: they start the
        # Python workers and their connections before a message has to wait for them.
        starts = {**positions_of(start), **positions_of(end, "skipped")}
        now_ms = int(end["now_ms"])
        found: list[InputRange] = []
        for topic, until in positions_of(end).items():
            # What was planned of a level topic before it was given up is finished as planned.
            source = self._sources.get(topic) or self._left.get(topic)
            since = starts.get(topic)
            if since is None or until <= since:
                continue
            if source is None:
                reasons = "; ".join(f"{name}: {error}" for name, error in self._given_up.items())
                raise LevelTopicError(
                    f"the last batch of the checkpoint has {topic}, which is not served "
                    f"({reasons or 'no level topic of the job has it'}). Was a level topic removed "
                    "from the job, or created again with fewer partitions? Remove the reason and "
                    "start the job again, or start with a new checkpoint"
                )
            found.append(InputRange(source, since, until, now_ms))
        if not found:
            some = list(self._sources.values())[:_WARM_UP_RANGES]
            return [InputRange(source, EARLIEST, EARLIEST, now_ms) for source in some]
        return sorted(found, key=lambda item: self._due_ms.get(item.source.topic, 0))

    def require_all(self) -> None:
        """Raise LevelTopicError if a level topic was given up: its messages were left out."""
        for topic, error in self._given_up.items():
            raise LevelTopicError(
                f"the ready messages were moved, except those of {topic}: {error}"
            ) from error

    def acknowledge(self, end: Offset) -> None:
        """Acknowledge cumulatively up to an offset whose batches are all complete."""
        for topic, position in positions_of(end).items():
            source = self._sources.get(topic)
            if source is None or position <= self._acknowledged[topic]:
                continue
            if not self._warm:
                # Only a position of the checkpoint can be one of another cluster.
                self._check_exists(source, position)
            self._locks[source.level_topic].acknowledge(source, position)
            self._acknowledged[topic] = position

    def fix_now(self) -> None:
        """Search and route by the current time from now on."""
        self._fixed_now_ms = self._clock.now_ms()

    def close(self) -> None:
        """Release the level topics."""
        for lock in self._locks.values():
            lock.close()

    def _report(self, failures: Sequence[BrokerError]) -> None:
        """Warn of partitions that are left out of batches; end the query if none is left."""
        # Partitions that are not due have not failed. A run that ends when nothing is ready must
        # not leave anything out.
        if not self._pauses:
            self._warning.over()
        elif failures:
            if self.once or len(self._pauses) == len(self._sources):
                raise failures[0]
            self._warning.failed(
                f"ready messages of {len(self._pauses)} of {len(self._sources)} partitions were "
                f"not found, because {failures[0]}"
            )

    def _search(
        self, source: SourcePartition, start: Position, now_ms: int
    ) -> tuple[Position, ReadyRange]:
        """Return the start of a partition's next batch, and its ready messages."""
        if not self._locks[source.level_topic].holds(source.topic):
            # Its acknowledgements would get lost in the client without an error.
            raise BrokerError(
                f"{source.topic} is not locked: its broker is away, or another mover has taken it"
            )
        known_ms, find_ready = self._next_checks[source.topic], self._ready_search.ready_range
        lead_ms = self._described[source.level_topic].levels.smallest_lead_ms
        found = find_ready(source, start, now_ms, lead_ms, known_ms)
        if found.end <= start:
            return start, found
        try:
            lost, until = acknowledged_by_others(self._runtime.admin, source, start)
        except BrokerError as error:
            if not is_admin_away(error):
                raise
            return start, found
        if not lost:
            return start, found
        text = (
            f"{lost:,} entries of {source.topic} from {start} up to {until} are acknowledged, and "
            "not by this query: another mover or an older checkpoint moved them, or an "
            "administrator skipped or cleared the backlog, or they expired"
        )
        if self._options.fail_on_data_loss:
            raise DataLossError(
                f"{text}. Start with a new checkpoint if another mover has moved them; "
                "failOnDataLoss=false continues after them"
            )
        log.warning("%s; continuing after them (failOnDataLoss=false)", text)
        return until, find_ready(source, until, now_ms, lead_ms, 0)

    def _check_exists(self, source: SourcePartition, position: Position) -> None:
        """Raise DataLossError if a position of the checkpoint is not in its partition."""
        # Ledgers have other numbers after their cluster was built again. What is stored in front of
        # the position was not moved then, and an acknowledgement would lose it.
        if position.entry < 1:
            return  # a ledger without entries, which may be gone, and is never acknowledged
        last = self._runtime.admin.last_message_id(source.name)
        ledgers = {item.ledger for item in self._runtime.admin.ledgers(source.name)}
        if last is None or position > last.next_entry or position.ledger not in ledgers:
            raise DataLossError(
                f"the checkpoint is not of this cluster, or older than its data: {position} is not "
                f"in {source.topic}. Start with a new checkpoint; nothing was acknowledged"
            )

    def _earliest_due_first(
        self, ready: Sequence[ReadyRange], positions: Mapping[str, Position], max_messages: int
    ) -> dict[str, Position]:
        """Return the ends of the partitions' ranges, for a limited number of messages in all."""
        # Messages are counted by reading them: the broker does not report how many a batched entry
        # contains.
        ends: dict[str, Position] = {}
        left = max_messages
        # Held messages come last, and would wait for the end of a backlog without a share.
        share = left // 10 if any(item.source.role is Role.HELD for item in ready) else 0
        for item in sorted(ready, key=attrgetter("due_ms")):
            topic, end = item.source.topic, item.end
            until = positions[topic]
            most = left if item.source.role is Role.HELD else left - share
            if most > 0:
                count, until = _count(self._runtime.client, item.source, until, end, most)
                left -= count
                ends[topic] = until
            if until < end:
                self._next_checks[topic] = 0
        return ends

    def _refresh(self) -> None:
        """Read the descriptions again, and lock new partitions."""
        for topic in self._options.level_topics:
            try:
                description = self._runtime.describe(topic)
                check_movable(description)
                if self._described.get(topic) != description:
                    self._serve(topic, description)
            except LevelTopicError as error:
                self._give_up(topic, error)
            except AlreadyRunningError as error:
                if topic not in self._given_up:
                    raise
                self._give_up(topic, error)  # the other mover may have it, and the others go on
        if not self._described:
            raise next(iter(self._given_up.values()))

    def _serve(self, topic: str, description: LevelTopicDescription) -> None:
        """Lock the new partitions of a level topic, and move its messages from now on."""
        new = [s for s in source_partitions(description) if s.topic not in self._sources]
        if new:
            lock = self._acquire(new, 0.0 if topic in self._given_up else _LOCK_TIMEOUT_S)
            self._acknowledged.update(lock.start_positions(new))
            previous = self._locks.get(topic)
            if previous is not None:  # an expansion has added partitions
                lock.merge(previous)
            self._locks[topic] = lock
            self._sources.update((source.topic, source) for source in new)
        self._described[topic] = description
        if self._given_up.pop(topic, None) is not None:
            self._warnings[topic].over()

    def _give_up(self, topic: str, error: BrokerError) -> None:
        """Stop moving the messages of a level topic; its messages stay where they are."""
        # Its positions stay in the offsets, so that it continues there when it can be served again.
        warning = self._warnings.setdefault(topic, RepeatedWarning(log, f"level topic {topic}"))
        warning.failed(f"it is not served, but the others are: {error}")
        self._given_up[topic] = error
        self._described.pop(topic, None)
        if (lock := self._locks.pop(topic, None)) is not None:
            lock.close()
        for name in [s.topic for s in self._sources.values() if s.level_topic == topic]:
            self._left[name] = self._sources.pop(name)
            self._pauses.pop(name, None)

    def _acquire(self, sources: Sequence[SourcePartition], timeout_s: float) -> PartitionLock:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return PartitionLock(self._runtime.client, self._runtime.admin, sources, "spark")
            except AlreadyRunningError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.5)


def _count(
    client: Any, source: SourcePartition, start: Position, end: Position, limit: int
) -> tuple[int, Position]:
    """Return the number of messages from start to end, and the end; both up to a limit."""
    count = 0
    with closing(messages_in_range(client, source.topic, start, end)) as found:
        for count, (_, ledger, entry, batch) in enumerate(found, 1):
            if count == limit:
                return count, Position(ledger, entry, batch).next
    return count, end
