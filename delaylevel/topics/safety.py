"""Checks of a description before its topics are created; no I/O."""

from __future__ import annotations

from datetime import timedelta

from delaylevel.cluster.port import BrokerSettings, NamespacePolicies
from delaylevel.errors import InvalidInputError, InvalidStrategyError
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import propose_levels
from delaylevel.model.topic_name import TopicName


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


def topic_limit(policies: NamespacePolicies, settings: BrokerSettings) -> int:
    """Return the maximum number of topics and partitions of the namespace; 0 for no limit."""
    return (settings.max_topics if policies.max_topics is None else policies.max_topics) or 0


def check_topic_limit(
    description: LevelTopicDescription, limit: int, present: int, missing: int
) -> None:
    """Raise InvalidStrategyError if the new topics exceed the limit of the namespace.

    Args:
        limit: the maximum number; 0 for no limit.
        present: number of topics and partitions in the namespace.
        missing: number of those to create.
    """
    if limit and present + missing > limit:
        namespace = description.name.namespace_path
        raise InvalidStrategyError(
            f"{description.topic} needs {missing:,} more topics (each partition counts), and "
            f"{namespace} has {present:,} of the {limit:,} that it may have "
            "(maxTopicsPerNamespace): `pulsar-admin namespaces set-max-topics-per-namespace "
            f"{namespace} --max-topics-per-namespace {present + missing}`, fewer partitions (a "
            "second level, --then), or another namespace; nothing was created"
        )


def check_names(description: LevelTopicDescription) -> None:
    """Raise InvalidInputError if the level topic's name or one of its targets is impossible.

    The broker reserves ``-partition-`` for partitions. A message whose target is a member topic
    would circulate forever.
    """
    for name in (description.name, *map(TopicName.parse, description.targets)):
        if name.unusable:
            raise InvalidInputError(f"topic {name.full!r} cannot be used: {name.unusable}")
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
