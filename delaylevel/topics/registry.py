"""Level topics that describe themselves: made, found and listed through a cluster's admin port."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import LevelTopicError, NotFoundError
from delaylevel.model.level_topic import (
    MEMBER_PROPERTY,
    PLAN_PROPERTY,
    LevelTopicDescription,
    default_level_topic,
)
from delaylevel.model.topic_name import TopicName

from . import members as family
from . import safety
from .members import check_same
from .subscriptions import subscribe

__all__ = [
    "FoundLevelTopic",
    "check_same",
    "create",
    "describe",
    "find",
    "list_level_topics",
    "notes",
]

_THREADS = 8
_UNFINISHED = "its creation was not finished: create it again with the same strategy"


@dataclass(frozen=True)
class FoundLevelTopic:
    """A level topic as it was found in a namespace.

    Attributes:
        topic: its full name.
        description: what it says of itself; None where that is missing or cannot be read.
        problem: why there is no description, in one line; None where there is one.
    """

    topic: str
    description: LevelTopicDescription | None
    problem: str | None = None


def create(admin: TopicAdmin, description: LevelTopicDescription) -> LevelTopicDescription:
    """Make a level topic with everything that belongs to it, or finish or widen one that exists.

    Every topic of the family gets its durable subscription and its policies (no TTL, not deleted
    while inactive, not replicated) before the description is written, so that nothing can be
    published to a family that is not complete. Calling it again does no harm; several clients may
    do it at once; new targets are added to those that the topic has.

    Args:
        admin: the cluster.
        description: what the level topic is to be.

    Returns:
        What the level topic says of itself now: with all its targets.

    Raises:
        StrategyMismatchError: it exists with another strategy; the text shows both.
        UnsafeNamespaceError: policies would eat what is parked; a remedy for each.
        InvalidStrategyError: more partitions than the broker allows; the text proposes levels.
        LevelTopicError: a topic of the family exists and is not ours.
        NotFoundError: the namespace does not exist.
    """
    description = _as_expanded(admin, description)
    safety.check_names(description)
    settings = admin.broker_settings()
    policies = family.policies_of(admin, description.name)
    safety.check_partition_limit(description, settings.max_partitions)
    # Everything is looked at before anything is made: a refusal leaves nothing behind.
    existing = {
        member.topic: family.existing(admin, member, description)
        for member in description.members()
    }
    family.refuse_unsafe(description, policies, settings)
    for member in description.members():
        if existing[member.topic] is None:
            family.create_missing(admin, member, description)
        subscribe(admin, member)
        family.protect(admin, member, description, policies, settings)
    wanted = description.to_properties()
    level_topic = existing[description.name]
    stored = dict(level_topic.properties) if level_topic is not None else {}
    described = LevelTopicDescription.from_properties(description.topic, stored)
    if described is None or not set(description.targets) <= set(described.targets):
        if described is not None:
            # The value stays as it is; a target of its own property cannot be lost to a
            # client that adds another one now.
            wanted = {key: value for key, value in wanted.items() if key not in stored}
        admin.set_properties(description.name, wanted)
    found = find(admin, description.topic)
    if found is None:
        raise LevelTopicError(f"level topic {description.topic} was deleted while it was made")
    return found


def find(admin: TopicAdmin, topic: str) -> LevelTopicDescription | None:
    """Return what the level topic of this very name says of itself.

    Args:
        admin: the cluster.
        topic: the level topic's name.

    Returns:
        The description; None where there is no such topic, or its creation was not finished
        (:func:`create` finishes it).

    Raises:
        LevelTopicError: the topic exists and is not a level topic, or its description is damaged.
    """
    name = TopicName.parse(topic)
    metadata = family.metadata_of(admin, name)
    if metadata is None:
        return None
    described = LevelTopicDescription.from_properties(name.full, metadata.properties)
    if described is None and PLAN_PROPERTY not in metadata.properties:
        raise family.not_ours(name, metadata)
    return described


def describe(admin: TopicAdmin, topic: str, *, search: bool = False) -> LevelTopicDescription:
    """Return what a level topic says of itself.

    Args:
        admin: the cluster.
        topic: the level topic, another topic of its family (also one partition), or a business
            topic whose level topic has the default name.
        search: for a business topic, look through the namespace for level topics of other names.

    Raises:
        LevelTopicError: there is none, it is not finished, or several serve the business topic.
    """
    name = TopicName.parse(topic).without_partition
    metadata = family.metadata_of(admin, name)
    owner = metadata.properties.get(MEMBER_PROPERTY) if metadata is not None else None
    level_topic = owner or default_level_topic(name.full)
    described = _described(admin, level_topic)
    if described is not None:
        return described
    if owner is None and search:
        serving = [
            found.description
            for found in list_level_topics(admin, name.namespace_path)
            if found.description is not None and name.full in found.description.targets
        ]
        if len(serving) == 1:
            return serving[0]
        if serving:
            listed = ", ".join(description.topic for description in serving)
            raise LevelTopicError(f"{name} is served by several level topics: name one of {listed}")
    raise LevelTopicError(
        f"{name} has no level topic ({level_topic} does not exist): make one with "
        f"`delaylevel levels create {name}`"
    )


def list_level_topics(admin: TopicAdmin, namespace: str) -> list[FoundLevelTopic]:
    """Return every level topic of a namespace, sorted by name, unfinished and damaged ones too.

    Args:
        admin: the cluster.
        namespace: ``tenant/namespace``.

    Raises:
        NotFoundError: the namespace does not exist.
    """

    def look(name: TopicName) -> FoundLevelTopic | None:
        metadata = family.metadata_of(admin, name)
        if metadata is None or metadata.properties.get(MEMBER_PROPERTY) != name.full:
            return None
        try:
            described = LevelTopicDescription.from_properties(name.full, metadata.properties)
        except LevelTopicError as error:
            return FoundLevelTopic(name.full, None, str(error))
        return FoundLevelTopic(name.full, described, None if described else _UNFINISHED)

    try:
        names = admin.list_partitioned_topics(namespace)
    except NotFoundError as error:
        raise family.no_namespace(namespace, error) from None
    with ThreadPoolExecutor(_THREADS) as pool:
        return [found for found in pool.map(look, names) if found is not None]


def notes(admin: TopicAdmin, description: LevelTopicDescription) -> tuple[str, ...]:
    """Return what is good to know of the namespace before much is parked; it loses nothing."""
    policies = family.policies_of(admin, description.name)
    return safety.notes(description, policies, admin.broker_settings())


def _as_expanded(admin: TopicAdmin, wanted: LevelTopicDescription) -> LevelTopicDescription:
    """Return what is wanted with the levels of now, where it names those before an expansion."""
    try:
        described = find(admin, wanted.topic)
    except LevelTopicError:
        return wanted  # what is wrong is said where the family is looked at
    if described is None or wanted.levels not in described.former:
        return wanted
    return replace(wanted, levels=described.levels)


def _described(admin: TopicAdmin, level_topic: str) -> LevelTopicDescription | None:
    """Like find(), but what is unfinished is an error."""
    described = find(admin, level_topic)
    if described is None and family.metadata_of(admin, TopicName.parse(level_topic)) is not None:
        raise LevelTopicError(f"level topic {level_topic}: {_UNFINISHED}")
    return described
