"""Every pending message, counted by its due time; nothing of it is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from delaylevel.cluster.reader import messages_in_range
from delaylevel.model.envelope import TARGET, due_of
from delaylevel.model.level_topic import Role
from delaylevel.topics.scan import PendingRange

from .horizon import Tally
from .parallel import Progress, side_by_side
from .window_view import Place, WindowView

_CHUNK = 2000


@dataclass
class Counted:
    """What was counted.

    Attributes:
        tallies: each range, and its messages by due time.
        targets: messages for each business topic.
    """

    tallies: list[tuple[PendingRange, Tally]] = field(default_factory=list)
    targets: Counter[str] = field(default_factory=Counter)


def count_all(
    client: Any,
    ranges: Sequence[PendingRange],
    view: WindowView,
    edges_ms: Sequence[int],
    target: str | None,
    progress: Progress,
) -> Counted:
    """Read ranges and count what is pending in them.

    Args:
        client: a ``pulsar.Client``.
        ranges: what is read.
        view: says which messages of the final window are pending.
        edges_ms: the times for which counts will be asked.
        target: the full name of a business topic, to leave out what is for others.
        progress: counts what is read.
    """

    def read(item: PendingRange) -> Iterator[tuple[PendingRange, Tally, Counter[str]]]:
        tally = Tally(edges_ms)
        targets: Counter[str] = Counter()
        for due_ms, name in _glances(client, item, view, progress):
            if target is not None and name != target:
                continue
            if due_ms is None:
                tally.damaged += 1
            else:
                tally.add(due_ms)
                targets[name] += 1
        yield item, tally, targets

    counted = Counted()
    with closing(side_by_side(ranges, read)) as found:
        for item, tally, targets in found:
            counted.tallies.append((item, tally))
            counted.targets.update(targets)
    return counted


def _glances(
    client: Any, item: PendingRange, view: WindowView, progress: Progress
) -> Iterator[tuple[int | None, str]]:
    """Yield due time and target of every pending message of a range."""
    in_window = item.source.role is Role.WINDOW
    own = item.source.name.without_partition.full
    chunk: list[tuple[Place, int | None, str]] = []

    def judged() -> Iterator[tuple[int | None, str]]:
        progress.add(len(chunk))
        pending = [True] * len(chunk)
        if in_window and chunk:
            pending = view.waiting(
                item.source, [place for place, _, _ in chunk], [due for _, due, _ in chunk]
            )
        for (_, due_ms, name), wanted in zip(chunk, pending, strict=True):
            if wanted:
                yield due_ms, name
        chunk.clear()

    with closing(messages_in_range(client, item.source.topic, item.start, item.end)) as messages:
        for message, ledger, entry, batch in messages:
            properties = message.properties()
            name = properties.get(TARGET) or own
            chunk.append(((ledger, entry, batch), due_of(properties), name))
            if len(chunk) >= _CHUNK:
                yield from judged()
    yield from judged()
