"""Deletion of level topics, and the pending entries that it would lose."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from delaylevel.cluster.locks import closed_to_producers
from delaylevel.cluster.port import OperatorAdmin, TopicAdmin
from delaylevel.errors import (
    ConflictError,
    InvalidInputError,
    LevelTopicError,
    NotFoundError,
    StillPendingError,
)
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.topic_name import TopicName

from .stats import LevelTopicStats, read_stats


@dataclass(frozen=True)
class PendingEntries:
    """Numbers of entries that a deletion of the level topic would lose. A batch is one entry.

    Attributes:
        parked: entries in the levels.
        held: entries whose target could not be written.
        window: entries in the window topic that are not released yet.
        dead_letters: entries that could not be understood.
    """

    parked: int = 0
    held: int = 0
    window: int = 0
    dead_letters: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return self.parked + self.held + self.window + self.dead_letters

    def __str__(self) -> str:
        parts = [
            (self.parked, "parked"),
            (self.held, "held"),
            (self.window, "in the window"),
            (self.dead_letters, "dead letters"),
        ]
        listed = ", ".join(f"{count:,} {name}" for count, name in parts if count)
        return f"{self.total:,} entries" + (f" ({listed})" if listed else "")


def pending_entries(admin: TopicAdmin, description: LevelTopicDescription) -> PendingEntries:
    """Return the entries of a level topic that are not acknowledged; a missing topic has none.

    Raises:
        LevelTopicError: the broker does not report a partition, so that its contents are unknown.
    """
    # All partitions that exist, described or not: a deletion takes them all.
    stats = read_stats(admin, description)
    for member in stats.members:
        if member.reported and member.unreported:
            raise LevelTopicError(
                f"the broker reports no statistics of {member.unreported[0].topic}: try again"
            )
    return PendingEntries(
        parked=stats.backlog_entries(Role.LEVEL),
        held=stats.backlog_entries(Role.HELD),
        window=stats.backlog_entries(Role.WINDOW),
        dead_letters=stats.backlog_entries(Role.DEAD_LETTER),
    )


def delete(
    client: Any,
    admin: OperatorAdmin,
    description: LevelTopicDescription,
    *,
    discard: int | None = None,
) -> PendingEntries:
    """Delete a level topic with all its member topics; business topics stay.

    Nothing is deleted while entries are pending, or while a producer, mover or dispatcher is
    connected. No producer can open the topics while the entries are counted, so whatever a producer
    was told is stored counts. A refusal changes nothing. The level topic itself is deleted last, so
    that an interrupted deletion can be repeated.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        discard: number of pending entries to throw away; it must match
            :attr:`PendingEntries.total`.

    Returns:
        The entries that were pending and are deleted.

    Raises:
        StillPendingError: entries are pending, and ``discard`` is not their number.
        LevelTopicError: a client is connected; the text names it.
    """
    connected = _connected(read_stats(admin, description))
    if connected:
        raise LevelTopicError(
            f"level topic {description.topic} is in use: close producers, and stop mover and "
            f"dispatcher first. Connected: {_some(connected)}. Nothing was deleted"
        )
    if discard is not None and discard < 0:
        raise InvalidInputError(f"discard is {discard}: it is a number of entries")
    with closed_to_producers(client, _partitions(admin, description)):
        pending = pending_entries(admin, description)
        if pending.total != (discard or 0):
            raise StillPendingError(_still_pending(description, pending, discard), pending.total)
        # Exclusive producers end with a refusal, and leave no trace. Termination is for ever: it
        # keeps others out while these producers are closed and the topics are deleted.
        for member in description.members():
            with suppress(NotFoundError):
                admin.terminate(member.topic)
    for member in reversed(list(description.members())):
        try:
            admin.delete(member.topic)
        except NotFoundError:
            continue  # an earlier deletion was interrupted
        except ConflictError as error:
            raise LevelTopicError(
                f"a client has connected to {member.topic} ({error.reason}), which was not deleted "
                "as a whole. Stop producers and movers, and delete again"
            ) from error
    return pending


def _partitions(admin: OperatorAdmin, description: LevelTopicDescription) -> list[TopicName]:
    """Return all partitions of the member topics that exist."""
    found: list[TopicName] = []
    for member in description.members():
        with suppress(NotFoundError):
            count = admin.partitioned_metadata(member.topic).partitions
            found += [member.topic.partition(index) for index in range(count)]
    return found


def _connected(stats: LevelTopicStats) -> list[str]:
    """Return every connected producer and consumer with its partition, sorted."""
    found = set()
    for row in stats.partitions:
        if row.stats is None:
            continue
        names = [f"producer {name}" for name in row.stats.producers]
        for subscription in row.stats.subscriptions.values():
            names += [f"consumer {consumer.name}" for consumer in subscription.consumers]
        found |= {f"{name} ({TopicName.parse(row.topic).local})" for name in names}
    return sorted(found)


def _still_pending(
    description: LevelTopicDescription, pending: PendingEntries, discard: int | None
) -> str:
    if discard is not None:
        return (
            f"level topic {description.topic} holds {pending}, not {discard:,}: nothing was "
            f"deleted. `--discard {pending.total}` throws the entries away"
        )
    ways = []
    if pending.parked or pending.held:
        ways.append("hand them off now with `--drain` (due times are kept)")
    if pending.window:
        ways.append("let the dispatcher release the messages in the window")
    if pending.dead_letters:
        ways.append("replay or discard the dead letters with `delaylevel dlq`")
    ways.append(f"throw everything away with `--discard {pending.total}`")
    return (
        f"level topic {description.topic} still holds {pending}: nothing was deleted. "
        + "; ".join(ways)
    )


def _some(names: Sequence[str], most: int = 5) -> str:
    listed = ", ".join(names[:most])
    return listed if len(names) <= most else f"{listed} and {len(names) - most} more"
