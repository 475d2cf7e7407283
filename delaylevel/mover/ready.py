"""Ready bounds of source partitions: the positions up to which a mover reads.

Every message of a partition is ready a constant time after it was published, so the ready ones are
at the front. A search by publish time finds their end. Publish times come from the producers'
clocks. Where clocks differ, the search can stop too early (the rest is found later, late by at
most the skew, which the lead covers) or too late (a message that is read too early is parked
again). A message with a time far in the future must not stop the others, so the search checks the
entries behind every bound that such a message could have set.

The search goes on without the admin interface, which tells positions, so that a search reads few
entries for their publish times. While no address of it answers, but brokers serve the partitions,
the search reads all messages from the start instead, up to the first one that is not ready. So a
mover reads ready messages twice then. This search does not pass a message whose publish time is far
in the future: what is behind such a message waits until the admin interface answers again.

Ready partitions are served in the order of their due times: see `ReadyQueue`.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

from delaylevel.cluster.failures import is_admin_away, translate_errors
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.cluster.port import LedgerInfo, TopicAdmin
from delaylevel.cluster.reader import EntryRange, PartitionReader, entry_times
from delaylevel.cluster.threads import in_parallel
from delaylevel.errors import BrokerError, DataLossError
from delaylevel.model.clock import STEP_MS, Clock
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.position import Position, SourcePartition
from delaylevel.model.topic_name import TopicName

#: Function that returns the start and publish time of the entries between two positions, as
#: :func:`delaylevel.cluster.reader.entry_times` does for a partition.
EntryTimes: TypeAlias = Callable[[Position, Position], Sequence[tuple[Position, int]]]

# The search checks this number of entries directly behind a bound, and ever fewer further on: a
# shorter run of wrong times hides nothing, a longer one hardly ever.
_CLOSE = 16
# Runs of wrong times that one search passes; the next search continues from there.
_ROUNDS = 8


@dataclass(frozen=True)
class ReadyRange:
    """The ready messages of a partition."""

    source: SourcePartition
    end: Position  # the first one that is not ready; the start if nothing is ready
    next_check_ms: int
    due_ms: int = 0  # the earliest due time of the first message; 0 if that is not asked for


class NextChecks:
    """The next check of each partition, by its topic."""

    # These times are computed from publish times, so they are times of the wall clock. When it
    # steps, all are discarded: by a clock that is ahead, one could be weeks too late.
    def __init__(self, clock: Clock) -> None:
        self.stepped = False
        self._clock = clock
        self._offset_ms = clock.now_ms() - 1000 * clock.monotonic_s()
        self._times_ms: dict[str, int] = {}
        self._now_ms = 0

    def start_pass(self) -> int:
        """Return the time of a pass; note if the wall clock has `stepped` since the last one."""
        now_ms = self._now_ms = self._clock.now_ms()
        offset_ms = now_ms - 1000 * self._clock.monotonic_s()
        self.stepped = abs(offset_ms - self._offset_ms) > STEP_MS
        if self.stepped:
            self._offset_ms = offset_ms
            self._times_ms.clear()
        return now_ms

    def __getitem__(self, topic: str) -> int:
        """Return the next check; 0 for a partition to check at once."""
        return self._times_ms.get(topic, 0)

    def __setitem__(self, topic: str, time_ms: int) -> None:
        # A check that is due at once may find messages that have been ready for long.
        self._times_ms[topic] = time_ms if time_ms > self._now_ms else 0


def ready_bound(
    admin: TopicAdmin,
    times: EntryTimes,
    source: SourcePartition,
    start: Position,
    now_ms: int,
    lead_ms: int,
) -> ReadyRange:
    """Return the bound up to which a partition may be read; look at few of its entries."""
    topic = source.name
    last = admin.last_message_id(topic)
    if last is None or last.next_entry <= start:
        # A message that is published from now on is not ready sooner (save for its clock's skew).
        return ReadyRange(source, start, now_ms + source.hand_off_after_ms)
    # Messages behind an open transaction are not ready: readers do not get them, and the mover
    # would acknowledge them unread.
    end = readable_end(admin, source, start, last.next_entry)
    if end <= start:
        return ReadyRange(source, start, now_ms)
    ready_until_ms = source.ready_until_ms(now_ms)
    # A time that is off by more than half of the shortest lead counts as wrong; the other half is
    # left to the mover's own pace.
    slack_ms = max(1, lead_ms // 2)
    bound = None
    found = admin.message_id_at(topic, ready_until_ms + 1)
    if found is None or found >= end:
        bound = ReadyRange(source, end, now_ms)
    elif found.entry_start >= start:
        close = times(found, min(found.next_entry, Position(end.ledger, end.entry - 1)))
        published_ms = close[0][1] if close else 0
        # This entry is ready so soon that anything it hides can wait, and it hides nothing close.
        if 0 < published_ms - ready_until_ms <= slack_ms // 2 and all(
            next_ms > ready_until_ms for _, next_ms in close
        ):
            at = _existing_bound(admin, topic, found, start)
            bound = ReadyRange(source, at, published_ms + source.hand_off_after_ms)
    if bound is None:
        entries = _NumberedEntries(admin, times, topic, start, end)
        bound = _search(entries, source, now_ms, slack_ms)
    return bound if end == last.next_entry else replace(bound, next_check_ms=now_ms)


def readable_end(
    admin: TopicAdmin, source: SourcePartition, start: Position, end: Position
) -> Position:
    """Return the end of the part of [start, end) that readers get."""
    if end <= start:
        return end
    limit = admin.open_transaction_at(source.name)
    if limit is None or limit >= end:
        return end
    return max(start, _existing_bound(admin, source.name, limit, start))


def _search(
    entries: _NumberedEntries, source: SourcePartition, now_ms: int, slack_ms: int
) -> ReadyRange:
    """Search from the start without the broker, and pass entries with wrong times."""
    # The broker searches from the first entry that it still has. If the time of that one is wrong,
    # the broker finds nothing ready until that time has passed.
    ready_until_ms = source.ready_until_ms(now_ms)
    low, wrong = 0, False  # everything before low is read
    for _ in range(_ROUNDS):
        low += bisect_right(range(low, len(entries)), ready_until_ms, key=entries.time)
        if low == len(entries):
            break
        stopped_by_ms = entries.time(low)
        wrong = wrong or stopped_by_ms > now_ms + slack_ms
        if source.role is Role.HELD and source.ready_ms(now_ms) < stopped_by_ms:
            # By a clock that was ahead. Nothing tells how long the message has waited.
            return ReadyRange(source, entries.position(len(entries)), now_ms)
        behind = entries.some_behind(low)
        oldest = min(behind, key=entries.time, default=low)
        if entries.time(oldest) < stopped_by_ms - slack_ms:
            wrong = True
            behind.append(entries.run_end(low, oldest, slack_ms))
        ready = [number for number in behind if entries.time(number) <= ready_until_ms]
        if not ready:
            break
        low = max(ready) + 1
    else:
        return ReadyRange(source, entries.position(low), now_ms)
    if low == len(entries):
        next_check_ms = now_ms
    elif wrong:
        # Half the slack, because the bound before this one may have cost the other half.
        next_check_ms = now_ms + max(1, slack_ms // 2)
    else:
        next_check_ms = min(now_ms, entries.time(low)) + source.hand_off_after_ms
    return ReadyRange(source, entries.position(low), next_check_ms)


class _NumberedEntries:
    """The entries of a partition in [start, end), numbered across its ledgers."""

    def __init__(
        self,
        admin: TopicAdmin,
        times: EntryTimes,
        topic: TopicName,
        start: Position,
        end: Position,
    ) -> None:
        self._read = times
        self._start = start
        self._times: dict[int, int] = {}
        # The count of an open ledger may be too low or too high; the end is exact.
        ledgers = [
            LedgerInfo(item.ledger, end.entry) if item.ledger == end.ledger else item
            for item in admin.ledgers(topic)
        ]
        self._entries = EntryRange(ledgers, start, end)
        self._count = len(self._entries)  # counting passes over all ledgers

    def __len__(self) -> int:
        return self._count

    def position(self, number: int) -> Position:
        """Return the front of entry ``number``; for the length, the end of the last entry."""
        # The front of a ledger is given as the end of the ledger before: an acknowledgement needs
        # an entry that exists.
        return self._start if number == 0 else self._entries.position(number - 1).next_entry

    def time(self, number: int) -> int:
        """Return the publish time of an entry or, if it is gone, the next; 0 if none follows."""
        if number not in self._times:
            self._look(number, number)
        return self._times[number]

    def _look(self, first: int, last: int) -> None:
        # The times of adjacent entries cost no more than that of one.
        positions = [self._entries.position(number) for number in range(first, last + 1)]
        found = iter(self._read(positions[0], positions[-1]))
        at, published_ms = next(found, (None, 0))
        for number, position in enumerate(positions, first):
            while at is not None and at < position:
                at, published_ms = next(found, (None, 0))
            self._times[number] = published_ms

    def some_behind(self, number: int) -> list[int]:
        """Return entries behind one, in order: all close ones, and ever fewer further on."""
        chosen = list(range(number + 1, min(number + 1 + _CLOSE, self._count)))
        if chosen:
            self._look(number, chosen[-1])
        step = 2 * _CLOSE
        while number + step < self._count:
            chosen.append(number + step)
            step *= 2
        if chosen and chosen[-1] != self._count - 1:
            chosen.append(self._count - 1)
        return chosen

    def run_end(self, wrong: int, right: int, slack_ms: int) -> int:
        """Return the first entry behind a run of wrong times, given one in it and one behind."""
        while right - wrong > 1:
            middle = (wrong + right) // 2
            if self.time(middle) > self.time(right) + slack_ms:
                wrong = middle
            else:
                right = middle
        return right


def _existing_bound(
    admin: TopicAdmin, topic: TopicName, found: Position, start: Position
) -> Position:
    """Return a bound as the end of an entry that exists, even at the front of a ledger."""
    end = found.entry_start
    if end.entry > 0 or end <= start:
        return end
    # The ledger before it may have been empty, or deleted.
    before = start
    for item in admin.ledgers(topic):
        if item.ledger < end.ledger and item.entries:
            before = max(before, Position(item.ledger, item.entries))
    return before


# As for the Spark job: a fifth of the lead is left for other delays.
_SHORTEST_TRIGGER_MS, _LONGEST_TRIGGER_MS = 200, 5_000
#: Messages that become ready in a pass may be more urgent than the rest of a backlog. So a longer
#: pass ends, and the next one looks for them at once: as often as with the longest trigger.
LONGEST_PASS_S = _LONGEST_TRIGGER_MS / 1000
# In a backlog, the others might be served for ever.
_LONGEST_POSTPONED_S = 60.0


class ReadyQueue(dict[str, ReadyRange]):
    """The ready ranges of a level topic by partition; it gives the most urgent one first."""

    # The order matters in a backlog. Of messages that became ready together, those of a fine level
    # are due before those of a coarse one, because its lead is shorter. A coarse partition cannot
    # starve: its due time is fixed, and those of the others grow as they are served.
    def __init__(self) -> None:
        super().__init__()
        # The monotonic time in s at which a partition has failed. It is served after the others,
        # the last one that failed at the end.
        self.postponed: dict[str, float] = {}

    def is_first(self, item: ReadyRange) -> bool:
        """Return True if a range, which is not here, is at least as urgent as all others."""
        urgency = self._urgency(item)
        return all(urgency <= self._urgency(other) for other in self.values())

    def take(self) -> ReadyRange:
        """Remove the most urgent range and return it; those with one due time keep their order."""
        return self.pop(min(self.values(), key=self._urgency).source.topic)

    def fail(self, topic: str, now_s: float) -> None:
        """Discard all ranges; serve a partition after the others, until some time has passed."""
        # A partition that cannot be handed off is the most urgent one before long, and would keep
        # all others waiting. If the failure was that of another one, that one fails next, and is
        # last.
        self.clear()
        last_s = max(self.postponed.values(), default=now_s)
        self.postponed[topic] = max(now_s, last_s + 0.001)

    def forgive(self, now_s: float) -> None:
        """Serve partitions by their due times again that have failed long ago."""
        found = [
            topic
            for topic, failed_s in self.postponed.items()
            if now_s - failed_s > _LONGEST_POSTPONED_S
        ]
        for topic in found:
            del self.postponed[topic]
        if found:
            self.clear()

    def _urgency(self, item: ReadyRange) -> tuple[float, int]:
        return self.postponed.get(item.source.topic, float("-inf")), item.due_ms


def first_due_ms(source: SourcePartition, ready_ms: int, now_ms: int) -> int:
    """Return the earliest due time of a message that became ready at a time, or after it."""
    # A time after now comes from a wrong publish time: the partition must not wait for it.
    return min(ready_ms, now_ms) + source.lead_ms


def trigger_of(description: LevelTopicDescription) -> int:
    """Return the default time between two passes, in ms."""
    fifth_ms = description.levels.smallest_lead_ms // 5
    return max(_SHORTEST_TRIGGER_MS, min(_LONGEST_TRIGGER_MS, fifth_ms))


log = logging.getLogger(__name__)

# One search reads no more messages than a mover hands off before it confirms them.
_MOST_READ = 20_000
_WAIT_MS = 1_000


class ReadySearch:
    """Finds the ready messages of partitions, in any thread; ``connected`` if they are locked."""

    def __init__(
        self, client: Any, admin: TopicAdmin, connected: Callable[[], bool], subject: str
    ) -> None:
        self._client = client
        self._admin = admin
        self._connected = connected
        self._warning = RepeatedWarning(log, subject)

    def ready_range(
        self,
        source: SourcePartition,
        start: Position,
        now_ms: int,
        lead_ms: int,
        next_check_ms: int,
    ) -> ReadyRange:
        """Return the ready messages of a partition, with their urgency."""
        try:
            times = partial(entry_times, self._client, source.topic)
            found = ready_bound(self._admin, times, source, start, now_ms, lead_ms)
            ready_ms = next_check_ms  # before it, nothing was ready; 0: it is unknown
            if not ready_ms and found.end > start:
                first = times(start, start)
                ready_ms = source.ready_ms(first[0][1]) if first else 0
        except BrokerError as error:
            if not is_admin_away(error) or not self._connected():
                raise
            self._warning.failed(f"reading messages to find the ready ones, because {error}")
            return read_ready_range(self._client, source, start, now_ms, lead_ms)
        self._warning.over()
        return replace(found, due_ms=first_due_ms(source, ready_ms, now_ms))


Found = TypeVar("Found")


def search_all(
    search: Callable[[SourcePartition], Found], sources: Collection[SourcePartition]
) -> list[Found | BrokerError]:
    """Search partitions in parallel; an error of a broker is the result for its partition."""

    def attempt(source: SourcePartition) -> Found | BrokerError:
        try:
            with translate_errors():
                return search(source)
        except DataLossError:
            raise
        except BrokerError as error:
            return error

    return in_parallel(attempt, sources)


def read_ready_range(
    client: Any, source: SourcePartition, start: Position, now_ms: int, lead_ms: int
) -> ReadyRange:
    """Return the ready messages of a partition by reading them."""
    ready_until_ms, soon_ms = source.ready_until_ms(now_ms), now_ms + max(1, lead_ms // 2)
    end, next_check_ms, first_ms = start, now_ms, 0
    with translate_errors(), closing(PartitionReader(client, source.topic, start)) as reader:
        for _ in range(_MOST_READ):
            # Without any message, a receive would wait; asked before each, this is a request more.
            if end == start and not reader.has_message_available():
                message = None
            else:
                message = reader.receive(_WAIT_MS)
                if message is None and reader.has_message_available():
                    raise BrokerError(f"{source.topic} has messages but delivered none in time")
            published_ms = now_ms if message is None else message.publish_timestamp()
            if message is None or published_ms > ready_until_ms:
                # It is looked at again soon, as the publish time of one message may be wrong.
                next_check_ms = min(source.ready_ms(published_ms), soon_ms)
                break
            message_id = message.message_id()
            end = Position(message_id.ledger_id(), message_id.entry_id() + 1)
            first_ms = first_ms or published_ms
    ready_ms = source.ready_ms(first_ms) if first_ms else now_ms
    return ReadyRange(source, end, next_check_ms, first_due_ms(source, ready_ms, now_ms))
