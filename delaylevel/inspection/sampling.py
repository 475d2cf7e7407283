"""The spread of due times in level topics, from a look at some places of each partition.

One reader for each place reads an entry, and is closed. Partitions that turn out small are read
whole, and so counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from delaylevel.cluster.entries import Entries, choose_places
from delaylevel.cluster.port import LedgerInfo, TopicAdmin
from delaylevel.cluster.reader import messages_in_range
from delaylevel.model.delivery import LARGEST_BATCH
from delaylevel.model.envelope import TARGET, due_of
from delaylevel.model.level_topic import Role
from delaylevel.model.message import batch_size
from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.scan import PendingRange

from .horizon import Piece, Pieces
from .window_view import Place, WindowView

_THREADS = 8
# Places in all level partitions together, and how many a partition has at the most.
_PLACES = 110
_MOST_PLACES = 24
# So many messages are read at a place where entries have less.
_LEAST_MESSAGES = 16
# Of a batch no more than this.
_MOST_MESSAGES = 48
_WINDOW_MESSAGES = 200
# So many messages may be read beyond the samples, to count what is small.
_COUNTED = 8_000


class CountingAdmin(TopicAdmin, Protocol):
    """A cluster that counts messages and entries."""

    def contents(self, partition: TopicName) -> tuple[list[LedgerInfo], int]:
        """Return a partition's ledgers, and the entries it has got since the broker opened it."""
        ...

    def messages_in(self, topic: TopicName) -> Mapping[TopicName, int]:
        """Return the messages that each partition has got since the broker opened it.

        A topic that has no partitions is its only one. Nothing for one that does not exist.
        """
        ...


@dataclass(frozen=True)
class Seen:
    """What was seen at one place.

    Attributes:
        number: of the entry in its range.
        publish_ms: when it was published.
        per_entry: messages an entry has here.
        messages: due time (None where it cannot be read), target and whether it is pending.
    """

    number: int
    publish_ms: int
    per_entry: float
    messages: tuple[tuple[int | None, str, bool], ...]


@dataclass
class Sampled:
    """The spread of one partition.

    Attributes:
        item: what was looked at.
        pieces: the spread of its due times.
        targets: messages for each business topic.
    """

    item: PendingRange
    pieces: Pieces = field(default_factory=Pieces)
    targets: Counter[str] = field(default_factory=Counter)


def sample(
    client: Any,
    admin: CountingAdmin,
    ranges: Sequence[PendingRange],
    view: WindowView,
    target: str | None = None,
) -> list[Sampled]:
    """Look at some places of each range.

    Args:
        client: a ``pulsar.Client``.
        admin: the cluster.
        ranges: what is pending.
        view: says which messages of the final window are.
        target: the full name of a business topic, to leave out the messages of others.

    Returns:
        The spread of each range, in their order.
    """
    if not ranges:
        return []
    with ThreadPoolExecutor(min(_THREADS, len(ranges)), "delaylevel-sample") as pool:
        measured = _measured(pool, admin, ranges)
        entries = [own for own, _ in measured]
        ratios = [ratio for _, ratio in measured]
        looks = [_Look(client, item, own, view) for item, own in zip(ranges, entries, strict=True)]
        fronts = list(pool.map(lambda look: look.at(0), looks))
        small = _small(entries, ratios)
        share = max(1, min(_MOST_PLACES, _PLACES // len(ranges)))
        work = [
            (index, number)
            for index, whole in enumerate(small)
            if not whole
            for number in looks[index].places(share)
        ]
        seen = [[] if front is None else [front] for front in fronts]
        others = pool.map(lambda one: (one[0], looks[one[0]].at(one[1])), work)
        for index, other in others:
            if other is not None:
                seen[index].append(other)

        def finish(index: int) -> Sampled:
            look = looks[index]
            if small[index]:
                return _counted(look, look.everything(), target)
            return _estimated(look, seen[index], target, ratios[index])

        return list(pool.map(finish, range(len(looks))))


def expected(admin: CountingAdmin, ranges: Sequence[PendingRange]) -> int:
    """Return about how many messages ranges hold; 0 where the broker does not know."""
    if not ranges:
        return 0
    with ThreadPoolExecutor(min(_THREADS, len(ranges)), "delaylevel-expected") as pool:
        measured = _measured(pool, admin, ranges)
    if any(ratio is None and len(entries) for entries, ratio in measured):
        return 0
    return round(sum(len(entries) * (ratio or 0.0) for entries, ratio in measured))


def _measured(
    pool: ThreadPoolExecutor, admin: CountingAdmin, ranges: Sequence[PendingRange]
) -> list[tuple[Entries, float | None]]:
    """Return the entries of each range, and how many messages one has where that is known."""
    # Messages before entries: what comes in between makes no entry look too full.
    counted: dict[TopicName, int] = {}
    for found in pool.map(
        admin.messages_in, {item.source.name.without_partition for item in ranges}
    ):
        counted.update(found)
    measured = []
    contents = pool.map(lambda item: admin.contents(item.source.name), ranges)
    for item, (ledgers, added) in zip(ranges, contents, strict=True):
        entries = Entries(ledgers, item.start, item.end)
        ratio = _ratio(counted.get(item.source.name, 0), len(entries), added)
        measured.append((entries, ratio))
    return measured


def _ratio(messages: int, entries: int, added: int) -> float | None:
    """Return how many messages an entry has on the average; None where the broker forgot it."""
    return messages / added if added >= entries and added and messages else None


class _Look:
    """Reads places of one range."""

    def __init__(self, client: Any, item: PendingRange, entries: Entries, view: WindowView) -> None:
        self._client = client
        self._view = view
        self.item = item
        self.entries = entries
        window = item.source.role is Role.WINDOW
        self._least = _WINDOW_MESSAGES if window else _LEAST_MESSAGES
        # Not known before the first look. More than is needed costs more than asking again.
        self._queue = _WINDOW_MESSAGES // 4 if window else 1

    @property
    def known(self) -> bool:
        """Whether what is pending of it is known, and not supposed."""
        return self.item.source.role is not Role.WINDOW or self._view.known(self.item.source)

    def places(self, share: int) -> list[int]:
        """Return the numbers of further entries that are worth a look; looks do not overlap."""
        apart = max(1, len(self.entries) // max(1, 2 * self._queue))
        return [number for number in choose_places(len(self.entries), min(share, apart)) if number]

    def at(self, number: int) -> Seen | None:
        """Read an entry, or several small ones; None where nothing is there (any more)."""
        if number >= len(self.entries):
            return None
        found: list[tuple[Place, int | None, str]] = []
        entries: set[tuple[int, int]] = set()
        first: Any = None
        size = 0
        with closing(self._read(self.entries.position(number), self._queue)) as messages:
            for message, *place in messages:
                at: Place = (place[0], place[1], place[2])
                if first is None:
                    first, size = message, max(1, batch_size(message.message_id()))
                entries.add(at[:2])
                found.append(_glance(message, at))
                if len(found) >= max(self._least, min(size, _MOST_MESSAGES)):
                    break
        if first is None:
            return None
        # The last entry may not have been read to its end.
        per_entry = float(size) if size > 1 else len(found) / len(entries)
        self._queue = max(1, int(self._least / per_entry))
        return Seen(number, first.publish_timestamp(), per_entry, self._judged(found))

    def everything(self) -> Seen:
        """Read the whole range."""
        with closing(self._read(self.item.start, 2000)) as messages:
            found = [_glance(message, (a, b, c)) for message, a, b, c in messages]
        return Seen(0, 0, 1.0, self._judged(found))

    def _read(self, start: Position, queue: int) -> Any:
        return messages_in_range(
            self._client, self.item.source.topic, start, self.item.end, queue=queue
        )

    def _judged(
        self, found: list[tuple[Place, int | None, str]]
    ) -> tuple[tuple[int | None, str, bool], ...]:
        if self.item.source.role is not Role.WINDOW:
            return tuple((due, target, True) for _, due, target in found)
        waiting = self._view.waiting(
            self.item.source, [place for place, _, _ in found], [due for _, due, _ in found]
        )
        return tuple(
            (due, target or self.item.source.name.without_partition.full, pending)
            for (_, due, target), pending in zip(found, waiting, strict=True)
        )


def _glance(message: Any, place: Place) -> tuple[Place, int | None, str]:
    properties = message.properties()
    return place, due_of(properties), properties.get(TARGET, "")


def _small(entries: Sequence[Entries], ratios: Sequence[float | None]) -> list[bool]:
    """Return which ranges are read whole: the smallest, as many as may be."""
    guessed = [
        len(counted) * (LARGEST_BATCH if ratio is None else ratio)
        for counted, ratio in zip(entries, ratios, strict=True)
    ]
    chosen = [False] * len(guessed)
    left = float(_COUNTED)
    for index in sorted(range(len(guessed)), key=guessed.__getitem__):
        left -= guessed[index]
        if left < 0:
            break
        chosen[index] = True
    return chosen


def _counted(look: _Look, seen: Seen, target: str | None) -> Sampled:
    result = Sampled(look.item)
    _add(result, seen.messages, 1.0, 0, target)
    result.pieces.looked_at = len(seen.messages)
    result.pieces.exact = look.known
    return result


def _estimated(
    look: _Look, seen: list[Seen], target: str | None, per_entry: float | None
) -> Sampled:
    """Let each place stand for the entries up to the next one.

    Args:
        look: what was looked at.
        seen: what was seen there.
        target: the business topic that counts; None for all.
        per_entry: how many messages an entry has, where that is known.
    """
    result = Sampled(look.item)
    result.pieces.exact = False
    result.pieces.looked_at = sum(len(one.messages) for one in seen)
    seen = sorted(seen, key=lambda one: one.number)
    spreading = look.item.source.role is not Role.WINDOW
    for here, there in pairwise(seen):
        entries = there.number - here.number
        messages = entries * (per_entry or (here.per_entry + there.per_entry) / 2)
        spread_ms = there.publish_ms - here.publish_ms if spreading else 0
        _add(result, here.messages, messages / len(here.messages), spread_ms, target)
    if seen:
        last = seen[-1]
        messages = (len(look.entries) - last.number) * (per_entry or last.per_entry)
        _add(result, last.messages, messages / len(last.messages), 0, target)
    return result


def _add(
    result: Sampled,
    messages: Sequence[tuple[int | None, str, bool]],
    each: float,
    spread_ms: int,
    target: str | None,
) -> None:
    dues = []
    for due, wanted, pending in messages:
        if not pending or (target is not None and wanted != target):
            continue
        if due is None:
            result.pieces.damaged += each
        else:
            dues.append(due)
            result.targets[wanted] += each  # type: ignore[assignment]
    if dues:
        result.pieces.pieces.append(Piece(dues, each, spread_ms))
