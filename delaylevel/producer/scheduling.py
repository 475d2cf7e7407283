"""Scheduling, cancelling and rescheduling of messages: a part of the synchronous producer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import pulsar

from delaylevel.model.cancellation import PAYLOAD
from delaylevel.model.envelope import check_id
from delaylevel.model.outcome import Outcome, Receipt, Rescheduled

from .base import BaseProducer
from .calls import interruptible
from .client_errors import client_errors
from .outcome_watch import Wait
from .partition import PartitionProducer
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


class Scheduling(BaseProducer):
    """The calls of :class:`~delaylevel.DelayLevelProducer` that concern messages by receipt."""

    def schedule(
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
        """Publish a delayed message, wait until it is stored, and return its receipt.

        The receipt is what :meth:`cancel`, :meth:`reschedule` and :meth:`fire_now` need. Its text,
        ``str(receipt)``, is safe to store.

        Args:
            content, properties, partition_key, ordering_key, event_timestamp, deliver_at,
                deliver_after: as for :meth:`~delaylevel.DelayLevelProducer.send`.
            message_id: ID given by the application, as for
                :meth:`~delaylevel.DelayLevelProducer.send`; a random one by default.
            expires_at, expires_after, spread: as for
                :meth:`~delaylevel.DelayLevelProducer.send`. The receipt has the final due time.

        Raises:
            InvalidDelayError: neither a due time nor a delay is given. A due time in the past is
                valid: the message goes straight to its business topic.
            As :meth:`~delaylevel.DelayLevelProducer.send`.
        """
        check_scheduled(deliver_at, deliver_after)
        own_id = new_id() if message_id is None else check_id(message_id)
        kept = (partition_key, ordering_key, event_timestamp)
        expiry = envelope_options(expires_at, expires_after, spread)
        return self._store(content, properties, deliver_at, deliver_after, own_id, kept, expiry)

    def cancel(
        self,
        receipt: Receipt | str | None = None,
        *,
        message_id: str | None = None,
        deliver_at: int | datetime | None = None,
        partition_key: str | None = None,
        timeout: timedelta | float | None = None,
    ) -> Outcome:
        """Cancel a scheduled message.

        The cancellation is a small message that takes the way of the scheduled one, and the
        dispatcher decides. To cancel twice does no harm.

        Args:
            receipt: the receipt that :meth:`schedule` returned, or its text.
            message_id: instead of a receipt: the ID that the application gave.
            deliver_at: with ``message_id``: the due time with which the message was sent.
            partition_key: with ``message_id``: the key with which it was sent.
            timeout: time to wait for the outcome, a timedelta or seconds; None not to wait. In the
                final window, outcomes take milliseconds. Before, they take as long as the message.

        Returns:
            The outcome: ``accepted`` once the broker has stored the cancellation, or the decision
            if it came in time. Its ``reason`` says so if no decision can come, because the outcomes
            topic is missing.

        Raises:
            InvalidInputError: the message is not named well; nothing was sent.
            LevelTopicError: the final window is ``broker``; nothing was sent.
            CancellationFailedError: the broker did not confirm the cancellation. It is also the
                ``pulsar.PulsarException`` of the failure.
            pulsar.PulsarException: the outcomes topic cannot be read; nothing was sent.
        """
        wanted = self._wanted(receipt, message_id, deliver_at, partition_key)
        timeout_s = seconds_of(timeout)
        self._check_open()
        with client_errors():
            self._check_cancellable()
            if wanted.sent_directly:
                return too_late(wanted)
            with self._expecting(wanted, timeout_s) as wait:
                return self._cancel(wanted, self._cancellation(wanted), wait, timeout_s)

    def reschedule(
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
        """Replace a scheduled message by one with another due time, or with other contents.

        The new message is stored first, with an ID of its own; then the old one is cancelled. So at
        least one of them is delivered, whatever happens. The outcome tells if it may be both.

        Args:
            receipt: the receipt of the old message, or its text.
            content: the payload of the new message. Without it, everything but the due time is
                read back from the place that stored the old message, if that still exists.
            properties, ordering_key, event_timestamp: as for
                :meth:`~delaylevel.DelayLevelProducer.send`, with ``content``.
            partition_key: the key of the new message, with ``content``; that of the receipt by
                default.
            deliver_at, deliver_after: the new due time, as for
                :meth:`~delaylevel.DelayLevelProducer.send`.
            message_id: ID of the new message; a random one by default. It must be one that no
                message with this key had before, or the new message is a copy of that one, and is
                dropped with or after it. That of the old message is refused.
            expires_at, expires_after: the expiry of the new message, as for
                :meth:`~delaylevel.DelayLevelProducer.send`. By default, a message that is read back
                expires as long after its due time as before, and one with ``content`` has none.
            timeout: as for :meth:`cancel`.

        Raises:
            InvalidInputError: no content is given, and the old message cannot be read back; or the
                new message would have the identity of the old one.
            CancellationFailedError: the new message is stored, and the broker did not confirm the
                cancellation of the old one. ``error.receipt`` is that of the new message.
            As :meth:`schedule` and :meth:`cancel`; then the new message is not stored, unless the
                broker only did not confirm it, and the old message is not cancelled.
        """
        wanted = self._wanted(receipt)
        timeout_s = seconds_of(timeout)
        own_id = replacement_id(wanted, message_id, partition_key)
        self._check_open()
        due_ms = self._due_again(deliver_at, deliver_after)
        expires_ms = self._expiry_again(expires_at, expires_after, due_ms)
        given = content is not None
        if not given:
            check_read_back(wanted, properties, partition_key, ordering_key, event_timestamp)
        with client_errors():
            self._check_cancellable()
            route = self._cancellation(wanted)
            with self._expecting(wanted, timeout_s) as wait:
                if given:
                    key = (wanted.key or None) if partition_key is None else partition_key
                    kept = (key, ordering_key, event_timestamp)
                    envelope = {"replaces": wanted.id, "expires_at": expires_ms or None}
                    new = self._store(content, properties, due_ms, None, own_id, kept, envelope)
                else:
                    new = self._store_again(wanted, due_ms, own_id, expires_ms)
                if wanted.sent_directly:
                    return Rescheduled(new, too_late(wanted))
                return Rescheduled(new, self._cancel(wanted, route, wait, timeout_s, new))

    def fire_now(
        self,
        receipt: Receipt | str,
        content: Any = None,
        *,
        timeout: timedelta | float | None = None,
    ) -> Rescheduled:
        """Deliver a scheduled message now: :meth:`reschedule` it to the present.

        Args:
            receipt, content, timeout: as for :meth:`reschedule`.
        """
        now_ms = self._clock.now_ms()
        return self.reschedule(receipt, content, deliver_at=now_ms, timeout=timeout)

    def outcome(self, receipt: Receipt | str) -> Outcome | None:
        """Return the decision about a cancelled message; None if there is none (any more).

        The outcomes topic keeps decisions for a day. All of it is read.

        Args:
            receipt: the receipt of the message, or its text.

        Raises:
            LevelTopicError: the outcomes topic does not exist.
            As :meth:`cancel`.
        """
        wanted = self._wanted(receipt)
        self._check_open()
        with client_errors(), interruptible():
            return self._stored_outcome(wanted)

    def _store(
        self,
        content: Any,
        properties: dict[str, str] | None,
        deliver_at: int | datetime | None,
        deliver_after: timedelta | None,
        message_id: str,
        kept: tuple[str | None, str | None, int | None],
        envelope: dict[str, Any] | None = None,
    ) -> Receipt:
        """Send a message, and return its receipt once it is stored.

        Args:
            kept: partition key, ordering key and event time.
            envelope: further arguments of :meth:`Routing.route`.
        """
        route, body, arguments = self._routed(
            content,
            properties,
            deliver_at,
            deliver_after,
            message_id,
            kept,
            (None, None, False),
            envelope,
        )
        due_ms = self._due_of(route)
        if route.parked:
            stored = self._partition(route).send(body, arguments)
        else:
            stored = self._business.send(body, **arguments)
        return self._receipt(message_id, due_ms, kept[0], route, stored)

    def _store_again(self, old: Receipt, due_ms: int, message_id: str, expires_ms: int) -> Receipt:
        """Send a parked message with another due time, and return its receipt."""
        message, envelope = self._read_back(old)
        route, arguments = self._parked_again(message, envelope, due_ms, message_id, expires_ms)
        stored = self._partition(route).send(message.value, arguments)
        return self._receipt(message_id, due_ms, message.key, route, stored)

    @contextmanager
    def _expecting(self, wanted: Receipt, timeout_s: float) -> Iterator[Wait | None]:
        """Expect the outcome of a cancellation that is sent in the block; None not to wait."""
        if not timeout_s:
            yield None
            return
        with interruptible():
            wait = Wait(self._outcomes(), wanted)
            try:
                wait.begin()
                yield wait
            finally:
                wait.forget()

    def _cancel(
        self,
        wanted: Receipt,
        route: Route,
        wait: Wait | None,
        timeout_s: float,
        new: Receipt | None = None,
    ) -> Outcome:
        """Send a cancellation, and wait for its outcome.

        Args:
            new: the receipt of the message that was stored to replace it, or None.
        """
        with explained(wanted, new):
            self._partition(route).send(PAYLOAD, self._arguments(route, wanted.key or None))
        if wait is None:
            return accepted(wanted)
        return wait.result(timeout_s) or accepted(wanted, wait.reason)

    def _check_open(self) -> None:
        if self._closed:
            raise pulsar.AlreadyClosed("the producer is closed; nothing was sent")

    # -- of the producer

    def _routed(
        self,
        content: Any,
        properties: dict[str, str] | None,
        deliver_at: int | datetime | None,
        deliver_after: timedelta | None,
        message_id: str | None,
        kept: tuple[str | None, str | None, int | None],
        not_parkable: tuple[int | None, list[str] | None, bool],
        envelope: dict[str, Any] | None = None,
    ) -> tuple[Route, Any, dict[str, Any]]:
        raise NotImplementedError

    def _partition(self, route: Route) -> PartitionProducer:
        raise NotImplementedError
