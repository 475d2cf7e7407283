"""A mover in one process, without Spark: one pass over all source partitions at a time.

It hosts the same router, ready bound, forwarder and partition lock as the Spark job. The in-memory
Pulsar of :mod:`delaylevel.testing` and tests against a real broker use it.
"""

from __future__ import annotations

from typing import Any

from delaylevel.cluster.partition_lock import PartitionLock
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.reader import read_range
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.position import Position
from delaylevel.model.report import ForwardReport
from delaylevel.model.source_partition import SourcePartition, source_partitions
from delaylevel.topics import registry as topics

from .forwarder import Forwarder
from .ready import ready_bound

# The longest time until an expansion is noticed; messages in new partitions are ready much later.
DESCRIPTION_LIFETIME_MS = 5000


class LocalMover:
    """Mover that hands off the ready messages of one level topic, pass by pass.

    It also serves the new partitions of a level topic that is expanded meanwhile.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        clock: clock that is read at the start of a pass.

    Raises:
        AlreadyRunningError: another mover has the level topic.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        description: LevelTopicDescription,
        clock: Clock | None = None,
    ) -> None:
        self._client = client
        self._admin = admin
        self._description = description
        self._clock = clock or SystemClock()
        self._sources = source_partitions(description)
        self._lock = PartitionLock(client, admin, self._sources, "local")
        self._next: dict[str, Position] = dict(self._lock.start_positions(self._sources))
        self._next_check_ms: dict[str, int] = {}
        self._described_ms = self._clock.now_ms()
        self._forwarder = Forwarder(client, admin, description, self._clock)

    def run_once(self) -> ForwardReport:
        """Hand off all messages that are ready now, and acknowledge them.

        Raises:
            BrokerError: a message was not confirmed; it is unacknowledged, and a later pass sends
                it again.
        """
        total = ForwardReport()
        now_ms = self._clock.now_ms()
        if not 0 <= now_ms - self._described_ms < DESCRIPTION_LIFETIME_MS:
            self._refresh_description(now_ms)
        lead_ms = self._description.levels.smallest_lead_ms
        try:
            for source in self._sources:
                if now_ms < self.next_check_ms(source):
                    continue
                start = self._next[source.topic]
                bound = ready_bound(self._admin, source, start, now_ms, lead_ms)
                if bound.end > start:
                    for message in read_range(self._client, source.topic, start, bound.end):
                        self._forwarder.forward(source, message, now_ms)
                    total.add(self._forwarder.flush())
                    self._lock.acknowledge(source, bound.end)
                    self._next[source.topic] = bound.end
                self._next_check_ms[source.topic] = bound.next_check_ms
        finally:
            self._forwarder.close_targets()
        return total

    def _refresh_description(self, now_ms: int) -> None:
        """Read the description again, and lock new partitions."""
        description = topics.describe(self._admin, self._description.topic)
        self._described_ms = now_ms
        if description == self._description:
            return
        sources = source_partitions(description)
        new = [source for source in sources if source.topic not in self._next]
        if new:
            lock = PartitionLock(self._client, self._admin, new, "local")
            self._next.update(lock.start_positions(new))
            self._lock.merge(lock)
        self._sources = sources
        self._description = description
        self._forwarder.close()
        self._forwarder = Forwarder(self._client, self._admin, description, self._clock)

    def next_check_ms(self, source: SourcePartition) -> int:
        """Return the time at which a pass checks a partition again, in ms since the epoch.

        A message that arrives before is not ready sooner, unless its publish time is wrong.
        """
        return self._next_check_ms.get(source.topic, 0)

    def close(self) -> None:
        """Close producers and consumers; another mover may take over."""
        self._forwarder.close()
        self._lock.close()

    def __enter__(self) -> LocalMover:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
