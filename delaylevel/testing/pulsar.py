"""The in-memory Pulsar as tests use it: clients, listeners, an admin interface, a clock, contents.

Advancing the clock is a coroutine in both forms. That of :meth:`.MemoryPulsar.advance` waits for
nothing: a loop of ours runs the coroutines of handlers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import pulsar

from delaylevel.cluster.failures import close_quietly
from delaylevel.cluster.port import NamespacePolicies
from delaylevel.consumer.listener import Listener
from delaylevel.consumer.message import ReceivedMessage
from delaylevel.consumer.workers import RunningListener, refuse_awaitable
from delaylevel.errors import InvalidInputError
from delaylevel.inspection.inspector import Inspector
from delaylevel.inspection.rows import ORDER, PendingRow, row_columns, rows_of
from delaylevel.model.clock import duration_ms, earliest, instant
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.position import source_partitions
from delaylevel.model.topic_name import TopicName
from delaylevel.mover.local import LocalMover
from delaylevel.producer.aio import calls_in_threads
from delaylevel.testing.memory.aio import MemoryAsyncClient
from delaylevel.testing.memory.broker import Broker
from delaylevel.testing.memory.client import MemoryClient
from delaylevel.testing.memory.dispatcher import MemoryDispatcher
from delaylevel.testing.memory.strict import StrictRules

from .admin import MemoryAdmin
from .clock import ManualClock, check_duration

if TYPE_CHECKING:
    from delaylevel.consumer.handled_ids import HandledIds
    from delaylevel.consumer.listeners import Listeners
    from delaylevel.consumer.retry_publisher import Unfinished

T = TypeVar("T")
Handled = Callable[[Listener, ReceivedMessage], object]


class MemoryListener(RunningListener):
    """A listener whose handler is called when the clock is advanced."""

    failures = (Exception, SystemExit)

    def __init__(
        self,
        listening: Listening,
        unfinished: Unfinished,
        handled: HandledIds | None,
        subscribe: Sequence[Callable[[int], Any]],
    ) -> None:
        super().__init__(unfinished, handled, ())  # no threads run here
        self._listening = listening
        self._subscribe = subscribe
        self._consumers: list[Any] = []
        self._tally = self.listener.stats.tally()

    @property
    def running(self) -> int:
        """1 during a call of the handler."""
        return self._tally.in_progress

    def start(self) -> None:
        # One consumer each, whatever the concurrency: one call runs at a time here.
        self._consumers = [subscribe(0) for subscribe in self._subscribe]
        self._listening.listeners.append(self)

    @property
    def alive(self) -> bool:
        return not self.stopping.is_set()

    @property
    def ready(self) -> bool:
        return self.alive and all(consumer.is_connected() for consumer in self._consumers)

    def close_consumers(self) -> None:
        with suppress(ValueError):  # it has not started
            self._listening.listeners.remove(self)
        consumers, self._consumers = self._consumers, []
        for consumer in consumers:
            close_quietly(consumer, "consumer")

    def next_event_ms(self) -> int | None:
        """Return the next time, ms, at which a message can be received; None for never."""
        return earliest(consumer._consumer.next_event_ms() for consumer in self._consumers)

    async def handle_all(self) -> bool:
        """Handle every message that is available now; return True if there was one."""
        worked = self._finish()
        listener = self.listener
        topic, subscription = listener.business_topic, listener.subscription
        for consumer in self._consumers:
            while self.alive:
                try:
                    raw = consumer.receive(0)
                except pulsar.Timeout:
                    break
                now_ms = self.clock.now_ms()
                message = ReceivedMessage(raw, topic, subscription, now_ms)
                worked = True
                self._tally.received += 1
                await self.perform(message, consumer, self._tally)
                self._finish()
        return worked

    async def call(self, message: ReceivedMessage) -> BaseException | None:
        listener, failure = self.listener, None
        try:
            returned = listener.handler(message)
            if returned is not None and not listener.is_coroutine:
                refuse_awaitable(returned)
        except _FAILURES as error:
            return error
        if listener.is_coroutine:
            failure = await self._listening.call(returned)
        if failure is None:
            self._listening.handled(listener, message)
        return failure

    def _finish(self) -> bool:
        """Store and acknowledge failed messages; return True if there was one."""
        worked = False
        while self.unfinished.work():
            worked = True
        return worked


class Listening:
    """The listeners of an in-memory Pulsar, and the event loop of their coroutines."""

    def __init__(self, handled: Handled) -> None:
        self.handled = handled  # called for each message that was handled
        self.listeners: list[MemoryListener] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._busy = False

    def next_event_ms(self) -> int | None:
        """Return the next time, ms, at which a listener has work; None for never."""
        return earliest(listener.next_event_ms() for listener in self.listeners)

    async def handle_all(self) -> bool:
        """Call the handlers for every message that is available now; return True for any."""
        worked = False
        for listener in tuple(self.listeners):  # a handler may start and stop others
            worked |= await listener.handle_all()
        return worked

    async def call(self, called: Coroutine[Any, Any, Any]) -> BaseException | None:
        """Run the coroutine of a handler, in the running loop or ours; return its error."""
        if _has_loop():
            return await _failure(called)
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_failure(called))

    def drive(self, steps: Coroutine[Any, Any, T]) -> T:
        """Take steps in this thread, and return their result."""
        with self._alone(steps):
            if not (_has_loop() and any(each.listener.is_coroutine for each in self.listeners)):
                try:
                    steps.send(None)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]
            raise InvalidInputError(
                "this thread has a running event loop, so coroutines cannot be called here: "
                "write `await memory.advance_async(...)`"
            )

    async def drive_async(self, steps: Coroutine[Any, Any, T]) -> T:
        """Take steps in the running event loop, and return their result."""
        with self._alone(steps):
            return await steps

    def close(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    @contextmanager
    def _alone(self, steps: Coroutine[Any, Any, Any]) -> Iterator[None]:
        if self._busy:
            steps.close()  # Python warns of a coroutine that is neither run nor closed
            raise InvalidInputError(
                "a handler advances the clock: only the test does; a handler sends delayed messages"
            )
        self._busy = True
        try:
            yield
        finally:
            steps.close()
            self._busy = False


# Failed attempts of a handler. Other errors are for the test: the end by Ctrl-C, or an outcome such
# as pytest.fail().
_FAILURES = (Exception, SystemExit, asyncio.CancelledError)


async def _failure(called: Coroutine[Any, Any, Any]) -> BaseException | None:
    """Return the error of a handler; a cancellation that is raised is that of the test."""

    async def contained() -> BaseException | None:
        try:
            await called
        except _FAILURES as error:  # raised by a task, SystemExit would end the event loop
            return error
        return None

    task = asyncio.ensure_future(contained())
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        raise
    return task.result()


# Steps of the event loop: a send or an acknowledgement takes a few.
_STEPS = 100


async def _tasks_run() -> None:
    """Let tasks continue that have a message now, as far as they get without waiting for others."""
    left = _STEPS
    while left:
        await asyncio.sleep(0)
        left -= 1
        while calls_in_threads:
            await asyncio.sleep(0.001)
            left = _STEPS


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True)
class TopicMessage:
    """A pending or delivered message.

    Attributes:
        at: the due time of a pending message, or the time from which a delivered message is
            available; aware, UTC.
        data: the stored payload; None for a null value.
        key: the partition key; empty without one.
        properties: all properties, including ``delaylevel.*``.
        topic: full name of the partition that contains it.
    """

    at: datetime
    data: bytes | None
    key: str
    properties: Mapping[str, str]
    topic: str


class MemoryPulsar:
    """An in-memory Pulsar with a mover for each level topic, for the tests of an application.

    It behaves like a real Pulsar in everything that this package and most applications rely on:
    the contract suite of this project runs the same tests on both. No call blocks: ``receive``
    raises ``pulsar.Timeout`` at once if there is no message, and time passes only in
    :meth:`advance`. Inactive topics are not deleted, and nothing expires. There is no
    deduplication, replication, compaction or transaction. The mover is the real one, and so is the
    dispatcher of level topics with a tracker, with its journal; it needs no threads and files
    here, and delivers at least once. As in a real client, a message has at most 5 MiB, compressed
    and with its properties. A new version of a schema needs the type of the last one, no more.

    It is stricter than a real Pulsar. What every subscription has acknowledged is erased at once,
    so that a reader which needs it later misses it. And an acknowledgement of a member topic of a
    level topic must lose nothing (see :mod:`delaylevel.testing.memory.strict`): otherwise
    :meth:`advance` and :meth:`close` raise an AssertionError.

    Args:
        clock: the clock; by default a new :class:`ManualClock`.
        namespaces: full names (``tenant/namespace``) of those to create with ``public/default``.
        retention: False to keep nothing of topics without a subscription, as brokers do by default:
            messages that are due for such a topic are held then.
    """

    def __init__(
        self,
        clock: ManualClock | None = None,
        *,
        namespaces: Iterable[str] = (),
        retention: bool = True,
    ) -> None:
        self.clock = clock or ManualClock()
        self._broker = Broker(self.clock, retention)
        self._rules = StrictRules(self._broker)
        self.admin = MemoryAdmin(self._broker)
        self._clients: list[MemoryClient | MemoryAsyncClient] = []
        self._listening = Listening(self._rules.expect_id)
        self._apps: list[tuple[Listeners, Any]] = []  # with the client that they had before
        for namespace in ("public/default", *namespaces):
            policies = NamespacePolicies(replication_clusters=frozenset({"memory"}))
            self._broker.namespaces[namespace] = policies

    def client(self) -> MemoryClient:
        """Return a client: a :class:`delaylevel.DelayLevelClient` with admin access."""
        client = _client(self._broker, self.admin)
        client._delaylevel_host = partial(MemoryListener, self._listening)
        self._clients.append(client)
        return client

    def asyncio_client(self) -> MemoryAsyncClient:
        """Return a client for asyncio: a ``delaylevel.asyncio.DelayLevelClient``.

        Any thread may create it; use it in one event loop.
        """
        client = MemoryAsyncClient(
            "pulsar://memory", admin=self.admin, clock=self.clock, memory=self._broker
        )
        client._delaylevel_threads = self.client()
        self._clients.append(client)
        return client

    def advance(self, delta: timedelta) -> None:
        """Advance the clock while movers, dispatchers and listeners run.

        The clock moves in steps, so that every hand-off, delivery, redelivery and call of a
        handler happens at its own time. Handlers are called in this thread. Coroutines run in an
        event loop that belongs to this object; if this thread has a running loop, use
        :meth:`advance_async`.

        Args:
            delta: duration.

        Raises:
            InvalidInputError: the duration is negative, or no timedelta.
            AlreadyRunningError: the test runs its own mover or dispatcher: advance the clock
                instead.
        """
        self._listening.drive(self._advance(delta, tasks=False))
        self._check_rules()

    async def advance_async(self, delta: timedelta) -> None:
        """Advance the clock as :meth:`advance` does; coroutines run in the running event loop.

        Args:
            delta: duration.

        Raises:
            InvalidInputError, AlreadyRunningError: as for :meth:`advance`.
        """
        await self._listening.drive_async(self._advance(delta, tasks=True))
        self._check_rules()

    def crash_after(self, events: int | None) -> None:
        """End the process under test after a number of further events.

        An event is an entry that is stored, or an acknowledgement. After the last one, a
        :exc:`Crashed`, which is no ``Exception``, ends the call that caused it, and everything
        else that tries to store or to acknowledge: nothing is tidied up, as when a process is
        killed. What is stored stays.

        Args:
            events: the number of events, at least 1; None starts the next process, for which
                nothing ends. The clients and listeners of a process that has ended are
                disconnected, as when it is killed: use new clients, and call :meth:`listen` again.
        """
        # Before its end is lifted: nothing of that process may be stored afterwards.
        if self._broker.ended:
            self._end()
        self._broker.events_left = events

    def listen(self, app: Listeners) -> None:
        """Run the listeners of an application here, whatever client it has.

        Until :meth:`close`, its client is one of this object. Listeners that are created with such
        a client need no call: they run from their registration.

        Args:
            app: the listeners.
        """
        self._apps.append((app, app.client))
        app.client = self.client()
        app.start()

    async def _advance(self, delta: timedelta, *, tasks: bool) -> None:
        check_duration(delta)
        target_ms = self.clock.now_ms() + duration_ms(delta)
        with ExitStack() as stack:
            movers = _Movers(self.admin, self._broker, stack)
            while True:
                movers.run_once()
                if await self._listening.handle_all():
                    continue  # the handlers may have sent something that is due now
                if tasks and self._broker.asyncio_woken:
                    self._broker.asyncio_woken = False
                    await _tasks_run()
                    continue
                # The end comes last: what is due at the target time itself is done before.
                now_ms = self.clock.now_ms()
                if now_ms >= target_ms:
                    return
                working = (movers, self._broker, self._listening)
                next_ms = earliest(each.next_event_ms() for each in working)
                # What is due now and could not be done must not stop the time.
                next_ms = target_ms if next_ms is None else max(next_ms, now_ms + 1)
                self.clock.move_to(min(next_ms, target_ms))

    def pending(self, topic: str) -> list[TopicMessage]:
        """Return the messages for a business topic that are not available yet, in due order.

        Those whose cancellation is stored are left out.

        Args:
            topic: name of the business topic.
        """
        target = TopicName.parse(topic)
        found: list[PendingRow] = []
        with closing(_client(self._broker, self.admin)) as client:
            for each in self._broker.level_topics():
                if target.full in each.targets:
                    inspector = Inspector(
                        client,
                        self.admin,
                        each.topic,
                        target=target.full,
                        clock=self.clock,
                        live=False,
                    )
                    found += rows_of(inspector.batches(columns=row_columns(value=True)))
        found.sort(key=attrgetter(*ORDER))
        waiting = [
            TopicMessage(instant(row.due_ms), row.value, row.key or "", row.properties, row.topic)
            for row in found
            if row.due_ms is not None and TopicName.parse(row.topic).without_partition != target
        ]
        return sorted([*waiting, *self._stored(target, due=False)], key=attrgetter("at"))

    def delivered(self, topic: str) -> list[TopicMessage]:
        """Return the messages that are available to a Shared subscription by now, in order.

        This includes messages that were already received or acknowledged.

        Args:
            topic: name of the business topic.
        """
        return sorted(self._stored(TopicName.parse(topic), due=True), key=attrgetter("at"))

    def close(self) -> None:
        """Close every client, and the listeners on them."""
        self.crash_after(None)
        self._end()
        self._check_rules()

    def _end(self) -> None:
        """Close everything, or disconnect it if its process was killed."""
        kill = self._broker.ended
        apps, self._apps = self._apps, []
        for app, client in apps:
            app._forget() if kill else app.close()
            app.client = client
        self._listening.listeners.clear() if kill else self._listening.close()
        clients, self._clients = self._clients, []
        for each in clients:
            each.shutdown()

    def _check_rules(self) -> None:
        violations, self._rules.violations = self._rules.violations, []
        if violations:
            raise AssertionError("\n".join(violations))

    def __enter__(self) -> MemoryPulsar:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is not None:
            self._rules.violations.clear()  # the failure of the test comes first
        self.close()

    def _stored(self, topic: TopicName, *, due: bool) -> list[TopicMessage]:
        now_ms = self.clock.now_ms()
        with self._broker.lock:
            return [
                TopicMessage(
                    instant(entry.available_ms),
                    message.value,
                    message.key,
                    dict(message.properties),
                    partition.name.full,
                )
                for partition in self._broker.existing_partitions(topic)
                for entry in partition.entries
                if (entry.available_ms <= now_ms) == due
                for message in entry.messages
            ]


def _client(broker: Broker, admin: MemoryAdmin) -> MemoryClient:
    return MemoryClient("pulsar://memory", admin=admin, clock=broker.clock, memory=broker)


class _Movers:
    """A mover for each current level topic, and a dispatcher for its window if it has a tracker."""

    def __init__(self, admin: MemoryAdmin, broker: Broker, stack: ExitStack) -> None:
        self._admin = admin
        self._broker = broker
        self._client = _client(broker, admin)
        stack.callback(self._client.shutdown)
        self._stack = stack
        self._changes = -1
        self._movers: dict[LevelTopicDescription, LocalMover] = {}
        self._dispatchers: dict[LevelTopicDescription, MemoryDispatcher] = {}
        self._sources: list[tuple[LocalMover, TopicName]] = []

    def run_once(self) -> None:
        # Descriptions are read when one may have changed, not at each step.
        if self._changes != self._broker.changes:
            self._changes = self._broker.changes
            self._start_and_stop(self._broker.level_topics())
        for mover in self._movers.values():
            mover.run_once()
        for dispatcher in self._dispatchers.values():
            dispatcher.run_once()

    def next_event_ms(self) -> int | None:
        """Return the next time, ms, at which a mover or dispatcher has work; None for never."""
        times = [dispatcher.next_event_ms() for dispatcher in self._dispatchers.values()]
        for mover, name in self._sources:
            if self._broker.has_backlog(name):
                times.append(mover.next_checks[name.full])
        return earliest(times)

    def _start_and_stop(self, found: list[LevelTopicDescription]) -> None:
        for description in self._movers.keys() - set(found):
            self._movers.pop(description).close()
            if description in self._dispatchers:
                self._dispatchers.pop(description).close()
        for description in found:
            if description in self._movers:
                continue
            mover = LocalMover(self._client, self._admin, description, self._broker.clock)
            self._movers[description] = self._stack.enter_context(closing(mover))
            if description.final_window is FinalWindow.TRACKER:
                dispatcher = MemoryDispatcher(self._client, self._admin, self._broker, description)
                self._dispatchers[description] = self._stack.enter_context(dispatcher)
        self._sources = [
            (mover, source.name)
            for description, mover in self._movers.items()
            for source in source_partitions(description)
        ]
