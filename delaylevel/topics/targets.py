"""Business topics that are missing, or whose receivers or settings do not fit.

Messages that are due for them are held. By default, a broker also deletes a topic that has no
subscription and no connected producer for a minute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from delaylevel.cluster.port import PartitionStats, TopicAdmin, TopicPolicies
from delaylevel.cluster.rules import NO_TOPIC_POLICIES, Problem
from delaylevel.cluster.targets.receivers import has_receivers, topic_stats
from delaylevel.errors import AdminError, ConflictError, LevelTopicError
from delaylevel.model.formatting import shell
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.topic_name import TopicName

from .members import apply_policies

# Subscriptions of these types deliver a message at once, whatever its due time.
_NOT_HOLDING = frozenset(("Exclusive", "Failover"))


def unsubscribed(
    admin: TopicAdmin, topic: TopicName, stats: Collection[PartitionStats] | None = None
) -> Problem | None:
    """Return what is wrong with a topic that is missing, or that nobody can receive from."""
    what = "has no subscription and no known retention"
    if stats is None and (found := topic_stats(admin, topic)) is not None:
        stats = found.values()
    if stats is None:
        what = "does not exist"
    elif has_receivers(admin, topic, stats):
        return None
    return Problem(
        f"{topic.short} {what}, and messages that are due for it are held",
        "subscribe to it, or let it be without subscriptions: "
        f"`delaylevel levels set {shell(topic.short)} --keep-target`",
    )


def keep(admin: TopicAdmin, topic: TopicName) -> None:
    """Create a business topic if it is missing, and let it be without subscriptions.

    What is published while it has neither subscription nor retention is not stored for later ones.
    """
    if not admin.topic_exists(topic):
        with contextlib.suppress(ConflictError):  # another client was faster
            admin.create_partitioned(topic, 0)
    try:
        apply_policies(admin, topic, TopicPolicies(delete_while_inactive=False))
    except AdminError as error:
        if error.status != NO_TOPIC_POLICIES:
            raise
        raise LevelTopicError(
            f"{topic.short} cannot be kept, because this broker has no policies for single topics: "
            "subscribe to it, or set topicLevelPoliciesEnabled=true in broker.conf"
        ) from error


def require_on_targets(admin: TopicAdmin, description: LevelTopicDescription) -> None:
    """Require that the broker deduplicates on every target that exists."""
    # Targets belong to applications, so deduplication is not turned on here.
    found = {name: topic_stats(admin, TopicName.parse(name)) for name in description.targets}
    without = [
        TopicName.parse(name)
        for name, stats in found.items()
        if stats is not None and not (stats and all(one.deduplication for one in stats.values()))
    ]
    if without:
        raise LevelTopicError(
            f"effectively-once needs deduplication, which is off for {', '.join(map(str, without))}"
            f". Turn it on with `pulsar-admin topicPolicies set-deduplication --enable {without[0]}"
            "` (or for the namespace: `pulsar-admin namespaces set-deduplication --enable "
            f"{without[0].namespace_path}`), or run with --delivery at-least-once"
        )


def early_subscriptions(admin: TopicAdmin, description: LevelTopicDescription) -> list[str]:
    """Return name, topic and type of the subscriptions that receive messages before they are due.

    One without a consumer since its topic was loaded has no type yet, and is left out.
    """
    if description.final_window is not FinalWindow.BROKER:
        return []
    found = set()
    for target in description.targets:
        partitions = (topic_stats(admin, TopicName.parse(target)) or {}).values()
        found |= {
            f"{name} of {target} ({subscription.type})"
            for stats in partitions
            for name, subscription in stats.subscriptions.items()
            if subscription.type in _NOT_HOLDING
        }
    return sorted(found)
