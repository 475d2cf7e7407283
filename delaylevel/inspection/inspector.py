"""What is pending for one level topic, asked in Python: one object, one method a question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from delaylevel.cluster.connection import Connection
from delaylevel.errors import InvalidInputError
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.position import Position
from delaylevel.model.source_partition import SourcePartition
from delaylevel.model.topic_name import TopicName
from delaylevel.topics import registry as topics
from delaylevel.topics.scan import ALWAYS, DEFAULT_SLACK_MS, PendingRange, Window, pending_ranges

from .counting import count_all
from .flow import Flow, look
from .horizon import Horizon, Part, Pieces, Tally, build, edges
from .parallel import Progress, side_by_side
from .sampling import CountingAdmin, expected, sample
from .selection import Selection
from .window_view import WindowView, window_view

if TYPE_CHECKING:
    import pyarrow as pa

    from .query import Average, HistogramBar, Rows
    from .rows import PendingRow

Tell = Callable[[int], None]
# An estimate reads no more records of each partition's release log, which takes 0.1 s.
_LOG_RECORDS = 4000
# The first rows of so many messages are looked for where the estimate has them, and of all else
# only where that was wrong.
_MANY = 50_000
_MARGIN = 500
_NEARLY_MS = 1000


class Inspector:
    """Looks at what is pending in a level topic; never acknowledges, moves or locks anything.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        admin: the cluster.
        topic: a business topic, its level topic, or another topic of its family.
        target: a business topic, to leave out what is pending for others.
        slack_ms: outages and differences of clocks that searches by due time allow for; see
            :mod:`delaylevel.topics.scan`.
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
        from delaylevel.cluster.admin import Admin

        client_options = options.pop("client_options", {})
        admin = Admin.from_connection(connection)
        client = None
        try:
            client = connection.open_client(**client_options)
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
        parts, targets, by_clock = self._sampled(now_ms)
        estimate = build(
            self.description.topic,
            now_ms,
            list(parts.items()),
            target=self.target,
            targets=targets,
            damaged=sum(pieces.damaged for pieces in parts.values()),
            looked_at=sum(pieces.looked_at for pieces in parts.values()),
            window_by_clock=by_clock,
        )
        if not exact:
            return estimate
        if expect is not None:
            expect(estimate.messages)
        return self._counted(now_ms, estimate.last_due_ms, tell)

    def _sampled(self, now_ms: int) -> tuple[dict[Part, Pieces], Counter[str], bool]:
        """Return the spread of each part, messages by target, and whether the clock was asked."""
        view = self._view(now_ms, _LOG_RECORDS)
        ranges = self._ranges(now_ms, view)
        parts: dict[Part, Pieces] = {part: Pieces() for part in self.parts()}
        targets: Counter[str] = Counter()
        for one in sample(self._client, self._admin, ranges, view, self.target):
            _gather(parts[self.part_of(one.item.source)], one.pieces)
            targets.update(one.targets)
        windows = (item.source for item in ranges if item.source.role is Role.WINDOW)
        return parts, targets, any(not view.known(source) for source in windows)

    # --- what ------------------------------------------------------------------------------

    def rows(
        self,
        selection: Selection | None = None,
        *,
        limit: int | None = None,
        value: bool = False,
        tell: Tell | None = None,
        expect: Tell | None = None,
    ) -> Iterator[PendingRow]:
        """Yield pending messages in due order; equal due times as they were published.

        Args:
            selection: which; all by default.
            limit: the most; without one, all are sorted, on disk where they do not fit.
            value: with their payloads.
            tell: called with numbers of messages as they are read.
            expect: called before, with an estimate of how many that will be; 0 where the broker
                does not know. Once more where more has to be read after all.

        Raises:
            InvalidInputError: the condition cannot be used.
            MissingExtraError: an extra is not installed.
        """
        from .rows import SCHEMA, rows_of

        columns = [name for name in SCHEMA.names if value or name != "value"]
        yield from rows_of(self._ordered(selection, columns, limit, Progress(tell, expect)))

    def table(
        self,
        selection: Selection | None = None,
        *,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
        tell: Tell | None = None,
        expect: Tell | None = None,
    ) -> pa.Table:
        """Return pending messages in due order as an Arrow table.

        Args:
            selection, limit, tell, expect: as for :meth:`rows`.
            columns: of :data:`delaylevel.inspection.rows.SCHEMA`; by default all but ``value``.
        """
        import pyarrow as pa

        from .rows import SCHEMA

        names = list(columns or (name for name in SCHEMA.names if name != "value"))
        batches = list(self._ordered(selection, names, limit, Progress(tell, expect)))
        schema = pa.schema([SCHEMA.field(name) for name in names])
        return pa.Table.from_batches(batches, schema=schema)

    def ordered_batches(
        self,
        selection: Selection | None = None,
        *,
        columns: Sequence[str],
        tell: Tell | None = None,
        expect: Tell | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield pending messages in due order as record batches.

        The sort keeps a bounded amount in memory and the rest in a temporary folder.

        Args:
            selection, tell, expect: as for :meth:`rows`.
            columns: names of columns of :data:`delaylevel.inspection.rows.SCHEMA`.
        """
        yield from self._ordered(selection, list(columns), None, Progress(tell, expect))

    def batches(
        self,
        selection: Selection | None = None,
        *,
        columns: Sequence[str] | None = None,
        tell: Tell | None = None,
        expect: Tell | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield pending messages as record batches while they are read, in no order.

        Args:
            selection: which; without ``where``.
            columns, tell, expect: as for :meth:`table`.

        Raises:
            InvalidInputError: the selection has a condition in SQL.
        """
        from .rows import SCHEMA

        chosen = selection or Selection()
        if chosen.where is not None:
            raise InvalidInputError("batches() takes no condition in SQL: use table() or rows()")
        names = set(columns or (name for name in SCHEMA.names if name != "value"))
        yield from self._stream(chosen, names, Progress(tell, expect))[1]

    def histogram(
        self,
        by: str,
        selection: Selection | None = None,
        *,
        tell: Tell | None = None,
        expect: Tell | None = None,
    ) -> list[HistogramBar]:
        """Return how many messages there are by hour, day, size, key or anything else.

        Args:
            by: ``hour``, ``day`` (both UTC), ``size`` (powers of two), ``key``, ``target``,
                ``place``, or the name of a property.
            selection, tell, expect: as for :meth:`rows`.
        """
        from .query import bucket_sql

        bucket, columns = bucket_sql(by)
        progress = Progress(tell, expect)
        asked = self._asked(selection, columns | {"due_ms", "size"}, progress)
        return asked.histogram(bucket)

    def average(
        self,
        attribute: str,
        selection: Selection | None = None,
        *,
        tell: Tell | None = None,
        expect: Tell | None = None,
    ) -> Average:
        """Return the mean of a number over messages.

        Args:
            attribute: ``size``, ``delay`` (ms from publishing until due), or a property; messages
                without a number there are counted apart.
            selection, tell, expect: as for :meth:`rows`.
        """
        from .query import attribute_sql

        number, columns = attribute_sql(attribute)
        asked = self._asked(selection, columns, Progress(tell, expect))
        return asked.average(attribute, number)

    def find(
        self,
        message_id: str,
        *,
        value: bool = False,
        tell: Tell | None = None,
        expect: Tell | None = None,
    ) -> list[PendingRow]:
        """Return the message with an id, wherever it waits; an empty list where it does not.

        While a mover sends it on it can be seen in two places. An id that is a position is looked
        for there first, which takes one read; otherwise everything is read.

        Args:
            message_id: its stable identity, ``delaylevel.id`` on the business message.
            value, tell, expect: as for :meth:`rows`.
        """
        from .rows import SCHEMA, rows_of

        columns = {name for name in SCHEMA.names if value or name != "value"}
        selection = Selection(id=message_id)
        for only in (message_id, None):
            progress = Progress(tell, expect if only is None else None)
            found = list(rows_of(self._stream(selection, columns, progress, only)[1]))
            if found:
                break
        return sorted(found, key=lambda row: (row.due_ms or 0, row.topic))

    def _ordered(
        self,
        selection: Selection | None,
        columns: list[str],
        limit: int | None,
        progress: Progress,
    ) -> Iterator[pa.RecordBatch]:
        from .rows import ORDER

        chosen, names = selection or Selection(), {*columns, *ORDER}
        if limit and chosen == Selection(chosen.due):
            soon = self._soon(chosen.due, limit)
            if soon is not None:
                asked = self._asked(Selection(soon), names, progress)
                first = list(asked.ordered(columns, limit))
                if sum(map(len, first)) == limit:
                    yield from first
                    return
        yield from self._asked(chosen, names, progress).ordered(columns, limit)

    def _soon(self, due: Window, limit: int) -> Window | None:
        """Return a shorter window that has at least so many messages by the estimate.

        None where little is pending, so that all of it is read as well.
        """
        now_ms = self._clock.now_ms()
        parts = list(self._sampled(now_ms)[0].values())
        last = max((p.last_due_ms for p in parts if p.last_due_ms is not None), default=None)
        if last is None or sum(part.total for part in parts) < _MANY:
            return None
        first = due.from_ms if due.from_ms is not None else 0
        wanted = sum(part.before(first) for part in parts) + limit * 1.5 + _MARGIN
        low, high = first, last if due.before_ms is None else min(last, due.before_ms)
        if sum(part.before(high) for part in parts) < wanted:
            return None
        while high - low > _NEARLY_MS:
            middle = (low + high) // 2
            if sum(part.before(middle) for part in parts) < wanted:
                low = middle
            else:
                high = middle
        return Window(due.from_ms, high)

    def _asked(self, selection: Selection | None, columns: set[str], progress: Progress) -> Rows:
        """Return what answers questions about a selection."""
        from .query import Rows, check_where, needed

        chosen = selection or Selection()
        check_where(chosen.where)
        names = needed(chosen.where, columns)
        return Rows(*self._stream(chosen, names, progress), chosen.where)

    def _stream(
        self,
        selection: Selection,
        columns: set[str],
        progress: Progress,
        position: str | None = None,
    ) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """Return a stream of what is selected, and its schema.

        Args:
            selection, columns: as elsewhere; ``where`` is not looked at.
            progress: told what is read.
            position: an id; look only where it says, if it is a position that is pending.
        """
        from .rows import RowReader

        now_ms = self._clock.now_ms()
        view = self._view(now_ms)
        ranges = self._ranges(now_ms, view, selection.due)
        if position is not None:
            ranges = _at_position(ranges, position)
        if progress.expect is not None:
            progress.expect(expected(self._admin, ranges))
        reader = RowReader(
            self._client,
            self.description,
            view,
            selection,
            columns,
            target=self.target,
            progress=progress,
        )
        return reader.schema, side_by_side(ranges, reader.batches)

    # --- when, counted ------------------------------------------------------------------------

    def flow(self) -> Flow:
        """Return how every stage of the way stands now; two of them make rates."""
        return look(self._admin, self._client, self.description, self._clock.now_ms())

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
        view = self._view(now_ms)
        progress = Progress(tell)
        counted = count_all(
            self._client,
            self._ranges(now_ms, view),
            view,
            edges(now_ms, last_due_ms),
            self.target,
            progress,
        )
        spreads = []
        for part in self.parts():
            tally = Tally(edges(now_ms, last_due_ms))
            for item, one in counted.tallies:
                if self.part_of(item.source) == part:
                    tally.merge(one)
            spreads.append((part, tally))
        return build(
            self.description.topic,
            now_ms,
            spreads,
            target=self.target,
            targets=counted.targets,
            last_due_ms=last_due_ms,
            damaged=sum(tally.damaged for _, tally in spreads),
            looked_at=progress.messages,
        )

    # --- what they share ---------------------------------------------------------------------

    def _view(self, now_ms: int, most_log_records: int | None = None) -> WindowView:
        return window_view(
            self._client,
            self._admin,
            self.description,
            now_ms,
            targets=None if self.target is None else (self.target,),
            most_log_records=most_log_records,
        )

    def _ranges(self, now_ms: int, view: WindowView, due: Window = ALWAYS) -> list[PendingRange]:
        """Return where everything stands: levels before the window, as messages travel.

        What a mover sends on meanwhile is then in one of the ranges, or in both.
        """
        found = pending_ranges(
            self._admin, [self.description], now_ms, due=due, slack_ms=self._slack_ms
        )
        return [*found, *view.ranges(due)]


def _at_position(ranges: list[PendingRange], id_: str) -> list[PendingRange]:
    """Return the one message that an id names, if it is a position in one of the ranges."""
    topic, separator, rest = id_.partition(":")
    try:
        at = Position.parse(rest)
    except InvalidInputError:
        return []
    return [
        replace(item, start=at, end=at.next)
        for item in ranges
        if separator
        and item.source.topic == f"persistent://{topic}"
        and item.start <= at < item.end
    ]


def _gather(into: Pieces, one: Pieces) -> None:
    into.pieces += one.pieces
    into.exact = into.exact and one.exact
    into.damaged += one.damaged
    into.looked_at += one.looked_at
