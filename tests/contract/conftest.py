"""One suite, two Pulsars: every test here runs in memory, and on a real broker (``-m broker``).

``world``   a Pulsar to test on, with a namespace of the test's own

The in-memory Pulsar is held to the real one's behaviour: what differs fails on one of them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import DelayLevelClient, topics
from delaylevel.cluster.admin import Admin
from delaylevel.model.clock import Clock, SystemClock, duration_ms
from delaylevel.model.report import ForwardReport
from delaylevel.model.topic_name import TopicName
from delaylevel.mover.local import LocalMover
from delaylevel.testing import MemoryPulsar


class Ahead:
    """A clock that is ahead of another."""

    def __init__(self, clock: Clock, by_ms: int) -> None:
        self._clock = clock
        self._by_ms = by_ms

    def now_ms(self) -> int:
        """Return its time, in ms since the epoch."""
        return self._clock.now_ms() + self._by_ms


class World:
    """A Pulsar, and its time.

    Attributes:
        namespace: of the test's own.
        admin: the admin interface, with ``delete`` and ``terminate`` beside the port's calls.
        clock: the time.
        early_ms: how much before its due time a message may come: the broker's tick.
        slack_ms: how far ahead a test's own clocks stand, lest a pause makes something late.
        late_ms: how much after it; a real machine may pause for any time.
    """

    early_ms: int
    slack_ms: int
    late_ms: int
    namespace: str
    admin: Any
    clock: Clock

    def client(self, **options: Any) -> DelayLevelClient:
        """Return a new client."""
        raise NotImplementedError

    def advance(self, delta: timedelta) -> ForwardReport:
        """Let time pass, with a mover at work for every level topic."""
        raise NotImplementedError

    def ahead(self, by_ms: int) -> Clock:
        """Return a clock that is so far ahead."""
        return Ahead(self.clock, by_ms)

    def catch_up(self, ahead: timedelta) -> ForwardReport:
        """Run every mover once, by clocks that are so far ahead of the right one.

        What is due by then is delivered at once, and no test has to wait for it.
        """
        report = ForwardReport()
        client = self.client()
        clock = self.ahead(duration_ms(ahead))
        for item in topics.list_level_topics(self.admin, self.namespace):
            if item.description is not None:
                with LocalMover(client, self.admin, item.description, clock) as mover:
                    report.add(mover.run_once())
        return report

    def receive(self, consumer: Any) -> Any:
        """Return a message that has to come."""
        raise NotImplementedError

    def drain(self, consumer: Any, expected: int = 0) -> list[Any]:
        """Return what a consumer or reader gets: what is expected, and whatever follows it."""
        raise NotImplementedError

    def eventually(self, condition: Callable[[], Any]) -> None:
        """Wait until something holds that the broker does on its own time."""
        raise NotImplementedError

    def topic(self, name: str) -> str:
        """Return the full name of a topic in the namespace."""
        return f"persistent://{self.namespace}/{name}"

    def name(self, name: str) -> TopicName:
        """Return a topic of the namespace in its parts."""
        return TopicName.parse(self.topic(name))

    def bodies(self, consumer: Any, expected: int) -> list[bytes]:
        """Return the payloads of :meth:`drain`."""
        return [message.data() for message in self.drain(consumer, expected)]


class MemoryWorld(World):
    """The in-memory Pulsar."""

    early_ms = 0
    slack_ms = 0
    late_ms = 500  # tests look every 500 ms

    def __init__(self) -> None:
        self.namespace = "acme/test"
        self._pulsar = MemoryPulsar(namespaces=[self.namespace])
        self.admin = self._pulsar.admin
        self.clock = self._pulsar.clock

    def client(self, **options: Any) -> DelayLevelClient:
        return self._pulsar.client()

    def advance(self, delta: timedelta) -> ForwardReport:
        return self._pulsar.advance(delta)

    def receive(self, consumer: Any) -> Any:
        return _next(consumer, 0)

    def drain(self, consumer: Any, expected: int = 0) -> list[Any]:
        return _drain(consumer, expected, 0, 0)

    def eventually(self, condition: Callable[[], Any]) -> None:
        assert condition()


class RealWorld(World):
    """A real broker; time passes by itself."""

    early_ms = 1000
    slack_ms = 60_000
    late_ms = 600_000

    def __init__(self, connection: Any, namespace: str, stack: ExitStack) -> None:
        self._connection = connection
        self._stack = stack
        self.namespace = namespace
        self.admin = stack.enter_context(Admin.from_connection(connection))
        self.clock = SystemClock()

    def client(self, **options: Any) -> DelayLevelClient:
        quiet = pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)
        made = DelayLevelClient.from_connection(self._connection, logger=quiet, **options)
        self._stack.callback(made.shutdown)
        return made

    def advance(self, delta: timedelta) -> ForwardReport:
        until_ms = self.clock.now_ms() + duration_ms(delta)
        report = ForwardReport()
        client = self.client()
        found = topics.list_level_topics(self.admin, self.namespace)
        with ExitStack() as stack:
            movers = [
                stack.enter_context(LocalMover(client, self.admin, item.description))
                for item in found
                if item.description is not None
            ]
            while True:
                for mover in movers:
                    report.add(mover.run_once())
                left_ms = until_ms - self.clock.now_ms()
                if left_ms <= 0:
                    return report
                threading.Event().wait(min(0.05, left_ms / 1000))

    def receive(self, consumer: Any) -> Any:
        limit = time.monotonic() + 60
        while True:
            try:
                return _next(consumer, 500)
            except pulsar.Timeout:
                # Where the machine has paused, a message may still be on its way.
                if time.monotonic() > limit:
                    raise
                self.advance(timedelta(0))

    def drain(self, consumer: Any, expected: int = 0) -> list[Any]:
        found = [self.receive(consumer) for _ in range(expected)]
        return found + _drain(consumer, 0, 0, 400)

    def eventually(self, condition: Callable[[], Any]) -> None:
        limit = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < limit, "it did not come true in time"
            threading.Event().wait(0.05)


def _next(consumer: Any, timeout_ms: int) -> Any:
    receive = consumer.receive if hasattr(consumer, "receive") else consumer.read_next
    return receive(timeout_ms)


def _drain(consumer: Any, expected: int, timeout_ms: int, more_ms: int) -> list[Any]:
    found = [_next(consumer, timeout_ms) for _ in range(expected)]
    try:
        while True:
            found.append(_next(consumer, more_ms))
    except pulsar.Timeout:
        return found


@pytest.fixture(params=["memory", pytest.param("real", marks=pytest.mark.broker)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A Pulsar to test on: the in-memory one, and a real one."""
    if request.param == "memory":
        yield MemoryWorld()
        return
    with ExitStack() as stack:
        connection = request.getfixturevalue("connection")
        yield RealWorld(connection, request.getfixturevalue("namespace"), stack)
