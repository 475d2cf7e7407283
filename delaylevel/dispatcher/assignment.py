"""Assignment of the window partitions of a level topic to the running dispatchers.

Each dispatcher keeps a reader open on the first journal partition, under a subscription that
carries its name and delivery guarantee: the broker's statistics are the list of members. A member
acquires free partitions while it has less than its share, and revokes those beyond it. The broker's
exclusive subscription decides who owns a partition.

All members have the same delivery guarantee. What one of them publishes without a sequence ID, the
broker does not recognize as a copy of what another one sends with one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from delaylevel.cluster.failures import close_quietly
from delaylevel.cluster.locks import owner_in
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.reader import open_idle_reader
from delaylevel.errors import (
    BrokerError,
    BrokerUnreachableError,
    ClientError,
    LevelTopicError,
)
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.position import SourcePartition
from delaylevel.topics.status import window_stats

from .host import Host
from .stats import OwnerStats


def window_sources(
    description: LevelTopicDescription, partition: int
) -> tuple[SourcePartition, SourcePartition]:
    """Return a window partition and its journal partition."""
    window = description.window_topic.partition(partition).full
    journal = description.journal_topic.partition(partition).full
    return (
        SourcePartition(description.topic, window, Role.WINDOW, -1, partition, 0),
        SourcePartition(description.topic, journal, Role.JOURNAL, -1, partition, 0),
    )


_PREFIX = "delaylevel-dispatcher~"


@dataclass(frozen=True)
class GroupState:
    """The members of a group of dispatchers, and the partitions that they own."""

    members: tuple[str, ...]
    owners: Mapping[int, str]  # by window partition; those without are missing
    # Partitions whose broker does not answer. Until another one takes over, nobody can acquire
    # them, and it is not known if they have an owner.
    unknown: Collection[int] = ()


@dataclass(frozen=True)
class ServedGroup:
    """A level topic that this process serves, and the owners of its window partitions."""

    description: LevelTopicDescription
    name: str
    group: GroupState | None  # as the broker last described it; None before that
    age_s: float  # of the group
    owners: Mapping[int, Host]  # those of this process
    stats: Mapping[int, OwnerStats]  # also of further processes
    problem: str = ""  # why it or a partition is not served; empty for none
    starting: int = 0  # number of further processes that are starting
    # Why the last attempt to acquire a partition was refused, by partition.
    refusals: Mapping[int, str] = field(default_factory=dict)

    @property
    def unowned(self) -> list[int]:
        """The window partitions without an owner, here or elsewhere; all if it is not known."""
        owned = {*self.stats, *(() if self.group is None else self.group.owners)}
        return [index for index in range(self.description.window_partitions) if index not in owned]


def share_of(members: Collection[str], me: str, partitions: int) -> int:
    """Return the number of partitions of one member."""
    rank = sorted(members).index(me)
    return partitions // len(members) + (rank < partitions % len(members))


def assign(
    group: GroupState,
    me: str,
    mine: Collection[int],
    partitions: int,
    joining: Collection[str] = (),
) -> tuple[list[int], list[int], list[int]]:
    """Return the changes for equal shares, also of ``joining`` members, with the fewest moves.

    These are partitions to give up, to acquire, and, of other members, to probe: if a dispatcher
    tries to acquire one, the broker checks whether its owner is alive.
    """
    # Each member decides alone, from statistics that may be a moment old. That is safe, because it
    # gives back only what it has beyond its share and takes only what is free, and the broker lets
    # one consumer have a partition.
    share = share_of({*group.members, *joining, me}, me, partitions)
    owned = sorted(mine)
    if len(owned) > share:
        return owned[share:], [], []
    others = [index for index in range(partitions) if index not in mine]
    taken = {*group.owners, *group.unknown}
    free = [index for index in others if index not in taken]
    return [], free[: share - len(owned)], [index for index in others if index in group.owners]


class Membership:
    """The membership of this process in the dispatchers of one level topic."""

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        description: LevelTopicDescription,
        delivery: Delivery,
        name: str,
    ) -> None:
        self._delivery = delivery.value
        self.name = name
        self._client = client
        self._admin = admin
        self._reader: Any = None  # until the group is read
        self._first = description.journal_topic.partition(0)
        self._description = description

    def read_group(self) -> GroupState:
        """Enter the group, and read it and the owners; refuse one with another guarantee."""
        if self._reader is None:
            self._read_members()
            prefix = f"{_PREFIX}{self._delivery}~{self.name}~"
            try:
                self._reader = open_idle_reader(self._client, self._first.full, prefix)
            except ClientError as error:
                raise BrokerError(f"cannot read {self._first} ({error.name})") from error
            try:
                self._read_members()  # of two that enter at once, one sees the other
            except BaseException:
                self.close()
                raise
        members = self._read_members()  # one that was away before may have come back
        if self.name not in members:
            # The reader may be one of an earlier client, whose hosts are all away: see
            # `FailoverClient`. Others must see this dispatcher and its guarantee: it enters again.
            self.close()
        try:
            rows = window_stats(self._admin, self._description)
        except BrokerUnreachableError:
            return GroupState(members, *self._each_owner())
        owners = {row.partition: row.consumers[0] for row in rows if row.consumers}
        return GroupState(members, owners)

    def is_still(self, members: Collection[str]) -> bool:
        """Return True if the group has the same members as before; it was entered before."""
        return self._read_members() == tuple(sorted(members))

    def _read_members(self) -> tuple[str, ...]:
        """Return the members in order; refuse a group with another delivery guarantee."""
        stats = self._admin.partition_stats(self._first)
        members: list[str] = []
        for reader, each in sorted(stats.subscriptions.items()):
            if not (reader.startswith(_PREFIX) and each.consumers):
                continue
            delivery, _, name = reader.removeprefix(_PREFIX).rpartition("~")[0].partition("~")
            if delivery != self._delivery:
                raise LevelTopicError(
                    f"dispatcher {name} serves level topic {self._description.topic} with delivery "
                    f"{delivery!r}, and this one has {self._delivery!r}: all dispatchers of a "
                    "level topic need the same --delivery. Use that one, or stop the others"
                )
            members.append(name)
        return tuple(sorted({*members}))

    def _each_owner(self) -> tuple[dict[int, str], frozenset[int]]:
        """Return the owners of the window partitions that are served, and the other partitions."""
        owners: dict[int, str] = {}
        unknown: list[int] = []
        partitions = self._description.window_partitions
        for index in range(partitions):
            name = self._description.window_topic.partition(index)
            try:
                owner = owner_in(self._admin.partition_stats(name))
            except BrokerUnreachableError:
                unknown.append(index)
                if len(unknown) == partitions:
                    raise
                continue
            if owner is not None:
                owners[index] = owner.name
        return owners, frozenset(unknown)

    def close(self) -> None:
        """Leave the group."""
        if self._reader is not None:
            close_quietly(self._reader, "reader")
            self._reader = None
