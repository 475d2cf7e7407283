"""How far a source partition is ripe: the bound up to which a mover reads it.

Every message of a partition is ripe a constant time after it was published, so the ripe ones stand
at the front. Where they end is found by publish time. Publish times are the producers' own: where
clocks differ the search can stop too early (what it misses is found later, late by at most the
skew, which the lead covers) or too late (what is read too early is parked again). A message that
is stamped far in the future must not stop the others, so a bound that it could have set is
questioned: what stands behind it tells. Whoever reads such a message early parks it anew.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from delaylevel.cluster.port import TopicAdmin
from delaylevel.model.position import Position
from delaylevel.model.source_partition import SourcePartition
from delaylevel.model.topic_name import TopicName

# Behind a bound every one of so many entries is asked, and further on ever fewer: a run of wrong
# stamps that is shorter hides nothing, a longer one hardly ever.
_CLOSE = 16
# So many runs of wrong stamps are passed in one look; the next look goes on from there.
_ROUNDS = 8


@dataclass(frozen=True)
class ReadyBound:
    """What of a partition may be read now.

    Attributes:
        end: the first position that is not ripe; equal to the start where nothing is.
        next_check_ms: when something further can be ripe at the earliest, in ms since the epoch.
    """

    end: Position
    next_check_ms: int


def ready_bound(
    admin: TopicAdmin, source: SourcePartition, start: Position, now_ms: int, lead_ms: int
) -> ReadyBound:
    """Return how far a partition may be read from ``start``.

    Args:
        admin: asked for positions by publish time; nothing is read or moved.
        source: the partition.
        start: the first position that has not been handed off.
        now_ms: the mover's present time.
        lead_ms: the level topic's shortest lead. Times that differ by more than half of it are
            taken for those of a wrong clock; the other half is left to the mover's own pace.

    Raises:
        BrokerError: the partition cannot be asked.
    """
    topic = source.name
    last = admin.last_message_id(topic)
    if last is None or last.entry < 0 or last.next_entry <= start:
        # A message that arrives from now on is ripe no sooner (or late by its clock's skew).
        return ReadyBound(start, now_ms + source.hand_off_after_ms)
    ripe_until_ms = now_ms - source.hand_off_after_ms
    slack_ms = max(1, lead_ms // 2)
    found = admin.message_id_at(topic, ripe_until_ms + 1)
    if found is None or found > last:
        return ReadyBound(last.next_entry, now_ms)
    if found.entry_start >= start:
        published_ms = admin.entry_publish_time(topic, found)
        # It is ripe so soon that what it may hide can wait for it, and it hides nothing close by.
        if published_ms is not None and 0 < published_ms - ripe_until_ms <= slack_ms // 2:
            next_ms = admin.entry_publish_time(topic, found.next_entry)
            if next_ms is None or next_ms > ripe_until_ms:
                end = _clean(admin, topic, found, start)
                return ReadyBound(end, published_ms + source.hand_off_after_ms)
    return _search(_Entries(admin, topic, start, last), source, now_ms, slack_ms)


def _search(entries: _Entries, source: SourcePartition, now_ms: int, slack_ms: int) -> ReadyBound:
    """Search behind the start by hand, passing entries that a wrong clock has stamped.

    The broker searches from the first entry it still has; one wrong stamp there, and it finds
    nothing ripe until that stamp has passed.
    """
    ripe_until_ms = now_ms - source.hand_off_after_ms
    low, wrong = 0, False  # what stands before low is read
    for _ in range(_ROUNDS):
        low = entries.first_after(low, len(entries), ripe_until_ms)
        if low == len(entries):
            break
        stopped_by_ms = entries.time(low)
        wrong = wrong or stopped_by_ms > now_ms + slack_ms
        behind = entries.some_behind(low)
        oldest = min(behind, key=entries.time, default=low)
        if entries.time(oldest) < stopped_by_ms - slack_ms:
            wrong = True
            behind.append(entries.run_end(low, oldest, slack_ms))
        ripe = [number for number in behind if entries.time(number) <= ripe_until_ms]
        if not ripe:
            break
        low = max(ripe) + 1
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


class _Entries:
    """The entries of a partition from start to last, as if they were numbered in a row."""

    def __init__(
        self, admin: TopicAdmin, topic: TopicName, start: Position, last: Position
    ) -> None:
        self._admin = admin
        self._topic = topic
        self._start = start
        self._times: dict[int, int] = {}
        self._spans: list[tuple[int, int, int]] = []  # (number of the first, ledger, its entry)
        count = 0
        for item in admin.ledgers(topic):
            first = start.entry if item.ledger == start.ledger else 0
            # The count of an open ledger may lag, or run ahead; last is what is spoken of.
            size = last.entry + 1 if item.ledger == last.ledger else item.entries
            if start.ledger <= item.ledger <= last.ledger and size > first >= 0:
                self._spans.append((count, item.ledger, first))
                count += size - first
        self._count = count

    def __len__(self) -> int:
        return self._count

    def position(self, number: int) -> Position:
        """Return the front of entry ``number``; for the length itself, the end behind the last."""
        if number == 0:
            return self._start
        # The end of a ledger is written as behind its last entry, never as the next one's front:
        # an acknowledgement needs an entry that exists.
        for first, ledger, entry in reversed(self._spans):
            if number > first:
                return Position(ledger, entry + number - first)
        return self._start

    def time(self, number: int) -> int:
        """Return when an entry was published; one that is not there any more is long ripe."""
        if number not in self._times:
            published_ms = self._admin.entry_publish_time(self._topic, self._exact(number))
            self._times[number] = 0 if published_ms is None else published_ms
        return self._times[number]

    def first_after(self, low: int, high: int, latest_ms: int) -> int:
        """Return the first entry in [low, high) published after a time, as if times rose."""
        return low + bisect_right(range(low, high), latest_ms, key=self.time)

    def some_behind(self, number: int) -> list[int]:
        """Return entries behind one, in order: all that are close, ever fewer farther on."""
        chosen = list(range(number + 1, min(number + 1 + _CLOSE, self._count)))
        step = 2 * _CLOSE
        while number + step < self._count:
            chosen.append(number + step)
            step *= 2
        if chosen and chosen[-1] != self._count - 1:
            chosen.append(self._count - 1)
        return chosen

    def run_end(self, wrong: int, right: int, slack_ms: int) -> int:
        """Return the first entry behind a run of wrong stamps, given one in it and one behind."""
        while right - wrong > 1:
            middle = (wrong + right) // 2
            if self.time(middle) > self.time(right) + slack_ms:
                wrong = middle
            else:
                right = middle
        return right

    def _exact(self, number: int) -> Position:
        for first, ledger, entry in reversed(self._spans):
            if number >= first:
                return Position(ledger, entry + number - first)
        raise IndexError(number)


def _clean(admin: TopicAdmin, topic: TopicName, found: Position, start: Position) -> Position:
    """Return a bound as behind an entry that exists, where it is the front of a ledger."""
    end = found.entry_start
    if end.entry > 0 or end <= start:
        return end
    before = start
    for item in admin.ledgers(topic):
        if item.ledger < end.ledger and item.entries:
            before = max(before, Position(item.ledger, item.entries))
    return before
