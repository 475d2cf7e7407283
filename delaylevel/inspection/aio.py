"""Queries about pending messages for a running event loop: the same calls, in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from delaylevel.errors import InvalidInputError

from .horizon import Horizon
from .inspector import Inspector
from .selection import Selection

if TYPE_CHECKING:
    import pyarrow as pa

    from .query import Average, HistogramBar
    from .rows import PendingRow

T = TypeVar("T")


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

    async def horizon(self, **options: Any) -> Horizon:
        """Return the numbers of messages by time until due."""
        return await self._call(self._inspector.horizon, **options)

    async def rows(self, selection: Selection | None = None, **options: Any) -> list[PendingRow]:
        """Return pending messages in due order; give a ``limit`` where there may be many."""
        return await self._call(lambda: list(self._inspector.rows(selection, **options)))

    async def table(self, selection: Selection | None = None, **options: Any) -> pa.Table:
        """Return pending messages in due order as an Arrow table."""
        return await self._call(self._inspector.table, selection, **options)

    async def histogram(
        self, by: str, selection: Selection | None = None, **options: Any
    ) -> Sequence[HistogramBar]:
        """Return the numbers of messages by an attribute."""
        return await self._call(self._inspector.histogram, by, selection, **options)

    async def average(
        self, attribute: str, selection: Selection | None = None, **options: Any
    ) -> Average:
        """Return the mean of a numeric attribute."""
        return await self._call(self._inspector.average, attribute, selection, **options)

    async def find(self, message_id: str, **options: Any) -> list[PendingRow]:
        """Return the pending message with an ID; an empty list if there is none."""
        return await self._call(self._inspector.find, message_id, **options)

    async def _call(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        return await asyncio.to_thread(partial(function, *arguments, **options))
