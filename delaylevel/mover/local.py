"""A mover in one process, without Spark: one pass over all source partitions at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from delaylevel.cluster.locks import PartitionLock
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.reader import read_range
from delaylevel.cluster.targets.pool import TargetClients
from delaylevel.errors import BrokerError
from delaylevel.model.clock import Clock, SteadyClock, SystemClock
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import Position, SourcePartition, source_partitions
from delaylevel.model.router import Router
from delaylevel.topics import registry as topics
from delaylevel.topics.roster import RESTING_S, DescriptionCache

from .forwarder import Forwarder
from .ready import NextChecks, ReadyQueue, ReadyRange, ReadySearch, first_due_ms, search_all

# One partition is read while the messages of the previous ones are confirmed, up to this number.
# A killed mover repeats no more than these.
_FLUSH_EVERY = 20_000
# Number of messages between two looks at a request to stop.
_LOOK_EVERY = 256


class LocalMover:
    """Mover that hands off the ready messages of one level topic, pass by pass.

    Args:
        target_client: opens a client of the same cluster for each target, so that a throttled one
            delays no other; None to publish with ``client``.
        descriptions: the copy of the description that this process has already; it has ``clock``.

    Attributes:
        postponed: see `ReadyQueue`; for the mover that replaces this one after a failure.
        made_progress: True if the last pass has acknowledged something.
    """

    # The kind of this mover in the names of its consumers, and the way of a message.
    _kind = "local"
    _router = Router

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        description: LevelTopicDescription,
        clock: Clock | None = None,
        target_client: Callable[[], Any] | None = None,
        descriptions: DescriptionCache | None = None,
    ) -> None:
        self._client = client
        self._admin = admin
        self.description = description
        self._clock = SteadyClock(clock or SystemClock())
        self._sources = source_partitions(description)
        self.lock = PartitionLock(client, admin, self._sources, self._kind)
        self._next: dict[str, Position] = dict(self.lock.start_positions(self._sources))
        self.next_checks = NextChecks(self._clock)
        self._ready = ReadyQueue()
        self.postponed = self._ready.postponed
        self.made_progress = False
        # What was handed off in this pass and is not confirmed: ranges, and number of messages.
        self._moved: list[ReadyRange] = []
        self._count = 0
        self._descriptions = descriptions or DescriptionCache(
            partial(topics.describe, admin, description.topic),
            description,
            now_s=self._clock.monotonic_s,
        )
        self._ready_search = ReadySearch(
            client, admin, lambda: self.lock.connected, f"level topic {description.topic}"
        )
        self._planned_s = self._clock.monotonic_s()
        self._clients = TargetClients(client, target_client)
        self._forwarder = self._open_forwarder()

    @property
    def behind(self) -> bool:
        """True if the last pass left ready messages, so that the next one should begin at once."""
        return bool(self._ready)

    def run_once(
        self, stopping: Callable[[], bool] = lambda: False, longest_s: float = math.inf
    ) -> ForwardReport:
        """Hand off all messages that are ready now, the earliest due first, and acknowledge them.

        A pass that ends early has acknowledged what it handed off. After a BrokerError, a later
        pass sends again what was not confirmed.
        """
        now_ms = self.next_checks.start_pass()
        if self.next_checks.stepped:
            self._ready.clear()  # these were found by the wrong time
        # What is published to a new partition is ready after a unit at the earliest.
        smallest_ms = min(level.unit_ms for level in self.description.levels)
        self._use(self._descriptions.known(min(RESTING_S, smallest_ms / 2000)))
        self._ready.forgive(self._clock.monotonic_s())
        failure = self._find_ready(now_ms)
        if self._ready:
            self._use(self._descriptions.known())
        # All messages before these bounds are stored by now, so one read of the description after
        # this moment decides which targets are unknown.
        self._planned_s = self._clock.monotonic_s()
        end_s = self._planned_s + longest_s

        def is_over() -> bool:
            return self._clock.monotonic_s() >= end_s or stopping()

        # After a failure, each partition is confirmed alone, so that one which fails again does not
        # keep the others from being acknowledged.
        flush_every = 0 if self.postponed else _FLUSH_EVERY
        total, topic = ForwardReport(), ""
        self._moved, self._count, self.made_progress = [], 0, False
        try:
            while self._ready and not is_over():
                item = self._ready.take()
                topic = item.source.topic
                self._hand_off(item, flush_every, total, is_over)
            self._confirm(total)
            if not self._ready:
                self.postponed.clear()
        except BaseException:
            if topic:
                self._ready.fail(topic, self._clock.monotonic_s())
            raise
        finally:
            self._forwarder.close_targets()
        if failure is not None:
            raise failure
        return total

    def _find_ready(self, now_ms: int) -> BrokerError | None:
        """Add the ready messages of partitions, unless some are known; return the first failure."""
        failure: BrokerError | None = None
        due = [
            source
            for source in self._sources
            if now_ms >= self.next_checks[source.topic] and source.topic not in self._ready
        ]
        for item in search_all(partial(self._search, now_ms), due):
            if isinstance(item, BrokerError):
                failure = failure or item
            elif item.end > self._next[item.source.topic]:
                self._ready[item.source.topic] = item
            else:
                self.next_checks[item.source.topic] = item.next_check_ms
        return failure

    def _search(self, now_ms: int, source: SourcePartition) -> ReadyRange:
        start, known_ms = self._next[source.topic], self.next_checks[source.topic]
        lead_ms = self.description.levels.smallest_lead_ms
        return self._ready_search.ready_range(source, start, now_ms, lead_ms, known_ms)

    def _read(
        self, source: SourcePartition, start: Position, end: Position
    ) -> Generator[ParkedMessage, None, None]:
        return read_range(self._client, source.topic, start, end)

    def _hand_off(
        self, item: ReadyRange, flush_every: int, total: ForwardReport, is_over: Callable[[], bool]
    ) -> None:
        """Hand off a range as long as it is the most urgent one, and add the rest to the queue."""
        source, start = item.source, self._next[item.source.topic]
        last: ParkedMessage  # of a portion
        complete = False

        def portion(limit: int) -> Iterator[ParkedMessage]:
            nonlocal last, complete
            for left, last in zip(reversed(range(limit)), messages, strict=False):
                yield last
                if not left or (not left % _LOOK_EVERY and is_over()):
                    return
            complete = True

        with closing(self._read(source, start, item.end)) as messages:
            while True:
                self._count += self._forwarder.forward_all(
                    source, portion(_FLUSH_EVERY - self._count)
                )
                # An incomplete range is checked again at once.
                done = item if complete else replace(item, end=last.position.next, next_check_ms=0)
                self._moved.append(done)
                if self._count >= flush_every:
                    self._confirm(total)
                if complete:
                    return
                ready_ms, now_ms = source.ready_ms(last.publish_ms), self._clock.now_ms()
                item = replace(item, due_ms=first_due_ms(source, ready_ms, now_ms))
                if not self._ready.is_first(item) or is_over():
                    self._ready[item.source.topic] = item
                    return

    def _confirm(self, total: ForwardReport) -> None:
        """Wait for the confirmations of everything that was read, and acknowledge it."""
        total.add(self._forwarder.flush())
        for item in self._moved:
            self.lock.acknowledge(item.source, item.end)
            topic = item.source.topic
            self._next[topic] = item.end
            self.next_checks[topic] = item.next_check_ms
            self.postponed.pop(topic, None)
            self.made_progress = True
        self._moved, self._count = [], 0

    def _use(self, description: LevelTopicDescription) -> None:
        """Use a description that was read again, and lock new partitions."""
        if description == self.description:
            return
        sources = source_partitions(description)
        new = [source for source in sources if source.topic not in self._next]
        if new:
            lock = PartitionLock(self._client, self._admin, new, self._kind)
            self._next.update(lock.start_positions(new))
            self.lock.merge(lock)
        self._sources = sources
        self.description = description
        self._forwarder.close()
        self._forwarder = self._open_forwarder()

    def _open_forwarder(self) -> Forwarder:
        return Forwarder(
            self._client,
            self._admin,
            self.description,
            self._clock,
            self._router(self.description.levels),
            refreshed=lambda: self._descriptions.refresh(self._planned_s),
            client_of=self._clients.of,
            connected=lambda: self.lock.connected,
        )

    def close(self) -> None:
        """Close producers and consumers; another mover may take over."""
        try:
            self._forwarder.close()
            self._clients.close()
        finally:
            # Whatever fails: this process would go on to refuse every later mover, also its own.
            self.lock.close()
