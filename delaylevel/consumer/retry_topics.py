"""The topics of a subscription's retries: created, checked and found through the admin port."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pulsar

from delaylevel.cluster.port import TopicAdmin, TopicMetadata
from delaylevel.errors import (
    AdminError,
    ConflictError,
    InvalidInputError,
    LevelTopicError,
    NotFoundError,
    PermissionDeniedError,
)
from delaylevel.model import retries
from delaylevel.model.formatting import shell
from delaylevel.model.level_topic import (
    SUBSCRIPTION,
    FinalWindow,
    LevelTopicDescription,
    Role,
    default_level_topic,
)
from delaylevel.model.position import SourcePartition
from delaylevel.model.strategy import PartitionStrategy, as_levels
from delaylevel.model.topic_name import TopicName
from delaylevel.topics import members, registry
from delaylevel.topics.status import pending_entries_in

log = logging.getLogger(__name__)

# Subscriptions of these types get messages before they are due if the broker holds them.
_NOT_HOLDING = (pulsar.ConsumerType.Exclusive, pulsar.ConsumerType.Failover)


@dataclass(frozen=True)
class RetryTopics:
    """The topics of the retries of one subscription."""

    topic: TopicName
    subscription: str
    retry: TopicName
    dead_letter: TopicName

    @classmethod
    def of(cls, topic: str, subscription: str) -> RetryTopics:
        """Return the topics for a business topic, or one of its partitions."""
        name = TopicName.parse(topic).without_partition
        if not subscription or "/" in subscription:
            raise InvalidInputError(
                f"subscription {subscription!r} cannot have retries: its name is a part of the "
                "names of its topics, so it must not be empty or contain '/'"
            )
        retry = retries.retry_topic(name.full, subscription)
        return cls(name, subscription, retry, retries.dead_letter_topic(name.full, subscription))

    @property
    def owner(self) -> dict[str, str]:
        """The properties of these topics that name the subscription."""
        return {
            retries.OWNER_TOPIC: self.topic.full,
            retries.OWNER_SUBSCRIPTION: self.subscription,
        }


def prepare(admin: TopicAdmin, topics: RetryTopics) -> LevelTopicDescription:
    """Create the topics of a subscription's retries, and the level topic, as far as missing."""
    # Several processes may do this at once. Both topics have a durable subscription before anything
    # can be published to them.
    name, retry = topics.topic.full, topics.retry.full
    levels = as_levels(PartitionStrategy())
    wanted = LevelTopicDescription(default_level_topic(name), levels, (name,))
    try:
        found = find_level_topic(admin, topics.topic)
        wanted = found or wanted
        served = retry in wanted.targets
        wanted = replace(wanted, targets=(*wanted.targets, name, retry))
        if found is None:
            registry.check_creatable(admin, wanted)
        _ensure(admin, topics, wanted)
        return wanted if served else registry.create(admin, wanted)
    except PermissionDeniedError as error:
        raise PermissionDeniedError(
            f"the topics of the retries of {topics.topic} for subscription {topics.subscription} "
            f"are missing, and this role may not create them ({error}). Start it once with the "
            f"token of an admin of {topics.topic.namespace_path}, or let an admin create "
            f"{topics.retry.local} with subscription {topics.subscription}, "
            f"{topics.dead_letter.local} with subscription {SUBSCRIPTION}, and run "
            f"`{wanted.creation_command(retry)}`",
            status=error.status,
            reason=error.reason,
        ) from error


def find_level_topic(
    admin: TopicAdmin, topic: TopicName, level_topic: str | None = None
) -> LevelTopicDescription | None:
    """Return the level topic of a business topic, maybe of another name; None if there is none."""
    if level_topic is not None:
        return registry.find(admin, level_topic)
    found = registry.find(admin, registry.default_name(admin, topic.full))
    if found is not None and topic.full in found.targets:
        return found
    serving = registry.serving_level_topics(admin, topic)
    if len(serving) > 1:
        raise LevelTopicError(
            f"{topic} is served by several level topics ({', '.join(serving)}), so it is not clear "
            "which one takes its retries: remove it from the targets of all but one"
        )
    return registry.find(admin, serving[0]) if serving else found


def retry_type(consumer_type: Any, description: LevelTopicDescription) -> Any:
    """Return the type of the subscription of the retry topic."""
    # If the broker holds the copies until they are due, it would deliver them to an Exclusive or
    # Failover subscription at once.
    by_broker = description.final_window is not FinalWindow.TRACKER
    if by_broker and consumer_type in _NOT_HOLDING:
        return pulsar.ConsumerType.Shared
    return consumer_type


def find_dead_letters(
    admin: TopicAdmin, topic: str, subscription: str
) -> tuple[LevelTopicDescription, SourcePartition]:
    """Return the dead letters of a subscription, and the level topic that replays them."""
    topics = RetryTopics.of(topic, subscription)
    metadata = members.metadata_of(admin, topics.dead_letter)
    if metadata is None:
        raise LevelTopicError(
            f"{topics.topic} has no dead letters of subscription {subscription}: "
            f"{topics.dead_letter} does not exist. It is created when a listener with retries "
            "starts"
        )
    level_topic = metadata.properties.get(retries.OWNER_LEVEL_TOPIC)
    description = find_level_topic(admin, topics.topic, level_topic)
    if description is None:
        raise LevelTopicError(
            f"{topics.topic} has no level topic any more: create one with `delaylevel levels "
            f"create {shell(topics.topic)} --target {shell(topics.retry)}`"
        )
    partition = dead_letter_partition(topics.dead_letter, metadata)
    return description, SourcePartition(description.topic, partition, Role.DEAD_LETTER, -1, 0, 0)


def subscriptions_with_dead_letters(
    admin: TopicAdmin, description: LevelTopicDescription
) -> list[tuple[TopicName, str, int]]:
    """Return business topic, subscription and number of entries where there are dead letters."""
    found = []
    for name in map(TopicName.parse, description.targets):
        if not name.local.endswith(retries.RETRY_SUFFIX):
            continue
        with suppress(NotFoundError):
            owner = admin.partitioned_metadata(name).properties
            topic, subscription = map(owner.get, (retries.OWNER_TOPIC, retries.OWNER_SUBSCRIPTION))
            if topic is None or subscription is None:
                continue
            topics = RetryTopics.of(topic, subscription)
            stats = admin.partitioned_stats(topics.dead_letter)
            if entries := sum(map(pending_entries_in, stats.values())):
                found.append((topics.topic, topics.subscription, entries))
    return sorted(found)


def dead_letter_partition(name: TopicName, metadata: TopicMetadata | None) -> str:
    """Return the full name of the only partition in which our dead letters are stored."""
    if metadata is not None and not metadata.partitions:
        return name.full  # another program created it
    return name.partition(0).full


def _ensure(admin: TopicAdmin, topics: RetryTopics, level_topic: LevelTopicDescription) -> None:
    """Create the retry topic and the dead-letter topic with their subscriptions and policies."""
    business = members.metadata_of(admin, topics.topic)
    owner = {**topics.owner, retries.OWNER_LEVEL_TOPIC: level_topic.topic}
    # As many partitions, so that Failover consumers share retried copies as they share messages.
    partitions = max(1, business.partitions if business is not None else 1)
    for name, count, subscription in (
        (topics.retry, partitions, topics.subscription),
        (topics.dead_letter, 1, SUBSCRIPTION),
    ):
        created = not admin.topic_exists(name)
        try:
            if created:
                admin.create_partitioned(name, count, owner)
        except ConflictError:
            created = False  # another process was faster
        except NotFoundError as error:
            raise members.no_namespace(name.namespace_path, error) from None
        _check_owner(admin, name, topics, owner)
        with suppress(ConflictError):
            admin.create_subscription(name, subscription, earliest=True)
        # The broker must neither expire its messages nor delete it while it is inactive. Like our
        # own topics, it is not replicated: each cluster retries its own messages.
        try:
            members.protect(admin, name, members.facts_of(admin, level_topic, name))
        except PermissionDeniedError as error:
            if created:
                raise
            log.debug("policies of %s: %s", name, error)


def _check_owner(
    admin: TopicAdmin, name: TopicName, topics: RetryTopics, owner: Mapping[str, str]
) -> None:
    """Refuse a topic of another subscription; name the owner of a topic that has none."""
    # Subscription `x` of `orders-billing` and `billing-x` of `orders` have the same topics.
    metadata = members.metadata_of(admin, name)
    properties = {} if metadata is None else metadata.properties
    found = {key: properties[key] for key in topics.owner if key in properties}
    if found and found != topics.owner:
        raise LevelTopicError(
            f"{name} belongs to subscription {found.get(retries.OWNER_SUBSCRIPTION)} of "
            f"{found.get(retries.OWNER_TOPIC)}, not to subscription {topics.subscription} of "
            f"{topics.topic}: give one of the two subscriptions another name"
        )
    if any(properties.get(key) != value for key, value in owner.items()):
        # For `delaylevel dlq`; it is not necessary.
        with suppress(AdminError):
            admin.set_properties(name, owner)
