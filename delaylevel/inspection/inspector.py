"""The public queries about the pending messages of one level topic, also for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import InvalidInputError
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.topic_name import TopicName
from delaylevel.topics import registry as topics
from delaylevel.topics.outcomes import Outcomes
from delaylevel.topics.scan import DEFAULT_SLACK_MS, PendingRange

from .horizon import Distribution, Horizon, build, by_part, edges, leading_window
from .live import LiveDispatchers
from .sampling import sample
from .selection import CHUNK, Selection, Tell, read_in_parallel, without_cancelled
from .snapshot import PendingSnapshot, observe, own_topic, take_snapshot

if TYPE_CHECKING:
    import pyarrow as pa

    from .query import Average
    from .rows import PendingRow


class Inspector:
    """Inspector of the pending messages of a level topic.

    It acknowledges, moves and locks nothing.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        admin: the cluster.
        topic: a business topic, its level topic, or any member topic.
        target: the only business topic to include; None for all.
        slack_ms: the longest outage or clock difference that a search by due time allows for, in
            ms; see :mod:`delaylevel.topics.scan`.
        clock: the clock; by default that of this machine.
        tell: called in several threads, with the number of messages that were read meanwhile.
        live: True to ask running dispatchers about the window; the result is the same.
        live_token: the token of their live queries; by default ``DELAYLEVEL_LIVE_TOKEN``.

    Attributes:
        admin: the cluster.
        live: the dispatchers to ask; None for none.

    Raises:
        LevelTopicError: there is no such level topic.
        InvalidInputError: the level topic does not serve the target.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        topic: str,
        *,
        target: str | None = None,
        slack_ms: int = DEFAULT_SLACK_MS,
        clock: Clock | None = None,
        tell: Tell | None = None,
        live: bool = True,
        live_token: str | None = None,
    ) -> None:
        self.description: LevelTopicDescription = topics.describe(admin, topic, search=True)
        self.target = None if target is None else TopicName.parse(target).full
        if self.target is not None and self.target not in self.description.targets:
            raise InvalidInputError(
                f"{self.description.topic} carries no messages for {self.target}; it carries them "
                f"for {', '.join(self.description.targets)}"
            )
        self._client = client
        self.admin = admin
        self._clock = clock or SystemClock()
        self._tell = tell or (lambda _: None)
        self._snapshot = partial(
            take_snapshot, client, admin, self.description, target=self.target, slack_ms=slack_ms
        )
        # With the broker's own window, no process of ours knows what waits there.
        ask = live and self.description.final_window is FinalWindow.TRACKER
        self.live = LiveDispatchers(admin, self.description, live_token) if ask else None
        self._close: Callable[[], None] = lambda: None

    @classmethod
    def connect(cls, connection: Connection, topic: str, **options: Any) -> Inspector:
        """Return an inspector with its own connections; close it, or use it in a ``with``.

        Args:
            connection: the cluster's addresses and credentials.
            topic: as for the class.
            options: ``target``, ``slack_ms`` and so on, as for the class; and
                ``client_options``, a dict of further arguments of ``pulsar.Client``.
        """
        from delaylevel.cluster.rest.admin import Admin

        client_options = options.pop("client_options", {})
        # Both are closed if there is no such level topic.
        with ExitStack() as stack:
            admin = stack.enter_context(Admin.from_connection(connection))
            client = connection.open_client(**client_options)
            stack.callback(client.close)
            made = cls(client, admin, topic, **options)
            made._close = stack.pop_all().close
        return made

    def close(self) -> None:
        """Close the connections of :meth:`connect`."""
        self._close()

    def __enter__(self) -> Inspector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- numbers of messages ----------------------------------------------------------------

    def horizon(self, *, exact: bool = False) -> Horizon:
        """Return the numbers of messages due in the next minute, hour, day and week, and in total.

        By default, it is an estimate from some entries of each partition, unless few messages are
        pending.

        Args:
            exact: True to read every message instead.
        """
        now_ms = self._clock.now_ms()
        snapshot = self._snapshot(now_ms)
        sampled = None if exact else sample(snapshot)
        found: Iterable[tuple[PendingRange, Distribution]]
        if sampled is None:
            found = self._count(snapshot, edges(now_ms))
        else:
            found = zip(snapshot.ranges, sampled, strict=True)
        parts, counted = by_part(self.description, found), sampled is None
        return build(self.description.topic, now_ms, parts, exact=counted, target=self.target)

    def _count(
        self, snapshot: PendingSnapshot, edges_ms: Sequence[int]
    ) -> Generator[tuple[PendingRange, Distribution], None, None]:
        """Count the messages of each range, and yield ranges in any order."""
        complete = without_cancelled(snapshot, self._tell)

        def read(item: PendingRange) -> Iterator[tuple[PendingRange, Distribution]]:
            counted = Distribution(own_topic(item.source))
            with closing(complete.read(item)) as messages:
                while found := list(map(observe, islice(messages, CHUNK))):
                    self._tell(len(found))
                    counted.looked_at += len(found)
                    counted.count(complete.select(item.source, found), edges_ms)
            yield item, counted

        return read_in_parallel(snapshot.ranges, read)

    def outcomes(self) -> Outcomes:
        """Return the outcomes topic.

        Raises:
            LevelTopicError: messages of the level topic cannot be cancelled.
        """
        return Outcomes(self._client, self.admin, self.description)

    # --- messages ---------------------------------------------------------------------------

    def rows(
        self, selection: Selection | None = None, *, limit: int | None = None, value: bool = False
    ) -> Iterator[PendingRow]:
        """Yield pending messages in due order; those with equal due times in publish order.

        Args:
            selection: the conditions; by default all messages.
            limit: the largest number of rows; by default all are sorted, on disk if necessary.
            value: True to include payloads.

        Raises:
            InvalidInputError: the SQL condition is not valid.
            MissingExtraError: an extra is not installed.
        """
        from .rows import row_columns, rows_of

        yield from rows_of(self._ordered(selection, row_columns(value), limit))

    def table(
        self,
        selection: Selection | None = None,
        *,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> pa.Table:
        """Return pending messages in due order as an Arrow table.

        Args:
            selection, limit: as for :meth:`rows`.
            columns: names of columns of :data:`delaylevel.inspection.rows.SCHEMA`; by default all
                but ``value``.
        """
        import pyarrow as pa

        from .rows import SCHEMA, row_columns

        names = list(columns or row_columns(value=False))
        # A wrong column is reported before the schema needs it.
        batches = list(self._ordered(selection, names, limit))
        schema = pa.schema([SCHEMA.field(name) for name in names])
        return pa.Table.from_batches(batches, schema=schema)

    def _ordered(
        self, selection: Selection | None, names: list[str], limit: int | None
    ) -> Iterator[pa.RecordBatch]:
        """Yield pending messages in due order as record batches; see :meth:`rows`."""
        from .query import ordered

        chosen = selection or Selection()
        if limit and chosen == Selection(chosen.due):
            # The first rows of many messages are read from the range that the estimate selects,
            # and from the whole range only if that had too few.
            sampled = sample(self._snapshot(self._clock.now_ms()))
            window = None if sampled is None else leading_window(sampled, chosen.due, limit)
            if window is not None:
                first = list(ordered(self._read, Selection(window), names, limit))
                if sum(map(len, first)) == limit:
                    yield from first
                    return
        yield from ordered(self._read, chosen, names, limit)

    def batches(
        self, selection: Selection | None = None, *, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield pending messages as record batches while they are read, in any order.

        Args:
            selection: the conditions, without ``where``.
            columns: as for :meth:`table`.

        Raises:
            InvalidInputError: the selection has an SQL condition.
        """
        from .rows import row_columns

        chosen = selection or Selection()
        if chosen.where is not None:
            raise InvalidInputError("batches() takes no condition in SQL: use table() or rows()")
        names = set(columns or row_columns(value=False))
        yield from self._read(chosen, names)[1]

    def average(self, attribute: str, selection: Selection | None = None) -> Average:
        """Return the mean of a numeric attribute.

        Args:
            attribute: ``size``, ``delay`` (ms from publishing until due), or the name of a
                property; messages for which it is no number are counted separately.
            selection: as for :meth:`rows`.
        """
        from .query import average

        # A dispatcher does not know cancellations that wait in the levels, so its own average
        # could contain cancelled messages.
        return average(self._read, selection or Selection(), attribute)

    def find(self, message_id: str, *, value: bool = False) -> list[PendingRow]:
        """Return the rows of the pending message with an ID; an empty list if there is none.

        A message that a mover forwards meanwhile may be found twice. Everything is read.

        Args:
            message_id: the stable identity, ``delaylevel.id`` on the business message.
            value: as for :meth:`rows`.
        """
        from .rows import row_columns, rows_of

        found = rows_of(self.batches(Selection(id=message_id), columns=row_columns(value)))
        return sorted(found, key=lambda row: (row.due_ms or 0, row.topic))

    # --- reads ------------------------------------------------------------------------------

    def _read(
        self, selection: Selection, columns: set[str]
    ) -> tuple[pa.Schema, Generator[pa.RecordBatch, None, None]]:
        """Return the schema and a stream of the selected rows; ignore the SQL condition."""
        from .rows import read_rows

        snapshot = self._snapshot(self._clock.now_ms(), due=selection.due, live=self.live)
        complete = without_cancelled(snapshot, self._tell)
        return read_rows(complete, selection, columns, self._tell)


class AsyncInspector:
    """Asyncio twin of :class:`delaylevel.inspection.Inspector`.

    Its public name is ``delaylevel.asyncio.Inspector``; :meth:`open` creates it. Arguments, results
    and errors are those of the synchronous one, but for :meth:`rows`, which returns a list.
    """

    def __init__(self, inspector: Inspector) -> None:
        self._inspector = inspector

    @classmethod
    async def open(cls, client: Any, topic: str, **options: Any) -> AsyncInspector:
        """Return an inspector of a level topic; it needs no close.

        Args:
            client: a ``delaylevel.asyncio.DelayLevelClient`` with admin access.
            topic: a business topic, its level topic, or any member topic.
            options: ``target``, ``slack_ms`` and so on, as for the synchronous one; ``admin``, if
                the client has none.
        """
        admin = options.pop("admin", None) or client.admin
        if admin is None:
            raise InvalidInputError("the client has no admin access: create it with admin_url=…")
        make = partial(Inspector, client.synchronous(), admin, topic, **options)
        return cls(await asyncio.to_thread(make))

    async def horizon(self, *, exact: bool = False) -> Horizon:
        """Return the numbers of messages by time until due."""
        return await asyncio.to_thread(self._inspector.horizon, exact=exact)

    async def rows(self, selection: Selection | None = None, **options: Any) -> list[PendingRow]:
        """Return pending messages in due order; give a ``limit`` where there may be many."""
        return await asyncio.to_thread(lambda: list(self._inspector.rows(selection, **options)))

    async def table(self, selection: Selection | None = None, **options: Any) -> pa.Table:
        """Return pending messages in due order as an Arrow table."""
        return await asyncio.to_thread(self._inspector.table, selection, **options)

    async def average(self, attribute: str, selection: Selection | None = None) -> Average:
        """Return the mean of a numeric attribute."""
        return await asyncio.to_thread(self._inspector.average, attribute, selection)

    async def find(self, message_id: str, *, value: bool = False) -> list[PendingRow]:
        """Return the pending message with an ID; an empty list if there is none."""
        return await asyncio.to_thread(self._inspector.find, message_id, value=value)
