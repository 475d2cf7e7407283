"""The listeners of an application."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import pulsar
from typing_extensions import Self

from delaylevel.cluster.failures import missing_subscription
from delaylevel.cluster.threads import stop_on_signals
from delaylevel.errors import InvalidInputError, from_extra
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.formatting import parse_delay

from .listener import Listener, ListenerHealth, listener_of, name_of
from .metrics import ListenerCollector
from .retry_publisher import RetryPublisher, Unfinished
from .retry_topics import retry_type
from .workers import LoopListener, LoopThread, RunningListener, ThreadedListener

if TYPE_CHECKING:
    from .config import ApplicationConfig
    from .handled_ids import HandledIds


log = logging.getLogger(__name__)

# Confirmations of the broker take milliseconds.
_CONFIRMED_S = 2.0
# A stopping application looks for a second signal this often.
_GLANCE_S = 0.2

Handler = TypeVar("Handler", bound=Callable[[Any], Any])

Host = Callable[..., RunningListener]


def start_listener(
    app: Listeners, listener: Listener, loop: asyncio.AbstractEventLoop | None
) -> RunningListener:
    """Start a listener."""
    client = app.client
    with ExitStack() as stack:
        publisher = RetryPublisher(client, listener.topic, listener.subscription)
        stack.callback(publisher.close)
        backoff = listener.backoff
        level_topic = publisher.prepare(backoff.longest if backoff is not None else None)
        handled: HandledIds | None = None
        if listener.deduplication is not None:
            with from_extra("window", "deduplication needs"):
                from .handled_ids import open_ids
            topic, subscription = listener.business_topic, listener.subscription
            handled = open_ids(listener.deduplication, client, topic, subscription)
            stack.callback(handled.close)
        # A listener without retries gets the dead letters that are replayed.
        subscribe = partial(_subscribe, listener, client)
        opened: list[Callable[[int], Any]] = [
            partial(subscribe, listener.topic, consumer_type=listener.subscription_type),
            partial(
                subscribe,
                publisher.topics.retry.full,
                consumer_type=retry_type(listener.subscription_type, level_topic),
                # Copies are never skipped, wherever a new subscription begins with the messages.
                initial_position=pulsar.InitialPosition.Earliest,
            ),
        ]
        host: Host = app.host or ThreadedListener
        if app.host is None and listener.is_coroutine:
            assert loop is not None
            host = partial(LoopListener, loop=loop)
        unfinished = Unfinished(listener, publisher, app.clock, threaded=app.host is None)
        running = host(unfinished, handled, opened)
        stack.callback(running.close_consumers)
        stack.callback(running.stopping.set)
        running.start()
        stack.pop_all()
    return running


def _subscribe(listener: Listener, client: Any, topic: str, number: int, **options: Any) -> Any:
    """Return a new consumer, by its number from 0."""
    given = {**listener.options, **options}
    if given.get("consumer_name") and listener.consumers > 1:
        # The broker refuses a second Key_Shared consumer of the same name.
        given["consumer_name"] += f"-{number}"
    try:
        return client.subscribe(topic, listener.subscription, schema=listener.schema, **given)
    except pulsar.Timeout as error:
        admin = getattr(client, "admin", None)
        missing = missing_subscription(admin, topic, listener.subscription)
        if not missing:
            raise
        raise pulsar.SubscriptionNotFound(missing) from error


class Listeners:
    """Handlers for the messages of topics, and the threads that call them.

    Args:
        client: a :class:`delaylevel.DelayLevelClient`. It stays the application's own.
        stop_timeout: time for running handlers to finish when the application stops.
    """

    def __init__(
        self,
        client: Any,
        *,
        stop_timeout: timedelta | str = timedelta(seconds=30),
    ) -> None:
        self.client = client
        self._stop_timeout = parse_delay(stop_timeout, "stop_timeout")
        self._listeners: list[Listener] = []
        self._started: list[RunningListener] = []
        self._loop: LoopThread | None = None
        self._running = False
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        # Set by `from_config`; then the client is our own.
        self._config: ApplicationConfig | None = None

    @classmethod
    def from_config(
        cls,
        config_file: str | os.PathLike[str] | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
        stop_timeout: timedelta | str = timedelta(seconds=30),
        **connection: Any,
    ) -> Listeners:
        """Return listeners with a client of their own and configured defaults.

        The configuration file has the connection, as for the command line, and the tables
        ``[listeners]`` and ``[listeners.NAME]``. The client is closed when the application ends.

        Args:
            config_file: the file; by default ``DELAYLEVEL_CONFIG``, or ``delaylevel/config.toml``
                in the user's configuration directory.
            environ: the environment.
            stop_timeout: time for running handlers to finish when the application stops.
            connection: addresses and credentials, as in the file; they override it.

        Raises:
            ConfigError: a value or file is invalid; the text names its source, never a secret.
        """
        from .config import ApplicationConfig

        config = ApplicationConfig.load(config_file, environ=environ, **connection)
        app = cls(config.open_client(), stop_timeout=stop_timeout)
        app._config = config
        return app

    @property
    def listeners(self) -> tuple[Listener, ...]:
        """The registered listeners, one for each topic."""
        return tuple(self._listeners)

    def on(
        self,
        topic: str,
        *,
        subscription: str | None = None,
        subscription_type: Any = None,
        schema: Any = None,
        retry: Any = None,
        deduplicate: Any = None,
        filter: Any = None,  # noqa: A002 (the word that users know)
        concurrency: int | None = None,
        name: str | None = None,
        **consumer_options: Any,
    ) -> Callable[[Handler], Handler]:
        """Register a function or coroutine function as the handler of a topic.

        Args:
            topic: name of the topic. For several topics, decorate the handler several times: each
                has its own consumers, retry topic and dead-letter topic.
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
            name: name in logs, metrics and configuration; that of the function by default.
            consumer_options: other arguments of ``pulsar.Client.subscribe``, such as
                ``initial_position="earliest"`` or ``receiver_queue_size``.

        Returns:
            A decorator that returns the function itself.

        Raises:
            InvalidInputError: an option or the signature of the handler is wrong, or the topic and
                subscription have a handler already; the partitions of a topic share theirs.
        """
        given = {
            "subscription": subscription,
            "subscription_type": subscription_type,
            "schema": schema,
            "retry": retry,
            "deduplicate": deduplicate,
            "filter": filter,
            "concurrency": concurrency,
            **consumer_options,
        }

        def register(handler: Handler) -> Handler:
            self._register(handler, topic, name, given)
            return handler

        return register

    def _register(self, handler: Any, topic: str, name: str | None, given: dict[str, Any]) -> None:
        configured: Mapping[str, Any] = {}
        if self._config is not None:
            configured = self._config.listener(name_of(handler) if name is None else name)
        stated = {key: value for key, value in given.items() if value is not None}
        new = listener_of(handler, topic, name, {**configured, **stated})
        ours = new.business_topic, new.subscription
        for known in self._listeners:
            # The partitions of a topic share the topic of their retries, and so their handler.
            if (known.business_topic, known.subscription) == ours and (
                known.topic == new.topic or known.handler != handler
            ):
                raise InvalidInputError(
                    f"listener {new.name!r}: {known.name!r} handles topic {known.topic} with "
                    f"subscription {new.subscription!r} already: choose another subscription"
                )
        self._listeners.append(new)
        if self.host is not None:
            self._start_missing(None)

    # -- running

    # Both are those of the present client: the in-memory Pulsar may replace it.
    @property
    def clock(self) -> Clock:
        """The clock of the client."""
        return getattr(self.client, "_delaylevel_clock", None) or SystemClock()

    @property
    def host(self) -> Host | None:
        """What calls the handlers in place of threads: the in-memory Pulsar, as its clock moves."""
        return getattr(self.client, "_delaylevel_host", None)

    def run(self, metrics_port: int | None = None, metrics_address: str = "127.0.0.1") -> None:
        """Handle messages until SIGTERM, Ctrl-C or :meth:`stop`; then finish what runs.

        A second signal does not wait for running handlers any more. Outside the main thread, there
        are no signals.

        Args:
            metrics_port: port of the HTTP service with metrics, probes and the status page; 0 for
                any, None for no service. It needs the extra ``metrics``.
            metrics_address: address of the HTTP service.

        Raises:
            InvalidInputError: there is no listener, or a client that cannot be used.
            BrokerError, pulsar.PulsarException: a topic cannot be subscribed to or created.
        """
        if self.host is not None:
            raise InvalidInputError(
                "the in-memory Pulsar calls the handlers itself: advance its clock instead of "
                "calling run()"
            )
        with ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                stack.callback(stop_on_signals(self._signalled))
            if metrics_port is not None:
                from delaylevel.prometheus import serve

                stack.enter_context(serve(ListenerCollector(self), metrics_port, metrics_address))
            stack.callback(self.close)
            self.start()
            while self._running and not self._stopping.wait(_GLANCE_S):
                pass  # another thread may close it

    def stop(self) -> None:
        """Let :meth:`run` stop. It may be called in any thread, and in a handler."""
        self._stopping.set()

    async def __aenter__(self) -> Self:
        """Start; coroutines run in the running loop."""
        starting = asyncio.ensure_future(asyncio.to_thread(self.start, asyncio.get_running_loop()))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread goes on, and nobody else would stop what it starts.
            await _ended(starting)
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Finish what runs, and stop; if this is cancelled, without waiting for handlers."""
        closing = asyncio.ensure_future(asyncio.to_thread(self.close))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            self._hurry.set()
            await _ended(closing)
            raise

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Subscribe and handle messages in the background; :meth:`close` ends it.

        Args:
            loop: the event loop for coroutines, which runs in another thread; one of its own by
                default.

        Raises:
            InvalidInputError, BrokerError, pulsar.PulsarException: as for :meth:`run`.
        """
        subscribe = getattr(self.client, "subscribe", None)
        if subscribe is None or inspect.iscoroutinefunction(subscribe):
            raise InvalidInputError(
                f"listeners need a delaylevel.DelayLevelClient, not {type(self.client).__name__}; "
                "it serves coroutines, too. A client of delaylevel.asyncio has one: "
                "client.synchronous()"
            )
        if not self._listeners:
            raise InvalidInputError("there is no listener: register a function with @app.on(...)")
        configured = {} if self._config is None else self._config.by_name
        for name in sorted(configured.keys() - {listener.name for listener in self._listeners}):
            log.warning("[listeners.%s] has no effect: there is no listener with this name", name)
        if self._running and self.host is None:
            raise InvalidInputError("these listeners run already: close them first")
        try:
            coroutines = any(listener.is_coroutine for listener in self._listeners)
            if loop is None and coroutines and self.host is None:
                self._loop = LoopThread()
                loop = self._loop.loop
            self._start_missing(loop)
        except BaseException:
            self.close()
            raise
        log.info("%d listeners started", len(self._started))

    def _start_missing(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Start the listeners that do not run."""
        self._running = True
        for listener in self._listeners[len(self._started) :]:
            running = start_listener(self, listener, loop)
            self._started.append(running)  # a handler may have closed the others meanwhile

    def close(self) -> None:
        """Receive no more messages, finish what runs, and close the consumers.

        Handlers that still run at the end of ``stop_timeout`` are named in the log. Their messages
        are delivered again. So is that of a handler that makes this call: call :meth:`stop` there.
        """
        until_s = time.monotonic() + self._stop_timeout.total_seconds()
        started, self._started = self._started, []
        for each in started:  # first all of them, so that their handlers end side by side
            each.stopping.set()
        while not _joined(started) and time.monotonic() < until_s and not self._hurry.is_set():
            pass
        for each in started:
            if each.running:
                log.warning(
                    "%s: %d calls of the handler still run; their messages are delivered again",
                    each.listener,
                    each.running,
                )
        for each in started:
            each.close(time.monotonic() if self._hurry.is_set() else max(until_s, _soon_s()))
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close(_soon_s())
        if self._config is not None:
            with suppress(pulsar.AlreadyClosed):
                self.client.close()
        self._stopping.clear()
        self._hurry.clear()
        self._running = False

    def _forget(self) -> None:
        """Forget what runs: the in-memory Pulsar has ended it like a killed process."""
        self._started, self._running = [], False

    def health(self) -> Mapping[tuple[str, str], ListenerHealth]:
        """Return the state of each listener that runs, by its topic and subscription."""
        return {
            (listener.topic, listener.subscription): ListenerHealth(each.alive, each.ready)
            for each in self._started
            for listener in (each.listener,)
        }

    def _signalled(self) -> None:
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()


async def _ended(task: asyncio.Future[Any]) -> None:
    """Wait for the end of a task, even if that is cancelled."""
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({task})


def _joined(started: list[RunningListener]) -> bool:
    """Wait a moment for running handlers; return True if all have ended."""
    until_s = time.monotonic() + _GLANCE_S
    return all(each.join(until_s) for each in started)


def _soon_s() -> float:
    """Return the time at which confirmations of the broker are waited for no longer."""
    return time.monotonic() + _CONFIRMED_S
