"""The listeners of an application."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from delaylevel.errors import InvalidInputError
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.formatting import parse_delay

from .listener import Listener, listeners_of, name_of

Handler = TypeVar("Handler", bound=Callable[[Any], Any])

#: Configured options of a listener by its name. Arguments override them.
Defaults = Callable[[str], Mapping[str, Any]]


class Listeners:
    """Handlers for the messages of topics, and the threads that call them.

    Args:
        client: a :class:`delaylevel.DelayLevelClient`. It stays the application's own.
        defaults: function that returns the configured options for the name of a listener.
        stop_timeout: time for running handlers to finish when the application stops.
        clock: source of the time of receipt; the client's by default.
    """

    def __init__(
        self,
        client: Any,
        *,
        defaults: Defaults | None = None,
        stop_timeout: timedelta | str = timedelta(seconds=30),
        clock: Clock | None = None,
    ) -> None:
        self.client = client
        self._defaults = defaults
        self._stop_timeout = parse_delay(stop_timeout, "stop_timeout")
        self.clock: Clock = clock or getattr(client, "_delaylevel_clock", None) or SystemClock()
        self._listeners: list[Listener] = []

    @property
    def listeners(self) -> tuple[Listener, ...]:
        """The registered listeners, one for each topic."""
        return tuple(self._listeners)

    def on(
        self,
        topic: str | list[str],
        *,
        subscription: str | None = None,
        subscription_type: Any = None,
        schema: Any = None,
        retry: Any = None,
        deduplicate: Any = None,
        filter: Any = None,  # noqa: A002 (the word that users know)
        concurrency: int | None = None,
        batch: int | None = None,
        name: str | None = None,
        **consumer_options: Any,
    ) -> Callable[[Handler], Handler]:
        """Register a function or coroutine function as the handler of a topic.

        Args:
            topic: name of the topic, or a list of names. Each topic has its own consumers, retry
                topic and dead-letter topic.
            subscription: name of the subscription.
            subscription_type: ``Shared`` (the default), ``Key_Shared``, ``Failover`` or
                ``Exclusive``.
            schema: schema of the Pulsar client; bytes by default.
            retry: delays between attempts: a :class:`Backoff`, a list such as
                ``["10s", "5m"]``, or False if the first failure is final. The default is
                10 seconds, 1 minute, 10 minutes and 1 hour.
            deduplicate: True, or a ``Deduplication``, to handle no message twice.
            filter: function of the message that returns False if it is not to be handled. Such a
                message is acknowledged.
            concurrency: number of calls of the handler at the same time. The default is 1, and 100
                for coroutines of a Shared or Key_Shared subscription.
            batch: largest number of messages of a call. With more than 1, the handler gets a list.
            name: name in logs, metrics and configuration; that of the function by default.
            consumer_options: other arguments of ``pulsar.Client.subscribe``, such as
                ``initial_position="earliest"`` or ``receiver_queue_size``.

        Returns:
            A decorator that returns the function itself.

        Raises:
            InvalidInputError: an option or the signature of the handler is wrong, or the topic and
                subscription have a handler already.
        """
        given = {
            "subscription": subscription,
            "subscription_type": subscription_type,
            "schema": schema,
            "retry": retry,
            "deduplicate": deduplicate,
            "filter": filter,
            "concurrency": concurrency,
            "batch": batch,
            **consumer_options,
        }

        def register(handler: Handler) -> Handler:
            self._register(handler, topic, name, given)
            return handler

        return register

    def _register(
        self, handler: Any, topic: str | list[str], name: str | None, given: dict[str, Any]
    ) -> None:
        configured: Mapping[str, Any] = {}
        if self._defaults is not None:
            configured = self._defaults(name_of(handler) if name is None else name)
        stated = {key: value for key, value in given.items() if value is not None}
        new = listeners_of(handler, topic, name, {**configured, **stated})
        for listener in new:
            for known in self._listeners:
                if (known.topic, known.subscription) == (listener.topic, listener.subscription):
                    raise InvalidInputError(
                        f"listener {listener.name!r}: {known.name!r} handles topic "
                        f"{listener.topic} with subscription {listener.subscription!r} already: "
                        "choose another subscription"
                    )
        self._listeners += new
