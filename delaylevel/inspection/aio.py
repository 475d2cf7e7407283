"""Queries about pending messages for a running event loop: the same calls, in threads."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from delaylevel.errors import InvalidInputError

from .horizon import Horizon
from .inspector import Inspector
from .selection import Selection

if TYPE_CHECKING:
    import pyarrow as pa

    from .query import Average
    from .rows import PendingRow


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
                the client has none. ``tell`` and ``expect`` are called in other threads.
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
