"""Pulsar worlds for tests, in memory or real, each with its clock.

The contract suite runs the same tests on both. The fixtures of the integration tests are short
names for methods of :class:`RealWorld`. Tests with a broker of their own use the functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pulsar

from delaylevel import DelayLevelClient, topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.reader import read_range
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.rest.http import Rest, options_of
from delaylevel.model.clock import Clock, SystemClock, duration_ms
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription, Role
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import EARLIEST
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.mover.local import LocalMover
from delaylevel.testing import MemoryPulsar
from support.background import Moving, Serving

HOURS = Levels(PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(hours=4)))
# Discards the client's log, because tests that break something cause expected errors.
QUIET: Any = pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)


def quiet_client(connection: Connection) -> pulsar.Client:
    return pulsar.Client(**connection.client_kwargs(), logger=QUIET)


def eventually(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    """Wait until a condition returns a true value, and return that; fail after some seconds."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)
    return found


def stored_messages(client: pulsar.Client, admin: Any, topic: str) -> list[ParkedMessage]:
    """Return all messages that a topic holds, one partition after another.

    Readers read the topic from its beginning. ``deliver_at`` hides no message from a reader, so
    there is nothing to wait for. A topic that does not exist holds no messages.
    """
    found: list[ParkedMessage] = []
    if not admin.topic_exists(TopicName.parse(topic)):
        return found
    for partition in client.get_topic_partitions(topic):
        last = admin.last_message_id(TopicName.parse(partition))
        if last is not None and last.entry >= 0:
            found += read_range(client, partition, EARLIEST, last.next_entry)
    return found


@dataclass(frozen=True)
class Arrival:
    """A message that a consumer received, and the time of its arrival in ms since the epoch."""

    message: Any
    at_ms: int

    @property
    def late_ms(self) -> int:
        """The time from the due time to the arrival, in ms; negative for an early message."""
        return self.at_ms - int(self.message.properties()["delaylevel.due"])


class World:
    """The in-memory Pulsar with its clock; `RealWorld` is a real one.

    Attributes:
        namespace: the test's own namespace.
        admin: the admin interface; it has ``delete`` and ``terminate`` in addition to the port.
        plain_client: a client for readers and consumers.
        clock: the clock of this Pulsar.
        early_ms: the longest time before its due time at which a message may arrive (the broker's
            tick), in ms.
        late_ms: the longest time after its due time at which a message may arrive, in ms.
    """

    early_ms = 0
    late_ms = 500  # tests check every 500 ms
    admin: Any
    clock: Clock
    plain_client: Any

    def __init__(self, stack: ExitStack) -> None:
        self.namespace = "acme/test"
        self._memory = MemoryPulsar(namespaces=[self.namespace])
        self.admin, self.clock = self._memory.admin, self._memory.clock
        self.plain_client = self._memory.client()

    def client(self, clock: Clock | None = None) -> DelayLevelClient:
        """Return a new client, closed at the end; on a broker it uses ``clock``."""
        return self._memory.client()

    def advance(self, delta: timedelta) -> None:
        """Let time pass while a mover runs for every level topic."""
        self._memory.advance(delta)

    def receive(self, consumer: Any) -> Any:
        """Return the next message; fail if none arrives."""
        return _next(consumer, 0)

    def drain(self, consumer: Any, expected: int = 0) -> list[Any]:
        """Return the expected number of messages, and any messages that follow them."""
        return [self.receive(consumer) for _ in range(expected)] + _more(consumer, 0)

    def eventually(
        self, condition: Callable[[], Any], what: str = "the broker", seconds: float = 60
    ) -> Any:
        """Wait for an asynchronous effect of the broker; see :func:`eventually`."""
        found = condition()
        assert found, what
        return found

    def producer(self, topic: str, clock: Clock | None = None, **options: Any) -> Any:
        """Return a producer of delayed messages, of a client of its own."""
        return self.client(clock).create_producer(topic, enable_delay_level_topic=True, **options)

    def topic(self, name: str) -> str:
        return f"persistent://{self.namespace}/{name}"

    def name(self, name: str) -> TopicName:
        return TopicName.parse(self.topic(name))

    def bodies(self, consumer: Any, expected: int) -> list[bytes]:
        return [message.data() for message in self.drain(consumer, expected)]

    def level_topic(
        self, levels: Levels, targets: Sequence[str] = ("orders",), **values: Any
    ) -> LevelTopicDescription:
        """Create a level topic and its targets.

        The final window is ``broker`` by default, because no dispatcher runs.
        """
        names = tuple(self.topic(target) for target in targets)
        for name in names:
            self.plain_client.create_producer(name).close()
        topic = values.pop("topic", f"{names[0]}-delay-level")
        values.setdefault("final_window", FinalWindow.BROKER)
        values.setdefault("window_partitions", 2)
        return topics.create(self.admin, LevelTopicDescription(topic, levels, names, **values))

    def stored(self, topic: str) -> list[ParkedMessage]:
        """Return all messages that a topic holds; see :func:`stored_messages`."""
        return stored_messages(self.plain_client, self.admin, topic)

    def backlog(self, description: LevelTopicDescription, *roles: Role) -> int:
        """Return the number of unacknowledged entries in some topics; those of movers by default.

        They are asked for in the order of their roles.
        """
        return sum(
            stats.subscriptions[SUBSCRIPTION].backlog_entries
            for role in roles or (Role.LEVEL, Role.HELD)
            for member in description.members()
            if member.role is role
            for stats in self.admin.partitioned_stats(member.topic).values()
        )

    def drained(self, description: LevelTopicDescription, *roles: Role) -> None:
        """Wait until every entry is acknowledged; see :meth:`backlog`."""
        what = f"the acknowledgement of everything in {description.topic}"
        self.eventually(lambda: not self.backlog(description, *roles), what)


class AsyncioWorld(World):
    """The in-memory Pulsar through its asyncio client, each call of which runs to its end."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__(stack)
        self._loop = asyncio.new_event_loop()
        stack.callback(self._end)

    def client(self, clock: Clock | None = None) -> Any:
        return Awaited(self._memory.asyncio_client(), self._loop.run_until_complete)

    def _end(self) -> None:
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left))
        self._loop.close()


class Awaited:
    """A client or a producer for asyncio, with the calls of its twin for threads."""

    def __init__(self, inner: Any, run: Callable[[Any], Any]) -> None:
        self._inner = inner
        self._run = run

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            async def awaited() -> Any:
                answer = found(*args, **options)
                return await answer if inspect.isawaitable(answer) else answer

            answer = self._run(awaited())
            return Awaited(answer, self._run) if name == "create_producer" else answer

        return call

    def __enter__(self) -> Awaited:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RealWorld(World):
    """A real broker; time passes by itself.

    The client is that of readers, consumers and movers; one is made on first use by default.
    ``rest`` is the admin interface as such, for policies that the port does not have.
    """

    early_ms = 1000
    late_ms = 600_000  # a real machine may pause for a long time

    def __init__(
        self,
        connection: Connection,
        stack: ExitStack,
        namespace: str,
        client: pulsar.Client | None = None,
    ) -> None:
        self.connection = connection
        self._stack = stack
        self._client = client
        self.namespace = namespace
        self.admin = stack.enter_context(Admin.from_connection(connection))
        self.rest = Rest(connection.admin_url, **options_of(connection))
        stack.callback(self.rest.close)
        self.clock = SystemClock()

    @property
    def plain_client(self) -> pulsar.Client:
        if self._client is None:
            self._client = quiet_client(self.connection)
            self._stack.callback(self._client.shutdown)
        return self._client

    def client(self, clock: Clock | None = None) -> DelayLevelClient:
        made = DelayLevelClient.from_connection(self.connection, logger=QUIET, clock=clock)
        self._stack.callback(made.shutdown)
        return made

    def deduplicate(self) -> None:
        """Turn on the broker's deduplication for every topic of the namespace."""
        self.set_policy("deduplication", True)

    def deduplicate_topic(self, topic: str, on: bool = True) -> None:
        """Turn the deduplication of a topic on or off, and wait for the effect."""
        name = TopicName.parse(topic)
        self.rest.post(f"{name.rest_path}/deduplicationEnabled", on)
        parts = [TopicName.parse(each) for each in self.plain_client.get_topic_partitions(topic)]
        self.eventually(
            lambda: all(self.admin.partition_stats(each).deduplication is on for each in parts),
            "deduplication",
        )

    def keep_nothing(self) -> None:
        """Turn off the retention: what is published to a topic without subscription is gone."""
        self.set_policy("retention", {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0})

    def set_policy(self, policy: str, value: Any) -> None:
        """Set a policy of the namespace, by its name in the admin interface."""
        self.rest.post(f"namespaces/{self.namespace}/{policy}", value)

    def advance(self, delta: timedelta) -> None:
        until_ms = self.clock.now_ms() + duration_ms(delta)
        client = self.client()
        found = topics.list_level_topics(self.admin, self.namespace)
        with ExitStack() as stack:
            movers = [
                stack.enter_context(closing(LocalMover(client, self.admin, item.description)))
                for item in found
                if item.description is not None
            ]
            while True:
                # The last pass begins at the end, however long one takes on a busy machine.
                left_ms = until_ms - self.clock.now_ms()
                for mover in movers:
                    mover.run_once()
                if left_ms <= 0:
                    return
                threading.Event().wait(min(0.05, left_ms / 1000))

    def receive(self, consumer: Any) -> Any:
        limit = time.monotonic() + 60
        while True:
            try:
                return _next(consumer, 500)
            except pulsar.Timeout:
                # After a pause of the machine, a message may still be on its way.
                if time.monotonic() > limit:
                    raise
                self.advance(timedelta(0))

    def drain(self, consumer: Any, expected: int = 0) -> list[Any]:
        found = [self.receive(consumer) for _ in range(expected)]
        return found + _more(consumer, 400)

    def eventually(
        self, condition: Callable[[], Any], what: str = "the broker", seconds: float = 60
    ) -> Any:
        return eventually(condition, what, seconds)

    def mover(self, description: LevelTopicDescription, clock: Clock | None = None) -> LocalMover:
        """Return a mover in this process, closed at the end."""
        return self._stack.enter_context(
            closing(LocalMover(self.plain_client, self.admin, description, clock))
        )

    def moving(self, description: LevelTopicDescription) -> Moving:
        """Start a mover in this process: a context manager, stopped at the end anyway."""
        return self._stack.enter_context(Moving(self.mover(description)))

    def serving(
        self, description: LevelTopicDescription, clock: Clock | None = None, **settings: Any
    ) -> Serving:
        """Start a dispatcher in this process: a context manager, stopped at the end anyway."""
        from delaylevel.dispatcher import Dispatcher, DispatchSettings

        directory = self._stack.enter_context(TemporaryDirectory())
        chosen = DispatchSettings(Path(directory), **{"checkpoint_ms": 200, **settings})
        made = Dispatcher(self.plain_client, self.admin, [description.topic], chosen, clock)
        return self._stack.enter_context(Serving(made))

    def arrivals(self, topic: str, **options: Any) -> Callable[..., list[Arrival]]:
        """Subscribe to a topic from its beginning; return a function that waits for messages."""
        options.setdefault("consumer_type", pulsar.ConsumerType.Shared)
        consumer = self.plain_client.subscribe(
            topic, "application", initial_position=pulsar.InitialPosition.Earliest, **options
        )

        def get(count: int, seconds: float = 60) -> list[Arrival]:
            found: list[Arrival] = []
            deadline = time.monotonic() + seconds
            while len(found) < count:
                left_ms = int((deadline - time.monotonic()) * 1000)
                assert left_ms > 0, f"{len(found)} of {count} messages came within {seconds} s"
                with contextlib.suppress(pulsar.Timeout):
                    message = consumer.receive(left_ms)
                    found.append(Arrival(message, self.clock.now_ms()))
                    consumer.acknowledge(message)
            return found

        return get


def _next(consumer: Any, timeout_ms: int) -> Any:
    receive = consumer.receive if hasattr(consumer, "receive") else consumer.read_next
    return receive(timeout_ms)


def _more(consumer: Any, timeout_ms: int) -> list[Any]:
    """Return all messages until none comes for a time, in ms."""
    found = []
    with contextlib.suppress(pulsar.Timeout):
        while True:
            found.append(_next(consumer, timeout_ms))
    return found
