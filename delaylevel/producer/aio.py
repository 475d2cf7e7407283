"""The asyncio twins, beside ``pulsar.asyncio``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal, overload

import pulsar
import pulsar.asyncio
from pulsar.schema import BytesSchema

from delaylevel.cluster.connection import Connection
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.schemas import reference_to
from delaylevel.errors import DelayLevelError, DelayTooLongError, InvalidInputError
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Mover
from delaylevel.model.topic_name import TopicName

from .client import (
    StrategyArgument,
    admin_beside,
    describe_with,
    given_options,
    resolve_description,
    settings_with_warning,
)
from .level_topic_cache import Describe, LevelTopicCache
from .routing import (
    NOT_PARKABLE,
    WINDOW,
    Route,
    Routing,
    check_producer_options,
    counts_by_way,
    window_producer_settings,
)


class DelayLevelProducer:
    """Sends undelayed messages as before, and delayed ones by way of a delay-level topic.

    The asyncio twin of :class:`delaylevel.DelayLevelProducer`, with the calls of
    ``pulsar.asyncio.Producer``.
    """

    def __init__(
        self,
        create_producer: Callable[..., Any],
        business: Any,
        description: LevelTopicDescription,
        target: str,
        level_settings: Mapping[str, Any],
        clock: Clock,
        describe: Describe | None = None,
    ) -> None:
        self._create_producer = create_producer
        self._business = business
        self._schema = business._schema
        routing = Routing(description, target, reference_to(self._schema), clock)
        self._cache = LevelTopicCache(routing, describe)
        self._settings = dict(level_settings)
        self._window_settings = window_producer_settings(level_settings)
        self._parked: dict[tuple[int, int], asyncio.Future[Any]] = {}
        self._closed = False
        self._sent = [0] * (len(description.levels) + 2)

    @property
    def description(self) -> LevelTopicDescription:
        """The level topic that delayed messages go through."""
        return self._cache.description

    def sent(self) -> dict[str, int]:
        """Return how many messages were given to the client so far, by where they went.

        The keys are the levels' units (``DAY``), ``window``, and ``straight`` for the business
        topic.
        """
        return counts_by_way(self._sent, self.description)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def topic(self) -> str:
        """Return the business topic."""
        return str(self._business.topic())

    def producer_name(self) -> str:
        """Return the name of the business topic's producer."""
        return str(self._business.producer_name())

    def last_sequence_id(self) -> int:
        """Return the last sequence id that was published to the business topic itself."""
        return int(self._business.last_sequence_id())

    def is_connected(self) -> bool:
        """Return whether the business producer and every producer of ours in use is connected."""
        return all(producer.is_connected() for producer in self._producers())

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
        """Publish a message; the awaited result is its message id.

        Arguments, results and errors are those of :meth:`delaylevel.DelayLevelProducer.send`.
        ``pulsar.asyncio`` has no null values: ``content=None`` is refused.
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
        decide = partial(
            self._cache.route_cached,
            deliver_at,
            deliver_after,
            properties,
            message_id,
            partition_key,
            **options,
        )
        self._cache.look_sometimes()
        try:
            route = decide()
        except DelayTooLongError:
            if not await asyncio.to_thread(self._cache.look_after_refusal):
                raise
            route = decide()
        producer, body = self._business, content
        if route.parked:
            producer, body = await self._own_producer(route), self._schema.encode(content)
            for name in NOT_PARKABLE:
                del options[name]
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
        # The client's own close fails what it has not sent yet.
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
            # Shielded: one sender that gives up does not take the others' producer with it.
            return await asyncio.shield(opening)
        except (pulsar.asyncio.PulsarException, DelayLevelError):
            self._parked.pop(key, None)
            raise

    async def _open(self, route: Route) -> Any:
        topic = await asyncio.to_thread(self._cache.topic_of, route)
        settings = self._window_settings if route.level == WINDOW else self._settings
        return await self._create_producer(topic, schema=BytesSchema(), **settings)

    async def _for_all(self, call: str) -> None:
        outcomes = await asyncio.gather(
            *(getattr(producer, call)() for producer in self._producers()), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome


class DelayLevelClient(pulsar.asyncio.Client):
    """A ``pulsar.asyncio.Client`` whose producers can have a delay-level topic.

    Args:
        service_url: as for ``pulsar.asyncio.Client``; all of its other arguments are taken too.
        admin_url, admin, admin_token: as for :class:`delaylevel.DelayLevelClient`.
        clock: says what time it is when a message is sent.
    """

    def __init__(
        self,
        service_url: Any,
        *,
        admin_url: str | None = None,
        admin: TopicAdmin | None = None,
        admin_token: str | Callable[[], str] | None = None,
        clock: Clock | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(service_url, **kwargs)
        if admin is None and admin_url is not None:
            admin = admin_beside(kwargs, admin_url, admin_token)
        self._delaylevel_admin = admin
        self._delaylevel_clock = clock or SystemClock()

    @classmethod
    def from_connection(cls, connection: Connection, **kwargs: Any) -> DelayLevelClient:
        """Return a client for configured addresses, token and TLS settings."""
        from delaylevel.cluster.admin import Admin

        settings = {**connection.client_kwargs(), **kwargs}
        return cls(**settings, admin=Admin.from_connection(connection))

    @overload
    async def create_producer(
        self,
        topic: str,
        *args: Any,
        enable_delay_level_topic: Literal[False] = False,
        **kwargs: Any,
    ) -> pulsar.asyncio.Producer: ...

    @overload
    async def create_producer(
        self, topic: str, *args: Any, enable_delay_level_topic: Literal[True], **kwargs: Any
    ) -> DelayLevelProducer: ...

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
        """Create a producer; arguments and errors are those of the synchronous twin's."""
        if not enable_delay_level_topic:
            return await super().create_producer(topic, *args, **kwargs)
        options = given_options(pulsar.asyncio.Client.create_producer, topic, args, kwargs)
        description = await asyncio.to_thread(
            resolve_description,
            self._delaylevel_admin,
            self._partitions_of,
            target=topic,
            level_topic=delay_level_topic,
            strategy=partition_strategy,
            mover=Mover(mover),
            final_window=FinalWindow(final_window),
            create=create_level_topic,
        )
        check_producer_options(options)
        settings = settings_with_warning(options, description)
        business = await super().create_producer(topic, **options)
        return DelayLevelProducer(
            super().create_producer,
            business,
            description,
            TopicName.parse(topic).full,
            settings,
            self._delaylevel_clock,
            describe_with(self._delaylevel_admin, description),
        )

    def _partitions_of(self, topic: str) -> list[str]:
        return list(self._client.get_topic_partitions(topic))
