"""State that the synchronous and the asyncio producer have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from pulsar.schema import BytesSchema

from delaylevel.cluster.client_parts.sending import has_core, schema_of
from delaylevel.cluster.compression import compression_name
from delaylevel.cluster.schemas import reference_to
from delaylevel.model.due_time import due_time_ms, expiry_ms
from delaylevel.model.envelope import DUE, Envelope, application_properties
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import ParkedMessage
from delaylevel.model.outcome import Outcome, Receipt

from .at_exit import at_exit
from .level_topic_cache import LevelTopicCache
from .options import window_producer_settings
from .outcome_watch import OutcomeWatch, stored_outcome
from .read_back import read_back
from .receipts import check_cancellable, check_scheduled, receipt_for, wanted_message
from .routing import BUSINESS, WINDOW, Route, Routing, check_not_expired
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
        self._schema = setup.schema if setup.schema is not None else schema_of(business)
        routing = Routing(
            setup.description,
            setup.target,
            setup.reference or reference_to(self._schema),
            setup.clock,
            compression_name(setup.level_settings.get("compression_type")),
            max_message_size=setup.max_message_size,
        )
        self._cache = LevelTopicCache(routing, setup.describe)
        self._target = setup.target
        self._clock = setup.clock
        self._admin = setup.admin
        self._reading = setup.reading
        self._watch: OutcomeWatch | None = None
        self._watch_lock = threading.Lock()
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

    def _wanted(
        self,
        receipt: Receipt | str | None,
        message_id: str | None = None,
        deliver_at: int | datetime | None = None,
        partition_key: str | None = None,
    ) -> Receipt:
        """Return the receipt of the message that a call names."""
        return wanted_message(
            receipt,
            message_id,
            deliver_at,
            partition_key,
            self._target,
            self.description.topic,
        )

    def _receipt(
        self, message_id: str, due_ms: int, key: str | None, route: Route, stored: Any
    ) -> Receipt:
        """Return the receipt of a message that was stored.

        Args:
            message_id, due_ms, key: ID, due time (ms since the epoch) and key of the message.
            route: its route.
            stored: the ID that the client returned.
        """
        topic = self._cache.routing.topic_of(route) if route.parked else None
        return receipt_for(
            message_id, due_ms, self._target, self.description.topic, key, topic, stored
        )

    def _arguments(
        self,
        route: Route,
        partition_key: str | None,
        ordering_key: str | None = None,
        event_timestamp: int | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of ``send`` for a routed message, without its payload."""
        return {
            "properties": route.properties,
            "partition_key": partition_key,
            "ordering_key": ordering_key,
            "event_timestamp": event_timestamp,
            "deliver_at": route.deliver_at_ms,
        }

    def _due_of(self, route: Route) -> int:
        """Return the due time of a routed message, ms since the epoch; now without a delay."""
        due = (route.properties or {}).get(DUE)
        return self._clock.now_ms() if due is None else int(due)

    def _due_again(self, deliver_at: int | datetime | None, deliver_after: timedelta | None) -> int:
        """Return the new due time of a message, ms since the epoch; now for no delay."""
        check_scheduled(deliver_at, deliver_after)
        now_ms = self._clock.now_ms()
        due_ms = due_time_ms(deliver_at, deliver_after, now_ms)
        return now_ms if due_ms is None else due_ms

    def _expiry_again(
        self, expires_at: int | datetime | None, expires_after: timedelta | None, due_ms: int
    ) -> int:
        """Return the expiry that is given for a new message, ms since the epoch; 0 for none."""
        expires_ms = expiry_ms(expires_at, expires_after, due_ms)
        check_not_expired(expires_ms, self._clock.now_ms())
        return expires_ms

    def _parked_again(
        self,
        message: ParkedMessage,
        envelope: Envelope,
        due_ms: int,
        message_id: str,
        expires_ms: int,
    ) -> tuple[Route, dict[str, Any]]:
        """Return the route of a message that was read back, and the arguments of its message.

        Args:
            due_ms: the new due time, ms since the epoch.
            message_id: the new ID.
            expires_ms: the new expiry, ms since the epoch; 0 for none.

        Raises:
            MessageTooLargeError: the message is too large for later hops.
        """
        application = application_properties(message.properties)
        route = self._cache.routed(
            lambda routing: routing.route_again(
                due_ms, envelope, application, message_id, message.key, expires_ms
            )
        )
        size_limit = self._cache.routing.size_limit
        size_limit.check(message.value, route.properties, message.key, message.ordering_key)
        return route, self._arguments(
            route, message.key or None, message.ordering_key or None, message.event_ms or None
        )

    def _check_cancellable(self) -> None:
        """Raise an error if messages cannot be cancelled."""
        check_cancellable(self.description, has_admin=self._admin is not None)

    def _cancellation(self, wanted: Receipt) -> Route:
        """Return the route of a cancellation."""
        return self._cache.routed(lambda routing: routing.route_cancellation(wanted))

    def _outcomes(self) -> OutcomeWatch:
        """Return the shared reader of outcomes."""
        assert self._admin is not None
        with self._watch_lock:
            if self._watch is None:
                self._watch = OutcomeWatch(
                    self._reading,
                    self._admin,
                    self.description.outcomes_topic.partition(0),
                    threaded=has_core(self._reading),
                )
                if self._closed:
                    self._watch.close()
            return self._watch

    def _close_watch(self) -> None:
        """Close the reader of outcomes; call it after the producer counts as closed."""
        with self._watch_lock:
            watch = self._watch
        if watch is not None:
            watch.close()

    def _stored_outcome(self, receipt: Receipt) -> Outcome | None:
        """Return the outcome that the outcomes topic holds; None if it holds none."""
        self._check_cancellable()
        assert self._admin is not None
        partition = self.description.outcomes_topic.partition(0)
        return stored_outcome(self._reading, self._admin, partition, receipt)

    def _read_back(self, receipt: Receipt) -> tuple[ParkedMessage, Envelope]:
        """Return the stored message of a receipt."""
        self._cache.check_exists()  # or a reader would create the topic again
        return read_back(self._reading, receipt)

    def _producers(self) -> list[Any]:
        """Return the business producer and all open level and window producers."""
        raise NotImplementedError

    def _settings_for(self, route: Route) -> dict[str, Any]:
        """Return the arguments for the producer of a level or window partition."""
        window = route.level == WINDOW
        settings = self._window_settings if window else self._settings
        return {"schema": BytesSchema(), **settings}
