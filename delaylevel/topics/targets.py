"""Business topics that are missing, that nobody can receive from, or that would store duplicates.

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
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.topic_name import TopicName

from .members import WAIT_S, await_true


def unsubscribed(
    admin: TopicAdmin, topic: TopicName, stats: Collection[PartitionStats] | None = None
) -> Problem | None:
    """Return what is wrong with a topic that is missing, or that nobody can receive from.

    None if it has receivers: see `has_receivers`, the rule by which messages are held.
    """
    keep = f"`delaylevel levels set {shell(topic.short)} --keep-target`"
    if stats is None:
        found = topic_stats(admin, topic)
        if found is None:
            return Problem(
                f"{topic.short} does not exist, and messages that are due for it are held",
                f"subscribe to it, or let it be without subscriptions: {keep}",
            )
        stats = found.values()
    if has_receivers(admin, topic, stats):
        return None
    return Problem(
        f"{topic.short} has no subscription and no known retention, and messages for it are held",
        f"subscribe to it, or let it be without subscriptions: {keep}",
    )


def keep(admin: TopicAdmin, topic: TopicName) -> None:
    """Create a business topic if it is missing, and let it be without subscriptions.

    The broker does not delete it, and movers and dispatchers publish to it all the same. What is
    published while it has neither subscription nor retention is not stored for later ones. A new
    topic has no partitions.
    """
    if not admin.topic_exists(topic):
        with contextlib.suppress(ConflictError):  # another client was faster
            admin.create_partitioned(topic, 0)
    try:
        admin.set_topic_policies(topic, TopicPolicies(delete_while_inactive=False))
    except AdminError as error:
        if error.status != NO_TOPIC_POLICIES:
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


def require_on_targets(admin: TopicAdmin, description: LevelTopicDescription) -> None:
    """Require that the broker deduplicates on every target that exists.

    Targets belong to applications, so deduplication is not turned on here.
    """
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
