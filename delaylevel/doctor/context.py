"""Facts for the checks: a cluster and one level topic, each requested once; and results."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property, partial

from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.port import BrokerSettings, PartitionStats, TopicMetadata
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.rules import Facts, Problem, read
from delaylevel.cluster.targets.receivers import topic_stats
from delaylevel.cluster.threads import in_parallel
from delaylevel.errors import PermissionDeniedError
from delaylevel.model.clock import Clock
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Member, Mover
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.members import metadata_of
from delaylevel.topics.status import LevelTopicStatus, status


class State(str, enum.Enum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """The result of one check on one subject.

    Attributes:
        note: a remark on a check without problems, or the reason why it was skipped.
        check: the check's name.
        subject: the level topic, or the cluster.
    """

    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()
    note: str = ""
    skipped: bool = False
    check: str = ""
    subject: str = ""

    @property
    def state(self) -> State:
        """The result of the check."""
        if self.problems:
            return State.FAILED
        if self.warnings:
            return State.WARNING
        return State.SKIPPED if self.skipped else State.OK

    @property
    def says(self) -> str:
        """The first problem or warning, or the remark, in one line."""
        problems = self.problems or self.warnings
        if not problems:
            return f"not checked: {self.note}" if self.skipped else self.note
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return problems[0].says + more

    @property
    def remedies(self) -> tuple[str, ...]:
        """The remedies of all problems and warnings, without duplicates."""
        return tuple(dict.fromkeys(each.remedy for each in (*self.problems, *self.warnings)))


@dataclass
class ClusterContext:
    """Facts about a cluster.

    Attributes:
        clock: that of this machine.
        delivery: the guarantee of the dispatchers, which the cluster does not know.
    """

    connection: Connection
    admin: Admin
    clock: Clock
    delivery: Delivery = Delivery.AT_LEAST_ONCE

    @cached_property
    def settings(self) -> BrokerSettings:
        """The broker's settings for topics; all None without the permission to read them."""
        return self.admin.broker_settings()

    @cached_property
    def configuration(self) -> dict[str, str] | None:
        """All settings of the broker; None without the permission to read them."""
        try:
            return self.admin.runtime_configuration()
        except PermissionDeniedError:
            return None

    def number(self, setting: str, default: int) -> tuple[int, str]:
        """Return a number in the broker's settings, and words behind it if it is assumed."""
        told = (self.configuration or {}).get(setting)
        if told:
            return int(told), ""
        return default, f" ({setting}, assumed: only superusers may read it)"


class LevelTopicContext:
    """Facts about one level topic."""

    def __init__(self, cluster: ClusterContext, description: LevelTopicDescription) -> None:
        self.cluster = cluster
        self.admin = cluster.admin
        self.description = description
        self.now_ms = cluster.clock.now_ms()

    @cached_property
    def status(self) -> LevelTopicStatus:
        """Its status."""
        return status(self.admin, self.description, self.now_ms)

    @cached_property
    def metadata(self) -> dict[Member, TopicMetadata | None]:
        """Partitions and properties of every member topic; None for a missing one."""
        members = list(self.description.members())
        found = in_parallel(lambda member: metadata_of(self.admin, member.topic), members)
        return dict(zip(members, found, strict=True))

    @cached_property
    def rules(self) -> Facts:
        """The rules of the cluster that are in force for it."""
        return read(self.admin, self.description)

    @cached_property
    def targets(self) -> dict[TopicName, dict[TopicName, PartitionStats] | None]:
        """The statistics of every target's partitions; None for a missing target."""
        names = [TopicName.parse(target) for target in self.description.targets]
        found = in_parallel(partial(topic_stats, self.admin), names)
        return dict(zip(names, found, strict=True))

    @property
    def present_targets(self) -> dict[TopicName, dict[TopicName, PartitionStats]]:
        """The statistics of the partitions of every target that exists."""
        return {name: stats for name, stats in self.targets.items() if stats is not None}

    @cached_property
    def broker_delays(self) -> dict[TopicName, int]:
        """The longest delay that we request from the broker, in ms, by topic."""
        description, found = self.description, {}
        if description.mover is Mover.FUNCTION:
            for index, level in enumerate(description.levels):
                longest_ms = level.hand_off_after_ms(level.partitions - 1)
                found[description.level_topic(index)] = longest_ms
            found[description.held_topic] = description.hold_pause_ms
        if description.final_window is FinalWindow.BROKER:
            finest = description.levels[-1]
            found.update(dict.fromkeys(self.present_targets, finest.near_due_ms))
        return found
