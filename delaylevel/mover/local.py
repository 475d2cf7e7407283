"""A mover in one process, without Spark: one pass over all source partitions at a time.

It hosts the same router, ready bound, forwarder and partition lock as the Spark job.
:mod:`delaylevel.mover.service` runs it as a service, and the in-memory Pulsar of
:mod:`delaylevel.testing` pass by pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

from delaylevel.cluster.partition_lock import PartitionLock
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.reader import read_range
from delaylevel.cluster.targets.clients import TargetClients
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import Position
from delaylevel.model.report import ForwardReport
from delaylevel.model.source_partition import SourcePartition, source_partitions
from delaylevel.topics import registry as topics
from delaylevel.topics.description_cache import DescriptionCache
from delaylevel.topics.foreign_watch import ForeignSubscriptionWatch

from .forwarder import Forwarder
from .ready import SEARCH_THREADS, NextChecks, ReadyBound, ready_bound

#: Kind of this mover in the names of its consumers.
KIND = "local"

# One partition is read while the messages of the previous ones are confirmed, up to this number.
# A killed mover repeats no more than these.
_FLUSH_EVERY = 20_000
# Number of messages between two looks at a request to stop.
_LOOK_EVERY = 256


class LocalMover:
    """Mover that hands off the ready messages of one level topic, pass by pass.

    It also serves the new partitions of a level topic that is expanded meanwhile.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        clock: clock that is read at the start of a pass.
        target_client: function that returns a new client of the same cluster. Each target then has
            a connection of its own, and a throttled one delays no other. None to publish with
            ``client``.

    Raises:
        AlreadyRunningError: another mover has the level topic.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        description: LevelTopicDescription,
        clock: Clock | None = None,
        target_client: Callable[[], Any] | None = None,
    ) -> None:
        self._client = client
        self._admin = admin
        self._description = description
        self._clock = clock or SystemClock()
        self._sources = source_partitions(description)
        self._lock = PartitionLock(client, admin, self._sources, KIND)
        self._next: dict[str, Position] = dict(self._lock.start_positions(self._sources))
        self._next_checks = NextChecks(self._clock)
        self._descriptions = DescriptionCache(
            partial(topics.describe, admin, description.topic),
            description,
            now_s=self._clock.monotonic_s,
        )
        self._watch = ForeignSubscriptionWatch(admin)
        self._planned_s = self._clock.monotonic_s()
        self._failed = False
        self._clients = None if target_client is None else TargetClients(target_client)
        self._threads = ThreadPoolExecutor(SEARCH_THREADS, "delaylevel-search")
        self._forwarder = self._open_forwarder()

    @property
    def description(self) -> LevelTopicDescription:
        """The description of the level topic in use."""
        return self._description

    @property
    def connected(self) -> bool:
        """True if the consumers that lock the partitions are connected."""
        return self._lock.connected

    def run_once(self, stopping: Callable[[], bool] = lambda: False) -> ForwardReport:
        """Hand off all messages that are ready now, and acknowledge them.

        Args:
            stopping: function that returns True to end the pass early. What was handed off until
                then is acknowledged, and the next pass continues there.

        Raises:
            BrokerError: a message was not confirmed; it is unacknowledged, and a later pass sends
                it again.
        """
        total = ForwardReport()
        now_ms = self._next_checks.start_pass()
        self._use(self._descriptions.current())
        self._watch.look(self._description)
        lead_ms = self._description.levels.smallest_lead_ms
        due = [source for source in self._sources if now_ms >= self.next_check_ms(source)]
        found = self._threads.map(
            lambda source: ready_bound(
                self._admin, source, self._next[source.topic], now_ms, lead_ms
            ),
            due,
        )
        bounds = list(zip(due, found, strict=True))
        # All messages before these bounds are stored by now, so one read of the description after
        # this moment decides which targets are unknown.
        self._planned_s = self._clock.monotonic_s()
        # After a failure, each partition is confirmed alone, so that one which fails again does not
        # keep the others from being acknowledged.
        flush_every, self._failed = 0 if self._failed else _FLUSH_EVERY, True
        moved: list[tuple[SourcePartition, ReadyBound]] = []
        count = 0
        try:
            for source, bound in bounds:
                start = self._next[source.topic]
                if bound.end <= start:
                    self._next_checks[source.topic] = bound.next_check_ms
                    continue
                with closing(read_range(self._client, source.topic, start, bound.end)) as messages:
                    complete = False
                    while not (complete or stopping()):
                        portion = _Portion(messages, _FLUSH_EVERY - count, stopping)
                        count += self._forwarder.forward_all(source, portion, self._clock.now_ms)
                        complete = portion.complete
                        moved.append((source, bound if complete else portion.bound(now_ms)))
                        if count >= flush_every:
                            total.add(self._confirm(moved))
                            moved, count = [], 0
                if stopping():
                    break
            total.add(self._confirm(moved))
            self._failed = False
        finally:
            self._forwarder.close_targets()
        return total

    def _confirm(self, moved: Sequence[tuple[SourcePartition, ReadyBound]]) -> ForwardReport:
        """Wait for the confirmations of everything that was read, and acknowledge it."""
        report = self._forwarder.flush()
        for source, bound in moved:
            self._lock.acknowledge(source, bound.end)
            self._next[source.topic] = bound.end
            self._next_checks[source.topic] = bound.next_check_ms
        return report

    def _use(self, description: LevelTopicDescription) -> None:
        """Use a description that was read again, and lock new partitions."""
        if description == self._description:
            return
        sources = source_partitions(description)
        new = [source for source in sources if source.topic not in self._next]
        if new:
            lock = PartitionLock(self._client, self._admin, new, KIND)
            self._next.update(lock.start_positions(new))
            self._lock.merge(lock)
        self._sources = sources
        self._description = description
        self._forwarder.close()
        self._forwarder = self._open_forwarder()

    def _open_forwarder(self) -> Forwarder:
        client_of = None if self._clients is None else self._clients.of
        return Forwarder(
            self._client,
            self._admin,
            self._description,
            self._clock,
            refreshed=lambda: self._descriptions.refresh(self._planned_s),
            client_of=client_of,
        )

    def next_check_ms(self, source: SourcePartition) -> int:
        """Return the time at which a pass checks a partition again, in ms since the epoch.

        A message that arrives before is not ready sooner, unless its publish time is wrong.
        """
        return self._next_checks[source.topic]

    def close(self) -> None:
        """Close producers and consumers; another mover may take over."""
        self._forwarder.close()
        if self._clients is not None:
            self._clients.close()
        self._threads.shutdown(wait=False)
        self._lock.close()

    def __enter__(self) -> LocalMover:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Portion:
    """The next messages of a range, up to a limit; the range is complete if no more follow."""

    def __init__(
        self, messages: Iterator[ParkedMessage], limit: int, stopping: Callable[[], bool]
    ) -> None:
        self._messages = messages
        self._limit = limit
        self._stopping = stopping
        self._last: ParkedMessage | None = None
        self.complete = False

    def __iter__(self) -> Iterator[ParkedMessage]:
        left, stopping = self._limit, self._stopping
        for message in self._messages:
            self._last = message
            yield message
            left -= 1
            if not left or (not left % _LOOK_EVERY and stopping()):
                return
        self.complete = True

    def bound(self, now_ms: int) -> ReadyBound:
        """Return the end of an incomplete portion; the next pass checks its partition at once."""
        assert self._last is not None
        return ReadyBound(self._last.position.next, now_ms)
