"""Business topics that the broker would delete, or has deleted, because nobody subscribes to them.

By default, a broker deletes a topic that has no subscription and no connected producer for a
minute, with its messages. Messages that are due for it later are held.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.targets.identity import topic_stats
from delaylevel.cluster.values import PartitionStats, TopicPolicies
from delaylevel.errors import AdminError, ConflictError, LevelTopicError
from delaylevel.model.topic_name import TopicName

from .members import WAIT_S, await_true


@dataclass(frozen=True)
class UnsubscribedTarget:
    """A business topic that is missing, or that the broker may delete.

    Attributes:
        finding: the fact and its effect.
        remedy: the remedy.
    """

    finding: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.finding}: {self.remedy}"


def unsubscribed(
    admin: TopicAdmin, topic: TopicName, stats: Iterable[PartitionStats] | None = None
) -> UnsubscribedTarget | None:
    """Return what is wrong with a topic that the broker may delete, or with a missing one.

    None if it has a durable subscription, if its own policy keeps it, or if the broker deletes no
    inactive topics. A subscription that is added later makes it safe, too.

    Args:
        topic: the business topic.
        stats: the statistics of its partitions; requested by default.

    Raises:
        BrokerError: the statistics cannot be read.
    """
    keep = f"`delaylevel levels set {topic.short} --keep-target`"
    if stats is None:
        found = topic_stats(admin, topic)
        if found is None:
            return UnsubscribedTarget(
                f"{topic.short} does not exist, and messages that are due for it are held (a "
                "broker deletes a topic that has no subscription after a minute)",
                f"subscribe to it before messages are due, or create and keep it: {keep}",
            )
        stats = found.values()
    if any(item.durable for each in stats for item in each.subscriptions.values()):
        return None
    settings = admin.broker_settings()
    if settings.delete_inactive_topics == "":
        return None
    if settings.topic_policies is not False:
        try:
            if admin.topic_policies(topic).delete_while_inactive is False:
                return None
        except AdminError:
            pass  # no policies for single topics, or none that this role may read
    return UnsubscribedTarget(
        f"{topic.short} has no subscription, so the broker deletes it after a minute without "
        "producers, and then messages that are due for it are held",
        f"subscribe to it, or keep it: {keep}",
    )


def keep(admin: TopicAdmin, topic: TopicName) -> None:
    """Create a business topic if it is missing, and let the broker keep it without subscriptions.

    A new topic is not partitioned. Messages that are published to a topic without a subscription
    are not stored for later ones.

    Raises:
        LevelTopicError: the broker has no policies for single topics, or does not apply them.
    """
    if not admin.topic_exists(topic):
        with contextlib.suppress(ConflictError):  # another client was faster
            admin.create_partitioned(topic, 0)
    try:
        admin.set_topic_policies(topic, TopicPolicies(delete_while_inactive=False))
    except AdminError as error:
        if error.status != 405:
            raise
        raise LevelTopicError(
            f"{topic.short} cannot be kept, because this broker has no policies for single topics: "
            "subscribe to it, or set topicLevelPoliciesEnabled=true in broker.conf"
        ) from error
    if not await_true(lambda: admin.topic_policies(topic).delete_while_inactive is False):
        raise LevelTopicError(
            f"the broker accepted the policy of {topic.short} but does not report it after "
            f"{WAIT_S:.0f} s: is the namespace's system topic healthy? Try again"
        )
