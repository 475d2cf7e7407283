"""Durable subscriptions of member topics, and subscriptions of business topics."""

from __future__ import annotations

import time

from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.targets.identity import topic_stats
from delaylevel.errors import AdminError, LevelTopicError
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription, Member
from delaylevel.model.topic_name import TopicName

_SUBSCRIBE_WAIT_S = 20.0
_SUBSCRIBE_PAUSE_S = 0.1
_BAD_VERSION = "BadVersion"
# Subscriptions of these types deliver a message at once, whatever its due time.
_NOT_HOLDING = frozenset(("Exclusive", "Failover"))


def subscribe(admin: TopicAdmin, member: Member) -> None:
    """Create the durable subscription of every partition that lacks it.

    Raises:
        LevelTopicError: a partition does not have it afterwards.
    """
    deadline = time.monotonic() + _SUBSCRIBE_WAIT_S
    while True:
        try:
            admin.create_subscription(member.topic, SUBSCRIPTION, earliest=True)
            break
        except AdminError as error:
            if error.status == 409:
                break
            # The broker's answer if two clients create the same subscription at the same time.
            if _BAD_VERSION not in error.reason or time.monotonic() > deadline:
                raise
            time.sleep(_SUBSCRIBE_PAUSE_S)
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
