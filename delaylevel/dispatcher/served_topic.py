"""Level topics that a dispatcher serves."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.repeated_warning import RepeatedWarning
from delaylevel.cluster.rules import Explainer
from delaylevel.errors import LevelTopicError
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.topics import registry as topics
from delaylevel.topics.description_cache import DescriptionCache
from delaylevel.topics.stats import PartitionStatus, window_stats

from .assignment import GroupState, Membership
from .owner_thread import FAILURES, OwnerThread
from .pause_log import PauseLog

log = logging.getLogger(__name__)

_ALL = -1


@dataclass(eq=False)
class ServedTopic:
    """A level topic that is served, and the partitions of it that this process owns.

    Attributes:
        explainer: source of the texts of errors.
        lost: partitions whose owner here has failed since the group was read.
        failures: texts of the present failures, by partition; -1 for that of the level topic.
    """

    descriptions: DescriptionCache
    membership: Membership
    warning: RepeatedWarning
    explainer: Explainer
    owners: dict[int, OwnerThread] = field(default_factory=dict)
    owner_warnings: dict[int, RepeatedWarning] = field(default_factory=dict)
    retry_s: dict[int, float] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    group: GroupState | None = None
    group_s: float = 0.0
    probe_s: float = 0.0
    probes: int = 0
    pauses: PauseLog = field(default_factory=PauseLog)
    failures: dict[int, str] = field(default_factory=dict)

    @property
    def description(self) -> LevelTopicDescription:
        """The latest description of the level topic."""
        return self.descriptions.latest()

    @property
    def is_alone(self) -> bool:
        """True if this process is the only member of the group, and has all partitions."""
        alone = self.group is not None and self.group.members == (self.membership.name,)
        return alone and len(self.owners) == self.description.window_partitions

    def watch_pauses(self) -> None:
        """Log pauses that have begun or ended, and let the owners look at them at once."""
        if self.pauses.note(self.description):
            for owner in self.owners.values():
                owner.owner.events.wake()

    @property
    def problem(self) -> str:
        """The text of a present failure; empty for none."""
        return next(iter(self.failures.values()), "")

    def failed(self, error: Exception) -> None:
        """Log that the group or a partition of it cannot be used now."""
        self.failures[_ALL] = text = self.explainer.explain(self.description, error)
        self.warning.failed(text)

    def works(self) -> None:
        """Log the end of the failure, if there was one."""
        self.failures.pop(_ALL, None)
        self.warning.over()

    def watch_owner(self, owner: OwnerThread) -> None:
        """Log the failure of an owner, and the end of the failure once it releases messages."""
        warning = self.owner_warnings.get(owner.partition)
        if owner.is_alive():
            if warning is not None and owner.stats.now().state == "releasing":
                warning.over()
                self.failures.pop(owner.partition, None)
        elif isinstance(owner.failure, FAILURES):
            if warning is None:
                partition = self.description.window_topic.partition(owner.partition).full
                warning = RepeatedWarning(log, f"window partition {partition}")
                self.owner_warnings[owner.partition] = warning
            text = self.explainer.explain(self.description, owner.failure)
            self.failures[owner.partition] = text
            warning.failed(text)


def served(admin: TopicAdmin, name: str, *, search: bool = False) -> LevelTopicDescription:
    """Return the description of a level topic that a dispatcher can serve.

    Args:
        name: name of the level topic or of its business topic.
        search: as for :func:`delaylevel.topics.describe`.

    Raises:
        LevelTopicError: it is missing, or its final window is not ``tracker``.
    """
    description = topics.describe(admin, name, search=search)
    check_dispatched(description)
    return description


def check_dispatched(description: LevelTopicDescription) -> None:
    """Raise LevelTopicError if a level topic has no window for a dispatcher."""
    if description.final_window is not FinalWindow.TRACKER:
        raise LevelTopicError(
            f"level topic {description.topic} has the final window "
            f"{description.final_window.value!r}: the broker itself delivers its messages, and "
            "there is nothing to dispatch"
        )


def partition_owners(admin: TopicAdmin, name: str) -> tuple[PartitionStatus, ...]:
    """Return the owner and the backlog of each window partition, by index.

    Raises:
        LevelTopicError: as for `served`.
    """
    return window_stats(admin, served(admin, name, search=True)).reported
