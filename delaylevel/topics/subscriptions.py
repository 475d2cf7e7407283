"""Subscriptions of member topics, ours and those of others, and of business topics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from delaylevel.cluster.port import PartitionStats, SubscriptionStats, TopicAdmin
from delaylevel.cluster.targets.receivers import topic_stats
from delaylevel.errors import ConflictError, LevelTopicError
from delaylevel.model.formatting import shell
from delaylevel.model.level_topic import (
    SUBSCRIPTION,
    FinalWindow,
    LevelTopicDescription,
    Member,
    Role,
)
from delaylevel.model.topic_name import TopicName

# Subscriptions of these types deliver a message at once, whatever its due time.
_NOT_HOLDING = frozenset(("Exclusive", "Failover"))
# The names of our readers begin with it; their subscriptions end with them.
_READER_PREFIX = f"{SUBSCRIPTION}-"
# Subscriptions of the broker itself, such as that of compaction.
_BROKERS_OWN = ("__", "pulsar.")
# Everybody may follow the outcomes.
_PUBLIC = frozenset((Role.OUTCOMES,))
_CONTENTS = {Role.DEAD_LETTER: "dead letters", Role.JOURNAL: "records of the journal"}


@dataclass(frozen=True)
class ForeignSubscription:
    """A subscription of a member topic that is not ours.

    Most of them come from a consumer with a pattern that matches our topics as well.

    Attributes:
        durable: True if it survives its consumers and keeps messages stored.
    """

    name: str
    topic: TopicName
    role: Role
    durable: bool
    consumers: tuple[str, ...]

    @property
    def removal(self) -> str:
        """The command that removes it."""
        return (
            f"pulsar-admin topics unsubscribe {shell(self.topic)} --subscription "
            f"{shell(self.name)} --force"
        )

    def __str__(self) -> str:
        contents = _CONTENTS.get(self.role, "messages before they are due")
        where = f" (consumers at {', '.join(self.consumers)})" if self.consumers else ""
        keeps = ", and keeps them stored" if self.durable else ""
        return (
            f"subscription {self.name} of {self.topic} is not ours: it receives {contents}{keeps}"
            f"{where}"
        )


def foreign_subscriptions(
    topic: TopicName, role: Role, partitions: Iterable[PartitionStats]
) -> list[ForeignSubscription]:
    """Return the subscriptions of a member topic that are not ours, sorted by name.

    Applications may have their own ones on the outcomes topic.
    """
    if role in _PUBLIC:
        return []
    found: dict[str, list[SubscriptionStats]] = {}
    for stats in partitions:
        for name, subscription in stats.subscriptions.items():
            if not _is_ours(name, subscription) and not name.startswith(_BROKERS_OWN):
                found.setdefault(name, []).append(subscription)
    return [
        ForeignSubscription(
            name,
            topic,
            role,
            any(subscription.durable for subscription in everywhere),
            tuple(sorted({one.address for item in everywhere for one in item.consumers})),
        )
        for name, everywhere in sorted(found.items())
    ]


def _is_ours(name: str, subscription: SubscriptionStats) -> bool:
    if name == SUBSCRIPTION:
        return True
    return not subscription.durable and name.startswith(_READER_PREFIX)


def subscribe(admin: TopicAdmin, member: Member) -> None:
    """Create the durable subscription of every partition that lacks it."""
    try:
        admin.create_subscription(member.topic, SUBSCRIPTION, earliest=True)
    except ConflictError as error:
        if error.status != 409:  # it exists
            raise
    found = admin.partitioned_stats(member.topic)
    for index in range(member.partitions):
        stats = found.get(index) or admin.partition_stats(member.topic.partition(index))
        subscription = stats.subscriptions.get(SUBSCRIPTION)
        if subscription is None or not subscription.durable:
            raise LevelTopicError(
                f"{member.topic.partition(index)} has no durable subscription {SUBSCRIPTION!r} "
                "although it was created just now: messages parked there would be lost; try again"
            )


def early_subscriptions(admin: TopicAdmin, description: LevelTopicDescription) -> list[str]:
    """Return the subscriptions of business topics that receive messages before they are due.

    With ``broker`` the business topic itself holds a message back, but only for Shared and
    Key_Shared subscriptions. A subscription without a consumer since its topic was loaded has no
    type yet, and is left out.

    Returns:
        A text for each, with its name, topic and type; sorted.
    """
    if description.final_window is not FinalWindow.BROKER:
        return []
    found = []
    for target in description.targets:
        partitions = (topic_stats(admin, TopicName.parse(target)) or {}).values()
        # A subscription is one line, in whichever partitions it has a consumer.
        types = {
            name: subscription.type
            for stats in partitions
            for name, subscription in stats.subscriptions.items()
            if subscription.type in _NOT_HOLDING
        }
        found += [f"{name} of {target} ({type_})" for name, type_ in types.items()]
    return sorted(found)
