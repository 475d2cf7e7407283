"""The asyncio twins of client and producer, based on ``pulsar.asyncio``."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, overload

import pulsar
import pulsar.asyncio

from delaylevel.errors import DelayTooLongError, InvalidInputError
from delaylevel.model.level_topic import FinalWindow, Mover

from .asyncio_checks import (
    ASYNCIO_CREATE_PRODUCER,
    asyncio_errors,
    check_message_arguments,
    check_producer_arguments,
)
from .client import OWN_OPTIONS, BaseClient
from .client_errors import client_errors
from .existing import remember
from .options import given_options
from .producer import BaseProducer
from .routing import Route
from .setup import ProducerSetup, StrategyArgument
from .size_limit import DEFAULT_MAX_MESSAGE_SIZE

if TYPE_CHECKING:
    from typing_extensions import Self


class AsyncDelayLevelProducer(BaseProducer):
    """Asyncio twin of :class:`delaylevel.DelayLevelProducer`, as ``pulsar.asyncio.Producer``.

    Its public name is ``delaylevel.asyncio.DelayLevelProducer``.
    """

    def __init__(
        self, create_producer: Callable[..., Any], business: Any, setup: ProducerSetup
    ) -> None:
        super().__init__(create_producer, business, setup)
        # Messages that are not given to the client yet: they wait for a route or a producer.
        self._entered = 0
        self._left: asyncio.Future[None] | None = None

    async def send(
        self,
        content: Any,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        sequence_id: int | None = None,
        replication_clusters: list[str] | None = None,
        disable_replication: bool | None = None,
        event_timestamp: int | None = None,
        deliver_at: int | datetime | None = None,
        deliver_after: timedelta | None = None,
        *,
        message_id: str | None = None,
    ) -> Any:
        """Publish a message, and return its message ID.

        Arguments and errors are those of :meth:`delaylevel.DelayLevelProducer.send`. Null values
        are refused, because ``pulsar.asyncio`` does not have them.

        Raises:
            pulsar.asyncio.PulsarException: as for ``pulsar.asyncio.Producer.send``; with the result
                ``AlreadyClosed`` once :meth:`close` was called.
        """
        if content is None:
            raise InvalidInputError(
                "pulsar.asyncio cannot send a null value; use delaylevel.DelayLevelClient for "
                "tombstones; the message was not sent"
            )
        if self._closed:
            raise pulsar.asyncio.PulsarException(
                pulsar.Result.AlreadyClosed, "the producer is closed; the message was not sent"
            )
        options: dict[str, Any] = {
            "sequence_id": sequence_id,
            "replication_clusters": replication_clusters,
            "disable_replication": disable_replication,
        }
        with self._entering():
            kept = partition_key, ordering_key, event_timestamp
            await check_message_arguments(self._schema, content, properties, kept, **options)
            route = await self._route(
                deliver_at, deliver_after, properties, message_id, partition_key, **options
            )
            producer, body = self._business, content
            if route.parked:
                body = self._schema.encode(content)
                self._cache.routing.size_limit.check(
                    body, route.properties, partition_key, ordering_key
                )
                producer, options = await self._own_producer(route), {}
        # From here, the message is given to the client in the same step of the event loop: close()
        # continues only after it.
        self._sent[route.level] += 1
        return await producer.send(
            body,
            properties=route.properties,
            partition_key=partition_key,
            ordering_key=ordering_key,
            event_timestamp=event_timestamp,
            deliver_at=route.deliver_at_ms,
            **options,
        )

    async def flush(self) -> None:
        """Wait until everything sent so far is stored, in the business topic and in ours."""
        await self._for_all("flush")

    async def close(self) -> None:
        """Flush and close the business producer and every producer of ours.

        Messages whose ``send`` was called before are stored first, also if a producer for them is
        still being opened. A later ``send`` raises an error.
        """
        self._closed = True
        while self._entered or self._opening():
            # Also openings whose senders were cancelled: their producers must be closed.
            waiting = list(self._opening())
            if self._entered:
                self._left = asyncio.get_running_loop().create_future()
                waiting.append(self._left)
            await asyncio.wait(waiting)
        # The client's own close fails the messages that it has not sent yet.
        try:
            await self._for_all("flush")
        finally:
            await self._for_all("close")

    @contextlib.contextmanager
    def _entering(self) -> Iterator[None]:
        """Count a message until it is given to the client, so that :meth:`close` waits for it."""
        self._entered += 1
        try:
            yield
        finally:
            self._entered -= 1
            if not self._entered and self._left is not None and not self._left.done():
                self._left.set_result(None)

    async def _route(self, *arguments: Any, **options: Any) -> Route:
        self._cache.refresh_if_old()
        try:
            return self._cache.routing.route(*arguments, **options)
        except DelayTooLongError:
            if not await asyncio.to_thread(self._cache.refresh_after_refusal):
                raise
        return self._cache.routing.route(*arguments, **options)

    def _producers(self) -> list[Any]:
        ready = [opened.result() for opened in self._parked.values() if _succeeded(opened)]
        return [self._business, *ready]

    def _opening(self) -> list[Any]:
        return [opened for opened in self._parked.values() if not opened.done()]

    async def _own_producer(self, route: Route) -> Any:
        key = (route.level, route.partition)
        opening = self._parked.get(key)
        if opening is None:
            opening = self._parked[key] = asyncio.ensure_future(self._open(route))
            opening.add_done_callback(functools.partial(self._forget_failed, key))
        # Shielded: other senders need the producer even if this one is cancelled.
        return await asyncio.shield(opening)

    def _forget_failed(self, key: tuple[int, int], opening: Any) -> None:
        """Remove an opening that failed, so that the next message opens the producer again.

        This runs before any of its senders continues, so it cannot remove a later opening.
        """
        if not _succeeded(opening) and self._parked.get(key) is opening:
            del self._parked[key]

    async def _open(self, route: Route) -> Any:
        with client_errors():
            topic = await asyncio.to_thread(self._cache.topic_of, route)
        return await self._create_producer(topic, **self._settings_for(route))

    async def _for_all(self, call: str) -> None:
        outcomes = await asyncio.gather(
            *(getattr(producer, call)() for producer in self._producers()), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome


def _succeeded(opening: Any) -> bool:
    return opening.done() and not opening.cancelled() and opening.exception() is None


class AsyncDelayLevelClient(BaseClient, pulsar.asyncio.Client):
    """A ``pulsar.asyncio.Client`` whose producers can have a delay-level topic.

    Its public name is ``delaylevel.asyncio.DelayLevelClient``.

    Args:
        service_url: as for ``pulsar.asyncio.Client``; all of its other arguments are accepted, too.
        admin_url, admin, admin_token, clock, tls_validate_hostname: as for
            :class:`delaylevel.DelayLevelClient`.
    """

    @overload
    async def create_producer(
        self, topic: str, *args: Any, enable_delay_level_topic: Literal[False] = ..., **kwargs: Any
    ) -> pulsar.asyncio.Producer: ...

    @overload
    async def create_producer(
        self, topic: str, *args: Any, enable_delay_level_topic: Literal[True], **kwargs: Any
    ) -> AsyncDelayLevelProducer: ...

    async def create_producer(
        self,
        topic: str,
        *args: Any,
        enable_delay_level_topic: bool = False,
        delay_level_topic: str | None = None,
        partition_strategy: StrategyArgument = None,
        mover: Mover | str = Mover.SPARK,
        final_window: FinalWindow | str = FinalWindow.TRACKER,
        create_level_topic: bool = True,
        max_message_size: int = DEFAULT_MAX_MESSAGE_SIZE,
        **kwargs: Any,
    ) -> Any:
        """Create a producer; arguments and errors are those of the synchronous client."""
        if not enable_delay_level_topic:
            producer = await super().create_producer(topic, *args, **kwargs)
            return remember(producer, given_options(ASYNCIO_CREATE_PRODUCER, topic, args, kwargs))
        options = given_options(ASYNCIO_CREATE_PRODUCER, topic, args, kwargs, OWN_OPTIONS)
        await check_producer_arguments(topic, options)
        with asyncio_errors():
            setup = await asyncio.to_thread(
                self._prepare,
                topic,
                options,
                level_topic=delay_level_topic,
                strategy=partition_strategy,
                mover=mover,
                final_window=final_window,
                create=create_level_topic,
                max_message_size=max_message_size,
            )
            if setup.warning:
                warnings.warn(setup.warning, stacklevel=2)
            create_producer = super().create_producer
            business = await create_producer(topic, **options)
            try:
                setup = await asyncio.to_thread(setup.created)
                return AsyncDelayLevelProducer(create_producer, business, setup)
            except BaseException:
                with contextlib.suppress(pulsar.asyncio.PulsarException):
                    await business.close()
                raise

    async def close(self) -> None:
        """Close the client with its producers, consumers and admin connections."""
        try:
            await super().close()
        finally:
            self._close_admin()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
