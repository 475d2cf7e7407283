"""Creation, search and listing of level topics through the admin port."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from delaylevel.cluster import rules
from delaylevel.cluster.failures import may_pass
from delaylevel.cluster.port import TopicAdmin, TopicMetadata
from delaylevel.cluster.rules import Facts
from delaylevel.cluster.threads import in_parallel
from delaylevel.errors import (
    AdminError,
    BrokerError,
    DelayLevelError,
    LevelTopicError,
    NotFoundError,
    PermissionDeniedError,
)
from delaylevel.model.formatting import shell
from delaylevel.model.level_topic import (
    BEING_DELETED,
    DESCRIPTION_PROPERTY,
    MEMBER_PROPERTY,
    PLAN_PROPERTY,
    LevelTopicDescription,
    Member,
    Role,
    default_level_topic,
    default_level_topics,
)
from delaylevel.model.topic_name import TopicName

from . import members

log = logging.getLogger(__name__)

_THREADS = 8


@dataclass(frozen=True)
class FoundLevelTopic:
    """A level topic in a namespace.

    Attributes:
        topic: its full name.
        description: its description; None if that is missing or cannot be read.
        problem: the reason why there is no description, in one line; None if there is one.
    """

    topic: str
    description: LevelTopicDescription | None
    problem: str | None = None


#: The member topics that exist, or None for each that does not.
Existing: TypeAlias = dict[TopicName, TopicMetadata | None]


def create(admin: TopicAdmin, description: LevelTopicDescription) -> LevelTopicDescription:
    """Create a level topic with its member topics, finish its creation, or extend it.

    An existing level topic keeps its targets and settings, and gets the targets that it lacks.

    Every member topic gets its durable subscription and its policies (no TTL, not deleted while
    inactive, not replicated, no limits of clients) before the description is written, so that
    nobody can publish to an incomplete level topic. The call may be repeated, also by several
    clients at once.

    Args:
        description: the level topic.

    Returns:
        The description on the broker, with all targets.

    Raises:
        StrategyMismatchError: it exists with another strategy; the text shows both.
        UnsafeNamespaceError: rules of broker or namespace would delete parked messages, or stop
            those who release them; with remedies.
        InvalidStrategyError: more partitions than the broker, or topics than the namespace, may
            have.
        LevelTopicError: a member topic exists and is not ours.
        NotFoundError: the namespace does not exist.
    """
    facts, existing = check_creatable(admin, description)
    description = facts.description
    made: set[TopicName] = set()
    try:
        _ensure_members(admin, facts, existing, made)
    except DelayLevelError as error:
        # After a failure that may pass, the same call finishes the level topic.
        if description.name in made and not may_pass(error):
            _undo(admin, description, made)
        raise
    wanted = description.to_properties()
    level_topic = existing[description.name]
    stored = dict(level_topic.properties) if level_topic is not None else {}
    described = LevelTopicDescription.from_properties(description.topic, stored)
    if described is not None:
        # Keep the description: each new target has its own property, so that clients that add
        # targets at the same time do not overwrite each other.
        added = not set(description.targets) <= set(described.targets)
        wanted = {key: value for key, value in wanted.items() if added and key not in stored}
    if wanted:
        admin.set_properties(description.name, wanted)
    found = find(admin, description.topic)
    if found is None:
        raise LevelTopicError(f"level topic {description.topic} was deleted while it was created")
    return found


def _ensure_members(
    admin: TopicAdmin, facts: Facts, existing: Existing, made: set[TopicName]
) -> None:
    """Complete the member topics, and add those that are created here to ``made``."""

    def make(member: Member) -> None:
        missing = existing[member.topic] is None
        if missing and members.create_missing(admin, member, facts.description):
            made.add(member.topic)

    def protect(member: Member) -> None:
        members.protect(admin, member.topic, facts, is_new=member.topic in made)

    # The level topic itself comes first: a client that creates it with another strategy at the same
    # time is refused there, and leaves no other topic. The rest may come in any order, because
    # nobody uses a level topic before its description is written.
    first, *others = facts.description.members()
    make(first)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(make, others))
        # Subscriptions and policies do not depend on each other, and take the broker the longest.
        subscribed = [pool.submit(members.subscribe, admin, each) for each in (first, *others)]
        protected = [pool.submit(protect, each) for each in (first, *others)]
        for done in (*subscribed, *protected):
            done.result()


def _undo(admin: TopicAdmin, description: LevelTopicDescription, made: set[TopicName]) -> None:
    """Delete what a refused creation has made, and nothing of other clients, if that is possible.

    The level topic itself is deleted last, and stays while another member topic does.
    """
    stays = False  # with its plan, an unfinished level topic can be finished or deleted
    for member in reversed(list(description.members())):
        if member.topic == description.name and stays:
            return
        try:
            if find(admin, description.topic) is not None:
                return  # another client has finished it
            if member.topic in made:
                admin.delete(member.topic)
            elif (metadata := members.metadata_of(admin, member.topic)) is not None:
                stays |= metadata.properties.get(MEMBER_PROPERTY) == description.topic
        except NotFoundError:
            continue
        except BrokerError:
            stays = True


def keep_dead_letters(admin: TopicAdmin, description: LevelTopicDescription) -> None:
    """Create the topic for dead letters again if it was deleted, perhaps by mistake."""
    (member,) = (each for each in description.members() if each.role is Role.DEAD_LETTER)

    def create() -> None:
        if find(admin, description.topic) is None:
            raise LevelTopicError(f"level topic {description.topic} was deleted")
        members.create_missing(admin, member, description)
        members.protect(admin, member.topic, members.facts_of(admin, description))
        members.subscribe(admin, member)
        log.warning("%s had been deleted, and was created again", member.topic)

    members.keep(admin, member.topic.partition(0), create)


def find(admin: TopicAdmin, topic: str) -> LevelTopicDescription | None:
    """Return the description of the level topic with this name; None if missing or unfinished.

    Raises:
        LevelTopicError: the topic exists and is not a level topic, or its description is damaged.
    """
    name = TopicName.parse(topic)
    metadata = members.metadata_of(admin, name)
    return None if metadata is None else _described(name, metadata)


def _described(name: TopicName, metadata: TopicMetadata) -> LevelTopicDescription | None:
    described = LevelTopicDescription.from_properties(name.full, metadata.properties)
    if described is None and PLAN_PROPERTY not in metadata.properties:
        raise members.not_ours(name, metadata)
    return described


def default_name(admin: TopicAdmin, business_topic: str, namespace: str | None = None) -> str:
    """Return the name of a business topic's level topic: that of the existing one, or a new one."""
    name = TopicName.parse(business_topic)
    try:
        found = _default_named(admin, name, namespace)
    except PermissionDeniedError as error:
        raise members.no_access(namespace or name.namespace_path, error) from None
    return found[0] if found else default_level_topic(business_topic, namespace)


def describe(
    admin: TopicAdmin, topic: str, *, search: bool = False, unfinished: bool = False
) -> LevelTopicDescription:
    """Return the description of a level topic.

    Args:
        topic: the level topic, one of its member topics or their partitions, or a business topic
            whose level topic has the default name.
        search: True to search for level topics of other names in the namespace of a business
            topic, and for those of the default name in the other namespaces of its tenant.
        unfinished: True to return the plan of one whose creation or deletion was not finished.

    Raises:
        LevelTopicError: there is none, it is unfinished, or several serve the business topic.
    """
    name = TopicName.parse(topic).without_partition
    metadata = members.metadata_of(admin, name)
    serving = _serving(admin, name, metadata)
    if not serving and search:
        serving = serving_level_topics(admin, name)
    if len(serving) > 1:
        raise LevelTopicError(
            f"{name} is served by several level topics: name one of {', '.join(serving)}"
        )
    level_name = TopicName.parse(serving[0] if serving else default_level_topic(name.full))
    if level_name != name:
        metadata = members.metadata_of(admin, level_name)
    if metadata is None:
        raise LevelTopicError(
            f"{name} has no level topic ({level_name} does not exist): create one "
            f"with `delaylevel levels create {shell(name)}`"
        )
    plan = metadata.properties.get(PLAN_PROPERTY)
    state = metadata.properties.get(DESCRIPTION_PROPERTY, BEING_DELETED)
    if unfinished and plan is not None and state == BEING_DELETED:
        return LevelTopicDescription.from_json(level_name.full, plan)
    described = _described(level_name, metadata)
    if described is None:
        problem = _unfinished(level_name.full, metadata.properties)
        raise LevelTopicError(f"level topic {level_name}: {problem}")
    served = {*described.targets, *(member.topic.full for member in described.members())}
    if name.full not in served:
        raise LevelTopicError(
            f"{name} has no level topic ({level_name} serves other topics): "
            f"create one with `delaylevel levels create {shell(name)} --level-topic …`"
        )
    return described


def without_search(admin: TopicAdmin, name: TopicName) -> list[str]:
    """Return the level topics to which a topic belongs, as far as a few requests can tell."""
    return _serving(admin, name, members.metadata_of(admin, name))


def _serving(admin: TopicAdmin, name: TopicName, metadata: TopicMetadata | None) -> list[str]:
    owner = metadata.properties.get(MEMBER_PROPERTY) if metadata is not None else None
    return [owner] if owner is not None else _default_named(admin, name, None)


def _unfinished(level_topic: str, properties: Mapping[str, str]) -> str:
    plan = properties.get(PLAN_PROPERTY)
    again = "create it again"
    if plan is not None:
        again += f" with `{LevelTopicDescription.from_json(level_topic, plan).creation_command()}`"
    return (
        f"its creation was not finished: {again}, or delete it with "
        f"`delaylevel levels delete {shell(level_topic)}`"
    )


def _default_named(
    admin: TopicAdmin, business_topic: TopicName, namespace: str | None
) -> list[str]:
    """Return the level topics of default names that carry a business topic, in their order."""
    found, denied = [], None
    for name in default_level_topics(business_topic.full, namespace):
        try:
            if _carries(admin, name, business_topic):
                found.append(name)
        except PermissionDeniedError as error:
            denied = denied or error
    # A role may have grants on the topics of one name only.
    if denied is not None and not found:
        raise denied
    return found


def _carries(admin: TopicAdmin, level_topic: str, business_topic: TopicName) -> bool:
    """Return True if a level topic exists, also unfinished or damaged, and carries a topic."""
    metadata = members.metadata_of(admin, TopicName.parse(level_topic))
    properties = metadata.properties if metadata is not None else {}
    if properties.get(MEMBER_PROPERTY) != level_topic:
        return False
    try:
        described = LevelTopicDescription.from_properties(level_topic, properties)
        if described is None and PLAN_PROPERTY in properties:
            described = LevelTopicDescription.from_json(level_topic, properties[PLAN_PROPERTY])
    except LevelTopicError:
        return True  # the next one who reads it raises the error
    return described is None or business_topic.full in described.targets


def _look(admin: TopicAdmin, name: TopicName) -> FoundLevelTopic | None:
    """Return a level topic, also an unfinished or damaged one; None if the topic is none."""
    metadata = members.metadata_of(admin, name)
    if metadata is None or metadata.properties.get(MEMBER_PROPERTY) != name.full:
        return None
    try:
        described = LevelTopicDescription.from_properties(name.full, metadata.properties)
        problem = None if described else _unfinished(name.full, metadata.properties)
    except LevelTopicError as error:
        return FoundLevelTopic(name.full, None, str(error))
    return FoundLevelTopic(name.full, described, problem)


def serving_level_topics(admin: TopicAdmin, business_topic: TopicName) -> list[str]:
    """Return the level topics of other names or namespaces that carry a business topic."""
    found: list[str] = []
    with contextlib.suppress(PermissionDeniedError):
        found = [
            item.topic
            for item in list_level_topics(admin, business_topic.namespace_path)
            if item.description is not None and business_topic.full in item.description.targets
        ]
    if found:
        return found
    try:
        namespaces = admin.list_namespaces(business_topic.tenant)
    except AdminError:
        return []

    def look(namespace: str) -> str | None:
        name = default_level_topic(business_topic.full, namespace)
        try:
            return name if _carries(admin, name, business_topic) else None
        except AdminError:
            return None

    others = [name for name in namespaces if name != business_topic.namespace_path]
    return [name for name in in_parallel(look, others) if name is not None]


def list_level_topics(admin: TopicAdmin, namespace: str) -> list[FoundLevelTopic]:
    """Return every level topic of a ``tenant/namespace``, also unfinished and damaged, by name.

    Raises:
        NotFoundError: the namespace does not exist.
    """
    return level_topics_of(admin, partitioned_topics(admin, namespace))


def partitioned_topics(admin: TopicAdmin, namespace: str) -> list[TopicName]:
    """Return the partitioned topics of a ``tenant/namespace``; errors as `list_level_topics`."""
    try:
        return admin.list_partitioned_topics(namespace)
    except NotFoundError as error:
        raise members.no_namespace(namespace, error) from None


def level_topics_of(admin: TopicAdmin, names: Sequence[TopicName]) -> list[FoundLevelTopic]:
    """Return those of some topics that are level topics, also unfinished and damaged."""
    found = in_parallel(partial(_look, admin), names)
    return [each for each in found if each is not None]


def notes(admin: TopicAdmin, description: LevelTopicDescription) -> tuple[str, ...]:
    """Return notes on the policies of the namespace that are no reason to refuse it."""
    facts = members.facts_of(admin, description)
    return rules.notes(description, facts.namespace, facts.broker)


def check_creatable(
    admin: TopicAdmin, description: LevelTopicDescription
) -> tuple[Facts, Existing]:
    """Check what `create` needs, and return facts with the description to write."""
    with contextlib.suppress(LevelTopicError):  # the check of the member topics raises it
        stored = find(admin, description.topic)
        if stored is not None and description.levels in stored.former:  # from before an expansion
            description = replace(description, levels=stored.levels)
    members.check_names(description)
    facts = members.facts_of(admin, description)
    members.check_partition_limit(description, facts.broker.max_partitions)
    existing = {
        member.topic: members.existing(admin, member, description)
        for member in description.members()
    }
    members.refuse_unsafe(admin, facts)
    return facts, existing
