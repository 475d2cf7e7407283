"""Rules for policies that would delete or block parked messages, with remedies; no I/O."""

from __future__ import annotations

from datetime import timedelta

from delaylevel.cluster.values import BacklogQuota, BrokerSettings, NamespacePolicies
from delaylevel.errors import InvalidInputError, InvalidStrategyError
from delaylevel.model.formatting import format_duration
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import propose_levels
from delaylevel.model.topic_name import TopicName

_EVICTS = "consumer_backlog_eviction"


def problems(
    description: LevelTopicDescription, policies: NamespacePolicies, settings: BrokerSettings
) -> tuple[str, ...]:
    """Return the policies that would lose or block parked messages, a line with a remedy for each.

    Message TTL, deletion of inactive topics and replication can be overridden for each topic; they
    count only if the broker has no policies for single topics. Subscription expiration and quotas
    apply to the namespace.
    """
    namespace = description.name.namespace_path
    found = [
        *_lifetime_problems(namespace, policies, settings),
        *_replication_problems(namespace, policies, settings),
    ]
    for quota in quotas(policies, settings):
        line = _quota_problem(namespace, quota, description)
        if line:
            found.append(line)
    return tuple(found)


def notes(
    description: LevelTopicDescription, policies: NamespacePolicies, settings: BrokerSettings
) -> tuple[str, ...]:
    """Return notes on policies that lose nothing, but matter when many messages are parked."""
    found = [
        f"a partition that holds {quota.limit_bytes:,} bytes accepts no more messages (backlog "
        f"quota of {description.name.namespace_path}, {quota.policy}): sending fails then, nothing "
        "is lost; if that is too little, use `pulsar-admin namespaces set-backlog-quota`"
        for quota in quotas(policies, settings)
        if quota.limit_bytes is not None and quota.policy != _EVICTS
    ]
    if settings == BrokerSettings() and policies.subscription_expiration_min is None:
        found.append(
            "the broker's own defaults cannot be read with this token: let an administrator check "
            "that subscriptionExpirationTimeMinutes is 0 and that "
            f"backlogQuotaDefaultRetentionPolicy is not {_EVICTS}"
        )
    return tuple(found)


def quotas(policies: NamespacePolicies, settings: BrokerSettings) -> tuple[BacklogQuota, ...]:
    """Return the quotas that apply: the namespace's own, and the broker's for the other types."""
    own = {quota.type for quota in policies.backlog_quotas}
    defaults = (quota for quota in settings.backlog_quotas if quota.type not in own)
    return (*policies.backlog_quotas, *defaults)


def check_partition_limit(description: LevelTopicDescription, limit: int | None) -> None:
    """Raise InvalidStrategyError if a member topic has more partitions than the broker allows.

    A limit of 0 or None is no limit.
    """
    if not limit:
        return
    levels = description.levels
    finest = levels.strategies[-1].unit
    for member in description.members():
        if member.partitions > limit:
            maximum = timedelta(milliseconds=levels.maximum_ms)
            proposal = propose_levels(maximum, finest, limit)
            advice = f"; these levels fit: {proposal}" if proposal else ""
            raise InvalidStrategyError(
                f"{member.topic} would need {member.partitions:,} partitions, more than the "
                f"broker's limit of {limit:,} (maxNumPartitionsPerPartitionedTopic){advice}"
            )


def check_names(description: LevelTopicDescription) -> None:
    """Raise InvalidInputError if the level topic's name or one of its targets is impossible.

    The broker reserves ``-partition-`` for partitions. A message whose target is a member topic
    would circulate forever.
    """
    if "-partition-" in description.name.local:
        raise InvalidInputError(
            f"a level topic cannot be called {description.topic}: '-partition-' is for partitions; "
            "name the topic itself"
        )
    own = {member.topic.full for member in description.members()}
    for target in description.targets:
        if TopicName.parse(target).without_partition.full in own:
            raise InvalidInputError(
                f"{target} is part of the level topic {description.topic} and cannot be its target"
            )


def _lifetime_problems(
    namespace: str, policies: NamespacePolicies, settings: BrokerSettings
) -> list[str]:
    found = []
    by_topic = settings.topic_policies is not False
    ttl = _first(policies.message_ttl_s, settings.message_ttl_s)
    if ttl and not by_topic:
        found.append(
            f"messages in {namespace} expire after {format_duration(ttl * 1000)} (message TTL), "
            "and this broker has no policies for single topics: "
            f"`pulsar-admin namespaces set-message-ttl {namespace} --messageTTL 0`, or set "
            "topicLevelPoliciesEnabled=true"
        )
    expiration = _first(policies.subscription_expiration_min, settings.subscription_expiration_min)
    if expiration:
        found.append(
            f"subscriptions in {namespace} that are not used for "
            f"{format_duration(expiration * 60_000)} are deleted with the messages that they keep "
            "(subscription expiration): "
            f"`pulsar-admin namespaces set-subscription-expiration-time {namespace} --time 0`"
        )
    if settings.delete_inactive_topics == "delete_when_subscriptions_caught_up" and not by_topic:
        found.append(
            "the broker deletes inactive topics although they have subscriptions, and has no "
            "policies for single topics: `pulsar-admin namespaces set-inactive-topic-policies "
            f"{namespace} --disable-delete-while-inactive`, or set topicLevelPoliciesEnabled=true"
        )
    return found


def _replication_problems(
    namespace: str, policies: NamespacePolicies, settings: BrokerSettings
) -> list[str]:
    clusters = policies.replication_clusters
    if len(clusters) < 2:
        return []
    listed = ", ".join(sorted(clusters))
    if settings.topic_policies is False:
        reason = "this broker has no policies for single topics"
    elif settings.cluster not in clusters:
        reason = "which of them is this one cannot be read with this token"
    else:
        return []
    return [
        f"{namespace} is replicated to {listed}, and {reason}: a mover in each would deliver "
        "everything; use a namespace that is not replicated"
    ]


def _quota_problem(
    namespace: str, quota: BacklogQuota, description: LevelTopicDescription
) -> str | None:
    limit = (
        f"{quota.limit_bytes:,} bytes"
        if quota.limit_bytes is not None
        else format_duration((quota.limit_s or 0) * 1000)
    )
    remedy = (
        f"`pulsar-admin namespaces set-backlog-quota {namespace} --type {quota.type} "
        f"{'--limit -1' if quota.limit_bytes is not None else '--limitTime -1'} "
        "--policy producer_exception`"
    )
    if quota.policy == _EVICTS:
        return (
            f"the backlog quota of {namespace} throws unacknowledged messages away beyond {limit} "
            f"({quota.type}, {quota.policy}): {remedy}"
        )
    longest_ms = description.levels.maximum_ms
    if quota.limit_s is not None and quota.limit_s * 1000 <= longest_ms:
        return (
            f"the backlog quota of {namespace} blocks producers once a message is {limit} old "
            f"({quota.type}, {quota.policy}), and parked ones grow up to "
            f"{format_duration(longest_ms)} old: {remedy}"
        )
    return None


def _first(own: int | None, default: int | None) -> int:
    return own if own is not None else (default or 0)
