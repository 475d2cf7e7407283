"""Scheduling, cancelling and rescheduling of messages: a part of the asyncio producer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from delaylevel.errors import InvalidInputError
from delaylevel.model.cancellation import PAYLOAD
from delaylevel.model.envelope import check_id
from delaylevel.model.outcome import Outcome, Receipt, Rescheduled

from .async_calls import in_thread
from .async_partition import AsyncPartition
from .asyncio_checks import asyncio_errors
from .base import BaseProducer
from .outcome_watch import Wait
from .receipts import (
    accepted,
    check_read_back,
    check_scheduled,
    explained,
    new_id,
    replacement_id,
    seconds_of,
    too_late,
)
from .routing import Route, envelope_options


class AsyncScheduling(BaseProducer):
    """The calls of the asyncio producer that concern messages by receipt.

    Arguments, results and errors are those of :class:`delaylevel.DelayLevelProducer`.
    """

    async def schedule(
        self,
        content: Any,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        event_timestamp: int | None = None,
        deliver_at: int | datetime | None = None,
        deliver_after: timedelta | None = None,
        *,
        message_id: str | None = None,
        expires_at: int | datetime | None = None,
        expires_after: timedelta | None = None,
        spread: timedelta | None = None,
    ) -> Receipt:
        """Publish a delayed message, and return its receipt once it is stored.

        See :meth:`delaylevel.DelayLevelProducer.schedule`.
        """
        check_scheduled(deliver_at, deliver_after)
        own_id = new_id() if message_id is None else check_id(message_id)
        kept = (partition_key, ordering_key, event_timestamp)
        expiry = envelope_options(expires_at, expires_after, spread)
        return await self._store(
            content, properties, deliver_at, deliver_after, own_id, kept, expiry
        )

    async def cancel(
        self,
        receipt: Receipt | str | None = None,
        *,
        message_id: str | None = None,
        deliver_at: int | datetime | None = None,
        partition_key: str | None = None,
        timeout: timedelta | float | None = None,
    ) -> Outcome:
        """Cancel a scheduled message; see :meth:`delaylevel.DelayLevelProducer.cancel`."""
        wanted = self._wanted(receipt, message_id, deliver_at, partition_key)
        timeout_s = seconds_of(timeout)
        self._enter_loop()
        self._check_open()
        with asyncio_errors():
            self._check_cancellable()
            if wanted.sent_directly:
                return too_late(wanted)
            if not timeout_s:
                return await self._cancel(wanted, self._cancellation(wanted))
            async with self._expecting(wanted, timeout_s) as wait:
                return await self._cancel(wanted, self._cancellation(wanted), wait, timeout_s)

    async def reschedule(
        self,
        receipt: Receipt | str,
        content: Any = None,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        event_timestamp: int | None = None,
        deliver_at: int | datetime | None = None,
        deliver_after: timedelta | None = None,
        *,
        message_id: str | None = None,
        expires_at: int | datetime | None = None,
        expires_after: timedelta | None = None,
        timeout: timedelta | float | None = None,
    ) -> Rescheduled:
        """Replace a scheduled message; see :meth:`delaylevel.DelayLevelProducer.reschedule`."""
        wanted = self._wanted(receipt)
        timeout_s = seconds_of(timeout)
        own_id = replacement_id(wanted, message_id, partition_key)
        self._enter_loop()
        self._check_open()
        due_ms = self._due_again(deliver_at, deliver_after)
        expires_ms = self._expiry_again(expires_at, expires_after, due_ms)
        given = content is not None
        if not given:
            check_read_back(wanted, properties, partition_key, ordering_key, event_timestamp)
        with asyncio_errors():
            self._check_cancellable()
            route = self._cancellation(wanted)
            async with self._expecting(wanted, timeout_s) as wait:
                if given:
                    key = (wanted.key or None) if partition_key is None else partition_key
                    kept = (key, ordering_key, event_timestamp)
                    envelope = {"replaces": wanted.id, "expires_at": expires_ms or None}
                    new = await self._store(
                        content, properties, due_ms, None, own_id, kept, envelope
                    )
                else:
                    new = await self._store_again(wanted, due_ms, own_id, expires_ms)
                if wanted.sent_directly:
                    return Rescheduled(new, too_late(wanted))
                return Rescheduled(new, await self._cancel(wanted, route, wait, timeout_s, new))

    async def fire_now(
        self,
        receipt: Receipt | str,
        content: Any = None,
        *,
        timeout: timedelta | float | None = None,
    ) -> Rescheduled:
        """Deliver a scheduled message now; see :meth:`delaylevel.DelayLevelProducer.fire_now`."""
        now_ms = self._clock.now_ms()
        return await self.reschedule(receipt, content, deliver_at=now_ms, timeout=timeout)

    async def outcome(self, receipt: Receipt | str) -> Outcome | None:
        """Return the decision about a cancelled message; None if there is none (any more).

        See :meth:`delaylevel.DelayLevelProducer.outcome`.
        """
        wanted = self._wanted(receipt)
        self._enter_loop()
        self._check_open()
        with asyncio_errors():
            return await in_thread(partial(self._stored_outcome, wanted))

    async def _store(
        self,
        content: Any,
        properties: dict[str, str] | None,
        deliver_at: int | datetime | None,
        deliver_after: timedelta | None,
        message_id: str,
        kept: tuple[str | None, str | None, int | None],
        envelope: dict[str, Any] | None = None,
    ) -> Receipt:
        """Send a message, and return its receipt once it is stored."""
        sent = await self._send(
            content, properties, deliver_at, deliver_after, message_id, kept, {}, envelope
        )
        route, due_ms, stored = sent
        return self._receipt(message_id, due_ms, kept[0], route, stored)

    async def _store_again(
        self, old: Receipt, due_ms: int, message_id: str, expires_ms: int
    ) -> Receipt:
        """Send a parked message with another due time, and return its receipt."""
        message, envelope = await in_thread(partial(self._read_back, old))
        if message.value is None:
            raise InvalidInputError(
                f"message {old.id!r} has a null value, which pulsar.asyncio cannot send: use "
                "delaylevel.DelayLevelClient, or give the payload; nothing was sent"
            )
        route, arguments = self._parked_again(message, envelope, due_ms, message_id, expires_ms)
        stored = await self._partition(route).send(message.value, **arguments)
        return self._receipt(message_id, due_ms, message.key, route, stored)

    @asynccontextmanager
    async def _expecting(self, wanted: Receipt, timeout_s: float) -> AsyncIterator[Wait | None]:
        """Expect the outcome of a cancellation that is sent in the block; None not to wait."""
        if not timeout_s:
            yield None
            return
        wait = Wait(self._outcomes(), wanted)
        try:
            await in_thread(wait.begin)
            yield wait
        finally:
            wait.forget()

    async def _cancel(
        self,
        wanted: Receipt,
        route: Route,
        wait: Wait | None = None,
        timeout_s: float = 0.0,
        new: Receipt | None = None,
    ) -> Outcome:
        """Send a cancellation, and wait for its outcome."""
        with explained(wanted, new):
            arguments = self._arguments(route, wanted.key or None)
            await self._partition(route).send(PAYLOAD, **arguments)
        if wait is None:
            return accepted(wanted)
        ended, _ = await asyncio.wait([asyncio.wrap_future(wait.future)], timeout=timeout_s)
        outcome = next(iter(ended)).result() if ended else None
        return outcome or accepted(wanted, wait.reason)

    # -- of the producer

    async def _send(
        self,
        content: Any,
        properties: dict[str, str] | None,
        deliver_at: int | datetime | None,
        deliver_after: timedelta | None,
        message_id: str | None,
        kept: tuple[str | None, str | None, int | None],
        options: dict[str, Any],
        envelope: dict[str, Any] | None = None,
    ) -> tuple[Route, int, Any]:
        raise NotImplementedError

    def _partition(self, route: Route) -> AsyncPartition:
        raise NotImplementedError

    def _enter_loop(self) -> None:
        raise NotImplementedError

    def _check_open(self) -> None:
        raise NotImplementedError
