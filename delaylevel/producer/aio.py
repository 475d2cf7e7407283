"""The asyncio twins of client and producer, based on ``pulsar.asyncio``."""

from __future__ import annotations

import asyncio
import warnings
from datetime import datetime, timedelta
from typing import Any, Literal, overload

import pulsar
import pulsar.asyncio

from delaylevel.errors import DelayLevelError, DelayTooLongError, InvalidInputError
from delaylevel.model.level_topic import FinalWindow, Mover

from .client import BaseClient
from .options import given_options
from .producer import BaseProducer
from .routing import Route
from .setup import StrategyArgument


class AsyncDelayLevelProducer(BaseProducer):
    """Asyncio twin of :class:`delaylevel.DelayLevelProducer`, as ``pulsar.asyncio.Producer``.

    Its public name is ``delaylevel.asyncio.DelayLevelProducer``.
    """

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
        """
        if content is None:
            raise InvalidInputError(
                "pulsar.asyncio cannot send a null value; use delaylevel.DelayLevelClient for "
                "tombstones; the message was not sent"
            )
        options: dict[str, Any] = {
            "sequence_id": sequence_id,
            "replication_clusters": replication_clusters,
            "disable_replication": disable_replication,
        }

        def decide() -> Route:
            return self._cache.routing.route(
                deliver_at, deliver_after, properties, message_id, partition_key, **options
            )

        self._cache.refresh_if_old()
        try:
            route = decide()
        except DelayTooLongError:
            if not await asyncio.to_thread(self._cache.refresh_after_refusal):
                raise
            route = decide()
        producer, body = self._business, content
        if route.parked:
            producer, body = await self._own_producer(route), self._schema.encode(content)
            options = {}
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
        """Flush and close the business producer and every producer of ours."""
        self._closed = True
        # The client's own close fails the messages that it has not sent yet.
        try:
            await self._for_all("flush")
        finally:
            await self._for_all("close")

    def _producers(self) -> list[Any]:
        ready = [f.result() for f in self._parked.values() if f.done() and not f.exception()]
        return [self._business, *ready]

    async def _own_producer(self, route: Route) -> Any:
        key = (route.level, route.partition)
        opening = self._parked.get(key)
        if opening is None:
            opening = self._parked[key] = asyncio.ensure_future(self._open(route))
        try:
            # Shielded: other senders need the producer even if this one is cancelled.
            return await asyncio.shield(opening)
        except (pulsar.asyncio.PulsarException, DelayLevelError):
            self._parked.pop(key, None)
            raise

    async def _open(self, route: Route) -> Any:
        topic = await asyncio.to_thread(self._cache.topic_of, route)
        return await self._create_producer(topic, **self._settings_for(route))

    async def _for_all(self, call: str) -> None:
        outcomes = await asyncio.gather(
            *(getattr(producer, call)() for producer in self._producers()), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome


class AsyncDelayLevelClient(BaseClient, pulsar.asyncio.Client):
    """A ``pulsar.asyncio.Client`` whose producers can have a delay-level topic.

    Its public name is ``delaylevel.asyncio.DelayLevelClient``.

    Args:
        service_url: as for ``pulsar.asyncio.Client``; all of its other arguments are accepted, too.
        admin_url, admin, admin_token, clock: as for :class:`delaylevel.DelayLevelClient`.
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
        **kwargs: Any,
    ) -> Any:
        """Create a producer; arguments and errors are those of the synchronous client."""
        if not enable_delay_level_topic:
            return await super().create_producer(topic, *args, **kwargs)
        options = given_options(pulsar.asyncio.Client.create_producer, topic, args, kwargs)
        setup = await asyncio.to_thread(
            self._prepare,
            topic,
            options,
            level_topic=delay_level_topic,
            strategy=partition_strategy,
            mover=mover,
            final_window=final_window,
            create=create_level_topic,
        )
        if setup.warning:
            warnings.warn(setup.warning, stacklevel=2)
        create_producer = super().create_producer
        return AsyncDelayLevelProducer(
            create_producer, await create_producer(topic, **options), setup
        )
