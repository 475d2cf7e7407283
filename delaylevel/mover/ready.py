"""Ready bounds of source partitions: the positions up to which a mover reads.

Every message of a partition is ready a constant time after it was published, so the ready ones are
at the front. A search by publish time finds their end. Publish times come from the producers'
clocks. Where clocks differ, the search can stop too early (the rest is found later, late by at
most the skew, which the lead covers) or too late (a message that is read too early is parked
again). A message with a time far in the future must not stop the others, so the search checks the
entries behind every bound that such a message could have set.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from delaylevel.cluster.entries import EntryRange
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.values import LedgerInfo
from delaylevel.model.clock import Clock, StepDetector
from delaylevel.model.position import Position
from delaylevel.model.source_partition import SourcePartition
from delaylevel.model.topic_name import TopicName

#: Function that returns the start and publish time of the entries between two positions, as
#: :func:`delaylevel.cluster.reader.entry_times` does for a partition.
EntryTimes: TypeAlias = Callable[[Position, Position], Sequence[tuple[Position, int]]]

# Number of searches to run in parallel; the broker would only queue more of them.
_THREADS = 8

# The search checks this number of entries directly behind a bound, and ever fewer further on: a
# shorter run of wrong times hides nothing, a longer one hardly ever.
_CLOSE = 16
# Runs of wrong times that one search passes; the next search continues from there.
_ROUNDS = 8


T = TypeVar("T")


def in_threads(
    search: Callable[[SourcePartition], T], sources: Sequence[SourcePartition]
) -> list[T]:
    """Return the results of a search in each partition, in their order.

    The threads live for this call only: a mover at rest has none.
    """
    if len(sources) < 2:
        return [search(source) for source in sources]
    with ThreadPoolExecutor(min(_THREADS, len(sources)), "delaylevel-search") as threads:
        return list(threads.map(search, sources))


@dataclass(frozen=True)
class ReadyBound:
    """The end of the ready messages of a partition.

    Attributes:
        end: the first position that is not ready; equal to the start if no message is ready.
        next_check_ms: the earliest time at which more can be ready, in ms since the epoch.
    """

    end: Position
    next_check_ms: int


class NextChecks:
    """The next check of each partition, by its topic.

    These times are computed from publish times, so they are times of the wall clock. When it steps,
    all of them are discarded: a time that was computed by a clock that is ahead could be weeks too
    late, and a clock that was set back reaches it too late.

    Args:
        clock: the mover's clock.

    Attributes:
        stepped: True if the wall clock had stepped at the start of the present pass.
    """

    def __init__(self, clock: Clock) -> None:
        self.stepped = False
        self._steps = StepDetector(clock)
        self._times_ms: dict[str, int] = {}
        self._now_ms = 0

    def start_pass(self) -> int:
        """Return the present time for a pass, ms since the epoch, and look for a step."""
        now_ms, self.stepped = self._steps.read()
        if self.stepped:
            self._times_ms.clear()
        self._now_ms = now_ms
        return now_ms

    def __getitem__(self, topic: str) -> int:
        """Return the next check, ms since the epoch; 0 for a partition to check at once."""
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
) -> ReadyBound:
    """Return the bound up to which a partition may be read; look at few of its entries.

    Messages behind an open transaction are not ready: readers do not get them, and the mover would
    acknowledge them unread.

    Args:
        times: the publish times of the partition's entries.
        start: the first position that has not been handed off.
        now_ms: present time of the mover, ms since the epoch.
        lead_ms: the level topic's shortest lead in ms. A time that is off by more than half of it
            counts as wrong; the other half is left to the mover's own pace.

    Raises:
        BrokerError: the positions cannot be read.
    """
    last = admin.last_message_id(source.name)
    if last is None or last.next_entry <= start:
        # A message that is published from now on is not ready sooner (save for its clock's skew).
        return ReadyBound(start, now_ms + source.hand_off_after_ms)
    end = readable_end(admin, source, start, last.next_entry)
    if end <= start:
        return ReadyBound(start, now_ms)
    bound = _readable_bound(admin, times, source, start, end, now_ms, lead_ms)
    return bound if end == last.next_entry else ReadyBound(bound.end, now_ms)


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


def _readable_bound(
    admin: TopicAdmin,
    times: EntryTimes,
    source: SourcePartition,
    start: Position,
    end: Position,
    now_ms: int,
    lead_ms: int,
) -> ReadyBound:
    """Return the bound within [start, end), of which readers get everything."""
    topic = source.name
    ready_until_ms = source.ready_until_ms(now_ms)
    slack_ms = max(1, lead_ms // 2)
    found = admin.message_id_at(topic, ready_until_ms + 1)
    if found is None or found >= end:
        return ReadyBound(end, now_ms)
    if found.entry_start >= start:
        close = times(found, min(found.next_entry, Position(end.ledger, end.entry - 1)))
        published_ms = close[0][1] if close else 0
        # This entry is ready so soon that anything it hides can wait, and it hides nothing close.
        if 0 < published_ms - ready_until_ms <= slack_ms // 2 and all(
            next_ms > ready_until_ms for _, next_ms in close
        ):
            bound = _existing_bound(admin, topic, found, start)
            return ReadyBound(bound, published_ms + source.hand_off_after_ms)
    return _search(_NumberedEntries(admin, times, topic, start, end), source, now_ms, slack_ms)


def _search(
    entries: _NumberedEntries, source: SourcePartition, now_ms: int, slack_ms: int
) -> ReadyBound:
    """Search from the start without the broker, and pass entries with wrong times.

    The broker searches from the first entry that it still has. If the time of that one is wrong,
    the broker finds nothing ready until that time has passed.
    """
    ready_until_ms = source.ready_until_ms(now_ms)
    low, wrong = 0, False  # everything before low is read
    for _ in range(_ROUNDS):
        low = entries.first_after(low, ready_until_ms)
        if low == len(entries):
            break
        stopped_by_ms = entries.time(low)
        wrong = wrong or stopped_by_ms > now_ms + slack_ms
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
        return ReadyBound(entries.position(low), now_ms)
    if low == len(entries):
        next_check_ms = now_ms
    elif wrong:
        # Half the slack, because the bound before this one may have cost the other half.
        next_check_ms = now_ms + max(1, slack_ms // 2)
    else:
        next_check_ms = min(now_ms, entries.time(low)) + source.hand_off_after_ms
    return ReadyBound(entries.position(low), next_check_ms)


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
        self._count = len(self._entries)

    def __len__(self) -> int:
        return self._count

    def position(self, number: int) -> Position:
        """Return the front of entry ``number``; for the length itself, the end of the last entry.

        The front of a ledger is given as the end of the ledger before: an acknowledgement needs an
        entry that exists.
        """
        return self._start if number == 0 else self._entries.position(number - 1).next_entry

    def time(self, number: int) -> int:
        """Return the publish time of an entry, or of the next one if it does not exist any more.

        If none follows, it is 0, which is ready.
        """
        if number not in self._times:
            self._look(number, number)
        return self._times[number]

    def _look(self, first: int, last: int) -> None:
        """Read the times of adjacent entries, which costs no more than that of one."""
        positions = [self._entries.position(number) for number in range(first, last + 1)]
        found = iter(self._read(positions[0], positions[-1]))
        at, published_ms = next(found, (None, 0))
        for number, position in enumerate(positions, first):
            while at is not None and at < position:
                at, published_ms = next(found, (None, 0))
            self._times[number] = published_ms

    def first_after(self, low: int, latest_ms: int) -> int:
        """Return the first entry from ``low`` on published after a time, as if times rose."""
        return low + bisect_right(range(low, self._count), latest_ms, key=self.time)

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
    before = start
    for item in admin.ledgers(topic):
        if item.ledger < end.ledger and item.entries:
            before = max(before, Position(item.ledger, item.entries))
    return before
