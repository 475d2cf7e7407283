"""State that the synchronous and the asyncio producer have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pulsar.schema import BytesSchema

from delaylevel.cluster.compression import compression_name
from delaylevel.cluster.schemas import reference_to
from delaylevel.model.level_topic import LevelTopicDescription

from .at_exit import at_exit
from .level_topic_cache import LevelTopicCache
from .options import window_producer_settings
from .routing import BUSINESS, WINDOW, Route, Routing
from .setup import ProducerSetup


class BaseProducer:
    """State and properties of a producer with a level topic, synchronous or asyncio.

    Args:
        create_producer: the client's method that creates plain producers.
        business: the producer of the business topic; it is closed with this one.
        setup: the level topic and the settings.
    """

    def __init__(
        self, create_producer: Callable[..., Any], business: Any, setup: ProducerSetup
    ) -> None:
        self._create_producer = create_producer
        self._business = business
        self._schema = business._schema
        routing = Routing(
            setup.description,
            setup.target,
            setup.reference or reference_to(self._schema),
            setup.clock,
            compression_name(setup.level_settings.get("compression_type")),
            max_message_size=setup.max_message_size,
        )
        self._cache = LevelTopicCache(routing, setup.describe)
        self._settings = setup.level_settings
        window_settings = setup.window_settings
        self._window_settings = window_settings or window_producer_settings(setup.level_settings)
        self._parked: dict[tuple[int, int], Any] = {}  # with asyncio, futures of producers
        self._closed = False
        # By the route's level; BUSINESS and WINDOW, -1 and -2, are the last two.
        self._sent = [0] * (len(setup.description.levels) + 2)
        at_exit.expect_callbacks()

    @property
    def description(self) -> LevelTopicDescription:
        """The level topic of delayed messages."""
        return self._cache.description

    def sent(self) -> dict[str, int]:
        """Return the number of messages given to the client, by destination.

        The keys are the levels' units (``DAY``), ``window``, and ``straight`` for the business
        topic. The count may be slightly too low if several threads send at the same time.
        """
        counts = {level.name: self._sent[level.index] for level in self.description.levels}
        return {**counts, "window": self._sent[WINDOW], "straight": self._sent[BUSINESS]}

    @property
    def closed(self) -> bool:
        """True once :meth:`close` was called."""
        return self._closed

    def topic(self) -> str:
        """Return the business topic."""
        return str(self._business.topic())

    def producer_name(self) -> str:
        """Return the name of the business topic's producer."""
        return str(self._business.producer_name())

    def last_sequence_id(self) -> int:
        """Return the last sequence ID that was published to the business topic itself."""
        return int(self._business.last_sequence_id())

    def is_connected(self) -> bool:
        """Return True if the business producer and all level producers in use are connected."""
        return all(producer.is_connected() for producer in self._producers())

    def _producers(self) -> list[Any]:
        """Return the business producer and all open level and window producers."""
        raise NotImplementedError

    def _settings_for(self, route: Route) -> dict[str, Any]:
        """Return the arguments for the producer of a level or window partition."""
        window = route.level == WINDOW
        settings = self._window_settings if window else self._settings
        return {"schema": BytesSchema(), **settings}
