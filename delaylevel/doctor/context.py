"""What checks look at: one cluster, one level topic of it, asked once for each fact."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from delaylevel.cluster.admin import Admin
from delaylevel.cluster.connection import Connection
from delaylevel.cluster.port import (
    BrokerSettings,
    NamespacePolicies,
    PartitionStats,
    TopicMetadata,
    TopicPolicies,
)
from delaylevel.errors import NotFoundError, PermissionDeniedError
from delaylevel.model.clock import Clock
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import LevelTopicDescription, Member
from delaylevel.model.topic_name import TopicName
from delaylevel.topics import members as family
from delaylevel.topics.stats import LevelTopicStats, read_stats, topic_stats
from delaylevel.topics.status import LevelTopicStatus, status_of

_THREADS = 8
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class ExamOptions:
    """What the cluster cannot say of itself.

    Attributes:
        delivery: what the mover promises.
        trigger_ms: how often the mover looks, where that is known.
        spill_dir: where the dispatcher of this machine spills, to look at its disk.
        bookie_conf: a bookie's configuration file.
    """

    delivery: Delivery = Delivery.AT_LEAST_ONCE
    trigger_ms: int | None = None
    spill_dir: Path | None = None
    bookie_conf: Path | None = None


class ClusterContext:
    """A cluster, as far as checks ask for it.

    Args:
        connection: where it is.
        admin: its admin interface.
        clock: the clock of this machine.
        options: what it cannot say of itself.
    """

    def __init__(
        self, connection: Connection, admin: Admin, clock: Clock, options: ExamOptions
    ) -> None:
        self.connection = connection
        self.admin = admin
        self.clock = clock
        self.options = options

    @cached_property
    def settings(self) -> BrokerSettings:
        """The broker's own configuration; all None where it may not be read."""
        return self.admin.broker_settings()

    @cached_property
    def configuration(self) -> dict[str, str] | None:
        """Every setting of the broker; None where they may not be read."""
        try:
            return self.admin.runtime_configuration()
        except PermissionDeniedError:
            return None

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Ask for several things side by side; results are in the order of the items."""
        with ThreadPoolExecutor(_THREADS, "delaylevel-doctor") as pool:
            return list(pool.map(function, items))


class LevelTopicContext:
    """One level topic.

    Args:
        cluster: its cluster.
        description: what it says of itself.
    """

    def __init__(self, cluster: ClusterContext, description: LevelTopicDescription) -> None:
        self.cluster = cluster
        self.admin = cluster.admin
        self.options = cluster.options
        self.description = description
        self.members = tuple(description.members())
        self.now_ms = cluster.clock.now_ms()

    @cached_property
    def policies(self) -> NamespacePolicies:
        """What applies in its namespace."""
        return self.admin.namespace_policies(self.description.name.namespace_path)

    @cached_property
    def stats(self) -> LevelTopicStats:
        """The statistics of its described partitions."""
        return read_stats(self.admin, self.description, as_described=True)

    @cached_property
    def status(self) -> LevelTopicStatus:
        """Its status."""
        return status_of(self.admin, self.stats, self.now_ms)

    @cached_property
    def metadata(self) -> dict[Member, TopicMetadata | None]:
        """Partitions and properties of every member; None for one that is missing."""
        found = self.cluster.each(lambda m: family.metadata_of(self.admin, m.topic), self.members)
        return dict(zip(self.members, found, strict=True))

    @cached_property
    def topic_policies(self) -> dict[Member, TopicPolicies]:
        """The policies that are set for every member that exists."""
        if self.cluster.settings.topic_policies is False:
            return {}
        there = [member for member, found in self.metadata.items() if found is not None]
        found = self.cluster.each(lambda m: self.admin.topic_policies(m.topic), there)
        return dict(zip(there, found, strict=True))

    @cached_property
    def targets(self) -> dict[TopicName, dict[TopicName, PartitionStats] | None]:
        """The statistics of every target's partitions; None for a target that is missing."""
        names = [TopicName.parse(target) for target in self.description.targets]
        found = self.cluster.each(lambda name: topic_stats(self.admin, name), names)
        return dict(zip(names, found, strict=True))

    def cursors(self, partition: TopicName) -> dict[str, Any]:
        """Return the cursors of a partition, as the broker says them; none if it is missing."""
        try:
            found: dict[str, Any] = self.admin.internal_stats(partition)["cursors"]
        except NotFoundError:
            return {}
        return found
