"""A mover in one process, without Spark: one pass over every source partition at a time.

It hosts the same router, bound, forwarder and claim as the Spark job. The in-memory Pulsar of
:mod:`delaylevel.testing` moves with it, and so do tests against a real broker.
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

# A level topic that was expanded is seen after so long; what is new there is ripe much later.
DESCRIPTION_LIFETIME_MS = 5000


class LocalMover:
    """Hands off what is ripe in a level topic, pass by pass.

    It goes on with the new partitions of a level topic that is expanded meanwhile.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        admin: the admin interface.
        description: the level topic.
        clock: says what time it is at the start of a pass.

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
        self._claim = PartitionLock(client, admin, self._sources, "local")
        self._next: dict[str, Position] = dict(self._claim.start_positions(self._sources))
        self._next_check_ms: dict[str, int] = {}
        self._described_ms = self._clock.now_ms()
        self._forwarder = Forwarder(client, admin, description, self._clock)

    def run_once(self) -> ForwardReport:
        """Hand off everything that is ripe now, and acknowledge it.

        Returns:
            What became of it.

        Raises:
            BrokerError: something was not confirmed; it is unacknowledged, and a later pass sends
                it again.
        """
        total = ForwardReport()
        now_ms = self._clock.now_ms()
        if not 0 <= now_ms - self._described_ms < DESCRIPTION_LIFETIME_MS:
            self._follow(now_ms)
        lead_ms = self._description.levels.smallest_lead_ms
        try:
            for source in self._sources:
                if now_ms < self._next_check_ms.get(source.topic, 0):
                    continue
                start = self._next[source.topic]
                bound = ready_bound(self._admin, source, start, now_ms, lead_ms)
                if bound.end > start:
                    for message in read_range(self._client, source.topic, start, bound.end):
                        self._forwarder.forward(source, message, now_ms)
                    total.add(self._forwarder.flush())
                    self._claim.acknowledge(source, bound.end)
                    self._next[source.topic] = bound.end
                self._next_check_ms[source.topic] = bound.next_check_ms
        finally:
            self._forwarder.close_targets()
        return total

    def _follow(self, now_ms: int) -> None:
        """Read the description again, and claim partitions that are new."""
        description = topics.describe(self._admin, self._description.topic)
        self._described_ms = now_ms
        if description == self._description:
            return
        known = {source.topic for source in self._sources}
        sources = source_partitions(description)
        new = [source for source in sources if source.topic not in known]
        if new:
            claim = PartitionLock(self._client, self._admin, new, "local")
            self._next.update(claim.start_positions(new))
            self._claim.merge(claim)
        self._sources = sources
        self._description = description
        self._forwarder.close()
        self._forwarder = Forwarder(self._client, self._admin, description, self._clock)

    def next_check_ms(self, source: SourcePartition) -> int:
        """Return when a pass will look at a source partition next, in ms since the epoch.

        A message that comes meanwhile is ripe no sooner, unless a wrong clock has stamped it.
        """
        return self._next_check_ms.get(source.topic, 0)

    def close(self) -> None:
        """Close producers and consumers; another mover may take over."""
        self._forwarder.close()
        self._claim.close()

    def __enter__(self) -> LocalMover:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
