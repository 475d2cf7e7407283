"""How far a source partition is ripe: the bound up to which a mover reads it.

Every message of a partition is ripe a constant time after it was published, so the ripe ones stand
at the front. Where they end is found by publish time. Publish times are the producers' own: where
clocks differ the search can stop too early (what it misses is found later, late by at most the
skew, which the lead covers) or too late (what is read too early is parked again). A message that
is stamped beyond the lead in the future must not stop the others, so it is passed over here and
parked anew by whoever reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from delaylevel.ports import TopicAdmin
from delaylevel.positions import Position
from delaylevel.reading import SourcePartition
from delaylevel.topicname import TopicName

# So many misstamped entries in a row are stepped over in one look; behind them lie others' times.
_STEPS_OVER = 16


@dataclass(frozen=True)
class Bound:
    """What of a partition may be read now.

    Attributes:
        end: the first position that is not ripe; equal to the start where nothing is.
        look_again_ms: when something further can be ripe at the earliest, in ms since the epoch.
    """

    end: Position
    look_again_ms: int


def ripe_bound(
    admin: TopicAdmin, source: SourcePartition, start: Position, now_ms: int, lead_ms: int
) -> Bound:
    """Return how far a partition may be read from ``start``.

    Args:
        admin: asked for positions by publish time; nothing is read or moved.
        source: the partition.
        start: the first position that has not been handed off.
        now_ms: the mover's present time.
        lead_ms: a publish time that lies further ahead than this is taken for a wrong clock.

    Raises:
        BrokerError: the partition cannot be asked.
    """
    topic = source.name
    # A message that arrives from now on is ripe no sooner than this (or late by its clock's skew).
    later_ms = now_ms + source.hand_off_after_ms
    last = admin.last_message_id(topic)
    if last is None or last.entry < 0 or last.next_entry <= start:
        return Bound(start, later_ms)
    ripe_until_ms = now_ms - source.hand_off_after_ms
    found = admin.message_id_at(topic, ripe_until_ms + 1)
    if found is None or found > last:
        return Bound(last.next_entry, now_ms)
    published_ms = admin.entry_publish_time(topic, found)
    if found.entry_start >= start and published_ms is not None:
        wrong_clock = published_ms > now_ms + lead_ms
        if not wrong_clock:
            return Bound(
                _clean(admin, topic, found, start),
                max(now_ms, published_ms + source.hand_off_after_ms),
            )
    return _search(admin, source, start, last, now_ms, lead_ms)


def _search(
    admin: TopicAdmin,
    source: SourcePartition,
    start: Position,
    last: Position,
    now_ms: int,
    lead_ms: int,
) -> Bound:
    """Search behind ``start`` by hand, stepping over entries that a wrong clock has stamped.

    The broker searches from the first entry it still has; one wrong stamp there, and it finds
    nothing ripe until that stamp has passed.
    """
    topic = source.name
    entries = _Entries(admin, topic, start, last)
    ripe_until_ms = now_ms - source.hand_off_after_ms
    low, high = 0, len(entries)  # [0, low) is ripe; [high, …) is not
    front_ms: int | None = None
    while low < high:
        middle = (low + high) // 2
        probe, published_ms = entries.honest_from(middle, high, now_ms + lead_ms)
        if published_ms is None:
            # Wrong stamps only. At the front they are read, to be parked anew; elsewhere the
            # answer is looked for before them, and what lies behind is found at a later look.
            if middle == low:
                low = min(high, low + _STEPS_OVER)
            else:
                high = middle
        elif published_ms <= ripe_until_ms:
            low = probe + 1
        else:
            front_ms = published_ms
            high = middle
    if front_ms is None:
        return Bound(entries.position(low), now_ms + min(source.hand_off_after_ms, lead_ms))
    return Bound(
        entries.position(low),
        min(now_ms + source.hand_off_after_ms, max(now_ms, front_ms + source.hand_off_after_ms)),
    )


class _Entries:
    """The entries of a partition from start to last, as if they were numbered in a row."""

    def __init__(
        self, admin: TopicAdmin, topic: TopicName, start: Position, last: Position
    ) -> None:
        self._admin = admin
        self._topic = topic
        self._start = start
        self._spans: list[tuple[int, int, int]] = []  # (number of the first, ledger, its entry)
        count = 0
        for item in admin.ledgers(topic):
            first = start.entry if item.ledger == start.ledger else 0
            # The count of an open ledger may lag; last is known to be there.
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

    def honest_from(self, number: int, end: int, latest_ms: int) -> tuple[int, int | None]:
        """Return the first entry at or after ``number`` with a believable time, and that time."""
        for candidate in range(number, min(end, number + _STEPS_OVER)):
            published_ms = self._admin.entry_publish_time(self._topic, self._exact(candidate))
            if published_ms is not None and published_ms <= latest_ms:
                return candidate, published_ms
        return number, None

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
