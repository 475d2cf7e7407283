"""What is pending for one level topic, asked in Python: one object, one method a question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from delaylevel import topics
from delaylevel.clock import Clock, SystemClock
from delaylevel.config import Connection
from delaylevel.description import LevelTopicDescription, Role
from delaylevel.envelope import TARGET
from delaylevel.errors import InvalidInputError
from delaylevel.pending_ranges import (
    ALWAYS,
    DEFAULT_SLACK_MS,
    PendingRange,
    Window,
    pending_ranges,
)
from delaylevel.reading import SourcePartition, messages_in_range
from delaylevel.topicname import TopicName

from .finalwindow import Place, WindowView, window_view
from .horizon import Horizon, Part, Pieces, Spread, Tally, build, edges
from .sampling import CountingAdmin, due_of, sample
from .streams import Progress, side_by_side

Tell = Callable[[int], None]
_CHUNK = 2000


class Inspector:
    """Looks at what is pending in a level topic; never acknowledges, moves or locks anything.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        admin: the cluster.
        topic: a business topic, its level topic, or another topic of its family.
        target: a business topic, to leave out what is pending for others.
        slack_ms: outages and differences of clocks that searches by due time allow for; see
            :mod:`delaylevel.pending_ranges`.
        clock: says what time it is.

    Raises:
        LevelTopicError: there is no such level topic.
        InvalidInputError: the level topic does not serve the target.
    """

    def __init__(
        self,
        client: Any,
        admin: CountingAdmin,
        topic: str,
        *,
        target: str | None = None,
        slack_ms: int = DEFAULT_SLACK_MS,
        clock: Clock | None = None,
    ) -> None:
        self.description: LevelTopicDescription = topics.describe(admin, topic, search=True)
        self.target = None if target is None else TopicName.parse(target).full
        if self.target is not None and self.target not in self.description.targets:
            raise InvalidInputError(
                f"{self.description.topic} carries no messages for {self.target}; it carries them "
                f"for {', '.join(self.description.targets)}"
            )
        self._client = client
        self._admin = admin
        self._slack_ms = slack_ms
        self._clock = clock or SystemClock()
        self._close: Callable[[], None] = lambda: None

    @classmethod
    def connect(cls, connection: Connection, topic: str, **options: Any) -> Inspector:
        """Return an inspector with connections of its own; close it, or use it in a ``with``.

        Args:
            connection: where the cluster is.
            topic: as for the class.
            options: ``target``, ``slack_ms``, ``clock``, as for the class; and ``client_options``,
                a dict of further arguments of ``pulsar.Client``.
        """
        import pulsar

        from delaylevel.admin import Admin

        client_options = options.pop("client_options", {})
        admin = Admin.from_connection(connection)
        client = None
        try:
            client = pulsar.Client(**{**connection.client_kwargs(), **client_options})
            made = cls(client, admin, topic, **options)
        except BaseException:
            if client is not None:
                client.close()
            admin.close()
            raise

        def close() -> None:
            client.close()
            admin.close()

        made._close = close
        return made

    def close(self) -> None:
        """Close the connections that :meth:`connect` has made."""
        self._close()

    def __enter__(self) -> Inspector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- when ------------------------------------------------------------------------------

    def horizon(
        self,
        *,
        exact: bool = False,
        tell: Tell | None = None,
        expect: Tell | None = None,
    ) -> Horizon:
        """Return how much is due within the next minute, hour, day and week, and in all.

        By default a few places of each partition are looked at: what is small is counted, the
        rest is an estimate.

        Args:
            exact: read every message instead.
            tell: called with numbers of messages as they are read.
            expect: called once, before, with an estimate of how many that will be.
        """
        now_ms = self._clock.now_ms()
        view = self._view(now_ms, by_log=False)
        ranges = self._ranges(now_ms, view)
        sampled = sample(self._client, self._admin, ranges, view, self.target)
        parts: dict[Part, Pieces] = {part: Pieces() for part in self.parts()}
        targets: Counter[str] = Counter()
        for one in sampled:
            _gather(parts[self.part_of(one.item.source)], one.pieces)
            targets.update(one.targets)
        estimate = build(
            self.description.topic,
            now_ms,
            list(parts.items()),
            target=self.target,
            targets=targets,
            damaged=sum(pieces.damaged for pieces in parts.values()),
            looked_at=sum(pieces.looked_at for pieces in parts.values()),
        )
        if not exact:
            return estimate
        if expect is not None:
            expect(estimate.messages)
        return self._counted(now_ms, estimate.last_due_ms, tell)

    def parts(self) -> tuple[Part, ...]:
        """Return where messages can wait: levels coarse to fine, the window, held ones."""
        levels = (Part(level.name, Role.LEVEL, level.index) for level in self.description.levels)
        return (*levels, Part("window", Role.WINDOW), Part("held", Role.HELD))

    def part_of(self, source: SourcePartition) -> Part:
        """Return where a partition belongs."""
        if source.role is Role.LEVEL:
            return Part(self.description.levels[source.level].name, Role.LEVEL, source.level)
        return Part(source.role.value, source.role)

    def _counted(self, now_ms: int, last_due_ms: int | None, tell: Tell | None) -> Horizon:
        view = self._view(now_ms, by_log=True)
        ranges = self._ranges(now_ms, view)
        times = edges(now_ms, last_due_ms)
        progress = Progress(tell)

        def read(item: PendingRange) -> Iterator[tuple[Part, Tally, Counter[str]]]:
            tally: Tally = Tally(times)
            targets: Counter[str] = Counter()
            for due_ms, target in self._glances(item, view, progress):
                if due_ms is None:
                    tally.damaged += 1
                else:
                    tally.add(due_ms)
                    targets[target] += 1
            yield self.part_of(item.source), tally, targets

        tallies: dict[Part, Tally] = {part: Tally(times) for part in self.parts()}
        all_targets: Counter[str] = Counter()
        with closing(side_by_side(ranges, read)) as found:  # type: ignore[type-var]
            for part, tally, targets in found:
                tallies[part].merge(tally)
                all_targets.update(targets)
        spreads: list[tuple[Part, Spread]] = list(tallies.items())
        return build(
            self.description.topic,
            now_ms,
            spreads,
            target=self.target,
            targets=all_targets,
            last_due_ms=last_due_ms,
            damaged=sum(tally.damaged for tally in tallies.values()),
            looked_at=progress.messages,
        )

    def _glances(
        self, item: PendingRange, view: WindowView, progress: Progress
    ) -> Iterator[tuple[int | None, str]]:
        """Yield due time and target of every pending message of a range."""
        in_window = item.source.role is Role.WINDOW
        own = item.source.name.without_partition.full
        chunk: list[tuple[Place, int | None, str]] = []

        def judged() -> Iterator[tuple[int | None, str]]:
            progress.add(len(chunk))
            if in_window:
                pending = view.waiting(
                    item.source, [place for place, _, _ in chunk], [due for _, due, _ in chunk]
                )
            else:
                pending = [True] * len(chunk)
            for (_, due_ms, target), wanted in zip(chunk, pending, strict=True):
                if wanted and (self.target is None or target == self.target):
                    yield due_ms, target
            chunk.clear()

        with closing(
            messages_in_range(self._client, item.source.topic, item.start, item.end)
        ) as messages:
            for message, ledger, entry, batch in messages:
                properties = message.properties()
                target = properties.get(TARGET) or own
                chunk.append(((ledger, entry, batch), due_of(properties), target))
                if len(chunk) >= _CHUNK:
                    yield from judged()
        yield from judged()

    # --- what they share ---------------------------------------------------------------------

    def _view(self, now_ms: int, *, by_log: bool) -> WindowView:
        targets = None if self.target is None else (self.target,)
        return window_view(
            self._client, self._admin, self.description, now_ms, targets=targets, by_log=by_log
        )

    def _ranges(self, now_ms: int, view: WindowView, due: Window = ALWAYS) -> list[PendingRange]:
        """Return where everything stands: levels before the window, as messages travel.

        What a mover sends on meanwhile is then in one of the ranges, or in both.
        """
        found = pending_ranges(
            self._admin, [self.description], now_ms, due=due, slack_ms=self._slack_ms
        )
        return [*found, *view.ranges(due)]


def _gather(into: Pieces, one: Pieces) -> None:
    into.pieces += one.pieces
    into.exact = into.exact and one.exact
    into.damaged += one.damaged
    into.looked_at += one.looked_at
