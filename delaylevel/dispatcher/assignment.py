"""How the dispatchers that run share out the window partitions of one level topic.

Each keeps up a reader on the first log partition, under a subscription that bears its name: the
broker's statistics are the list of members. A member takes what is free while it has less than its
share and gives back what is more. The broker's exclusive subscription decides who owns a partition.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from delaylevel.cluster.failures import close_quietly
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.reader import open_idle_reader
from delaylevel.errors import BrokerError, ClientError
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.topics.stats import window_stats

_PREFIX = "delaylevel-dispatcher~"


@dataclass(frozen=True)
class GroupState:
    """What the broker says of a window topic.

    Attributes:
        members: the names of the dispatchers that run, sorted.
        owners: who consumes each window partition, by index; those that nobody does are missing.
    """

    members: tuple[str, ...]
    owners: Mapping[int, str]


@dataclass(frozen=True)
class Reassignment:
    """What a dispatcher is to do now.

    Attributes:
        give: partitions to give back.
        take: free partitions to take.
        knock: partitions of others; the broker looks whether their owner is alive when somebody
            asks for one.
    """

    give: tuple[int, ...] = ()
    take: tuple[int, ...] = ()
    knock: tuple[int, ...] = ()


def assign(standing: GroupState, me: str, mine: Collection[int], partitions: int) -> Reassignment:
    """Return what makes the shares equal, with as few moves as can be.

    Args:
        standing: what the broker says.
        me: my own name.
        mine: the partitions that I own.
        partitions: how many there are.
    """
    members = sorted({*standing.members, me})
    rank = members.index(me)
    quota = partitions // len(members) + (rank < partitions % len(members))
    owned = sorted(mine)
    if len(owned) > quota:
        return Reassignment(give=tuple(owned[quota:]))
    free = [index for index in range(partitions) if index not in standing.owners]
    free = [index for index in free if index not in mine]
    take = tuple(free[: quota - len(owned)])
    others = [index for index in range(partitions) if index not in mine and index not in free]
    return Reassignment(take=take, knock=tuple(others))


class Membership:
    """This process among the dispatchers of one level topic.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        admin: the admin interface.
        description: the level topic.
        name: of this dispatcher; made from host and process where None.

    Raises:
        BrokerError: the log topic cannot be read.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        description: LevelTopicDescription,
        name: str | None = None,
    ) -> None:
        self.name = name or f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        self._admin = admin
        self._first = description.journal_topic.partition(0)
        self._description = description
        try:
            self._reader = open_idle_reader(client, self._first.full, f"{_PREFIX}{self.name}~")
        except ClientError as error:
            raise BrokerError(f"cannot read {self._first} ({error.name})") from error

    def standing(self) -> GroupState:
        """Ask the broker who is there, and who owns what."""
        members = members_of(self._admin.partition_stats(self._first).subscriptions)
        return GroupState(members, window_stats(self._admin, self._description).owners)

    def close(self) -> None:
        """Leave."""
        close_quietly(self._reader, "reader")


def members_of(subscriptions: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the dispatchers among the subscriptions of the first log partition, sorted."""
    return tuple(
        sorted(
            name.removeprefix(_PREFIX).rpartition("~")[0]
            for name, subscription in subscriptions.items()
            if name.startswith(_PREFIX) and subscription.consumers
        )
    )
