"""Member topics of a level topic: checks, creation and topic policies."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from delaylevel.cluster import rules
from delaylevel.cluster.port import TopicAdmin, TopicMetadata, TopicPolicies
from delaylevel.cluster.rules import Facts
from delaylevel.errors import (
    AdminError,
    BrokerError,
    ConflictError,
    InvalidInputError,
    InvalidStrategyError,
    LevelTopicError,
    NotFoundError,
    PermissionDeniedError,
    StrategyMismatchError,
    UnsafeNamespaceError,
)
from delaylevel.model.formatting import exact_duration, shell
from delaylevel.model.level_topic import (
    LONGEST_NAME,
    MEMBER_PROPERTY,
    PLAN_PROPERTY,
    SUBSCRIPTION,
    FinalWindow,
    LevelTopicDescription,
    Member,
)
from delaylevel.model.strategy import COARSER_FIRST
from delaylevel.model.topic_name import TopicName


def check_partition_limit(description: LevelTopicDescription, limit: int | None) -> None:
    """Raise InvalidStrategyError beyond the broker's limit of partitions; 0 or None is no limit."""
    for member in description.members():
        if limit and member.partitions > limit:
            raise InvalidStrategyError(
                f"{member.topic} would need {member.partitions:,} partitions, more than the "
                f"broker's limit of {limit:,} (maxNumPartitionsPerPartitionedTopic): "
                f"{COARSER_FIRST}"
            )


def check_names(description: LevelTopicDescription) -> None:
    """Raise InvalidInputError if the level topic's name or one of its targets is impossible."""
    for name in (description.name, *map(TopicName.parse, description.targets)):
        if name.unusable:
            raise InvalidInputError(f"topic {name.full!r} cannot be used: {name.unusable}")
    if "-partition-" in description.name.local:
        raise InvalidInputError(
            f"a level topic cannot be called {description.topic}: '-partition-' is for partitions; "
            "name the topic itself"
        )
    own = {member.topic.full for member in description.members()}
    longest = max((*own, *description.targets), key=_length)
    if _length(longest) > LONGEST_NAME:
        raise InvalidInputError(
            f"topic {longest} has a name of {_length(longest)} bytes: a target or member topic may "
            f"have {LONGEST_NAME}, because messages carry such names with them; shorten it"
        )
    for target in description.targets:
        # Its messages would circulate for ever.
        if TopicName.parse(target).without_partition.full in own:
            raise InvalidInputError(
                f"{target} is part of the level topic {description.topic} and cannot be its target"
            )


def _length(name: str) -> int:
    return len(name.encode())


# Policies pass through a system topic, which the broker creates at first use. A topic that another
# client has just created is visible a moment after the conflict.
WAIT_S = 20.0
_POLL_S = 0.02
_CREATE_AGAIN_S = 0.5
# The answer of a broker if a namespace has as many topics and partitions as it may have.
_LIMIT, _PARTITION_LIMIT = 412, 406
_SET_AGAIN_S = 0.5
# An interface that hangs would answer after its timeout, 30 s by default.
_LOOK_S = 5.0


def metadata_of(admin: TopicAdmin, name: TopicName) -> TopicMetadata | None:
    """Return the metadata of a topic; None if it does not exist."""
    try:
        return admin.partitioned_metadata(name)
    except NotFoundError:
        return None


def facts_of(
    admin: TopicAdmin, description: LevelTopicDescription, topic: TopicName | None = None
) -> Facts:
    """Return the rules of a topic's namespace, by default the level topic's, and of the broker."""
    namespace = (topic or description.name).namespace_path
    try:
        policies = admin.namespace_policies(namespace)
    except NotFoundError as error:
        raise no_namespace(namespace, error) from None
    except PermissionDeniedError as error:
        raise no_access(namespace, error) from None
    return Facts(description, policies, admin.broker_settings())


def no_access(namespace: str, error: PermissionDeniedError) -> PermissionDeniedError:
    """Return the error for a namespace that may not be used, with its remedy."""
    return PermissionDeniedError(
        f"level topics in namespace {namespace} cannot be used ({error}): an admin of the tenant "
        "creates them (`delaylevel levels create TOPIC --level-namespace "
        f"{shell(namespace)}`) and grants this role access to them (docs/security.md)",
        status=error.status,
        reason=error.reason,
    )


def no_namespace(namespace: str, error: NotFoundError) -> NotFoundError:
    """Return the error for a missing namespace, with its remedy."""
    return NotFoundError(
        f"namespace {namespace} does not exist: create it first "
        f"(`pulsar-admin namespaces create {namespace}`)",
        status=404,
        reason=error.reason,
    )


def refuse_unsafe(admin: TopicAdmin, facts: Facts) -> None:
    """Raise UnsafeNamespaceError with all problems and remedies, if there are any."""
    targets = rules.read_targets(admin, facts.description)
    problems = tuple(map(str, rules.violations(replace(facts, targets=targets))))
    if problems:
        raise UnsafeNamespaceError(
            f"messages of {facts.description.topic} would not be safe in {facts.path}, or could "
            "not be released (docs/operations.md):\n  " + "\n  ".join(problems),
            problems=problems,
        )


def _words(description: LevelTopicDescription) -> str:
    window = description.final_window.value
    if description.final_window is FinalWindow.TRACKER:
        window += f" ({description.window_partitions} partitions)"
    return (
        f"{description.levels}; mover {description.mover.value}, final window {window}, "
        f"hold pause {exact_duration(description.hold_pause_ms)}"
    )


def check_same(wanted: LevelTopicDescription, found: LevelTopicDescription) -> None:
    """Raise StrategyMismatchError, which shows both, unless they differ only in the targets."""
    if (wanted.levels, wanted.fixed) == (found.levels, found.fixed):
        return
    command = found.creation_command(*sorted(set(wanted.targets) - set(found.targets)))
    raise StrategyMismatchError(
        f"level topic {wanted.topic} exists with another strategy. Requested: {_words(wanted)}. "
        f"The topic's own: {_words(found)}. Request that strategy (`{command}`), or name another "
        "level topic"
    )


def not_ours(name: TopicName, metadata: TopicMetadata) -> LevelTopicError:
    """Return the error for a topic that is not a part of the level topic."""
    owner = metadata.properties.get(MEMBER_PROPERTY)
    why = "is an ordinary topic: it does not describe itself as a level topic"
    if owner is not None:
        why = f"belongs to the level topic {owner}"
    return LevelTopicError(
        f"{name} exists and {why}; nothing was changed. Name another level topic "
        "(delay_level_topic=…, --level-topic)"
    )


def existing(
    admin: TopicAdmin, member: Member, description: LevelTopicDescription
) -> TopicMetadata | None:
    """Return the metadata of a member topic that is as described; None if it does not exist."""
    metadata = metadata_of(admin, member.topic)
    if metadata is None:
        return None
    properties = metadata.properties
    if not metadata.partitions or properties.get(MEMBER_PROPERTY) != description.topic:
        raise not_ours(member.topic, metadata)
    if member.topic == description.name:
        described = LevelTopicDescription.from_properties(description.topic, properties)
        if described is not None:
            check_same(description, described)
        elif PLAN_PROPERTY in properties:
            plan = LevelTopicDescription.from_json(description.topic, properties[PLAN_PROPERTY])
            check_same(description, plan)
    if metadata.partitions != member.partitions:
        raise LevelTopicError(
            f"{member.topic} has {metadata.partitions} partitions and should have "
            f"{member.partitions}: another client has changed it, or `delaylevel levels expand` "
            "was not finished (run it again)"
        )
    return metadata


def create_missing(admin: TopicAdmin, member: Member, description: LevelTopicDescription) -> bool:
    """Create a member topic, or check that of a faster client; return True if it was created."""
    properties = {MEMBER_PROPERTY: description.topic}
    if member.topic == description.name:
        properties[PLAN_PROPERTY] = description.to_json()
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            admin.create_partitioned(member.topic, member.partitions, properties)
            return True
        except AdminError as error:
            if error.status == _LIMIT:
                raise InvalidStrategyError(
                    f"{member.topic} with {member.partitions:,} partitions cannot be created "
                    f"({error.reason}): raise the limit of the namespace (`pulsar-admin namespaces "
                    "set-max-topics-per-namespace`), or use fewer partitions or another namespace"
                ) from error
            if error.status == _PARTITION_LIMIT:  # not every role may read the limit before
                raise InvalidStrategyError(
                    f"{member.topic} with {member.partitions:,} partitions cannot be created "
                    f"({error.reason}): {COARSER_FIRST}"
                ) from error
            # A broker also refuses a name while it still deletes an earlier topic of this name.
            if not isinstance(error, ConflictError):
                raise
            again_s = min(deadline_s, time.monotonic() + _CREATE_AGAIN_S)
            if await_true(lambda: existing(admin, member, description) is not None, again_s):
                return False
            if time.monotonic() >= deadline_s:
                raise


def keep(admin: TopicAdmin, partition: TopicName, create: Callable[[], object]) -> None:
    """Create the topic of a partition again if it was deleted; ``create`` subscribes last."""
    try:
        stats = admin.within(_LOOK_S).partition_stats(partition)
    except NotFoundError:
        create()
        return
    except BrokerError:
        return  # most likely it exists
    if SUBSCRIPTION in stats.subscriptions:
        return
    if metadata_of(admin, partition.without_partition) is not None:
        create()  # it was not finished
        return
    # A client that was connected has created the partition again. The broker refuses to create the
    # topic around it.
    with suppress(ConflictError):
        admin.create_subscription(partition, SUBSCRIPTION, earliest=True)


def subscribe(admin: TopicAdmin, member: Member) -> None:
    """Create the durable subscription of every partition that lacks it."""
    try:
        admin.create_subscription(member.topic, SUBSCRIPTION, earliest=True)
    except ConflictError as error:
        if error.status != 409:  # it exists
            raise
    found = admin.partitioned_stats(member.topic)
    for index in range(member.partitions):
        # A broker may leave partitions out of the statistics of a topic.
        stats = found.get(index) or admin.partition_stats(member.topic.partition(index))
        subscription = stats.subscriptions.get(SUBSCRIPTION)
        if subscription is None or not subscription.durable:
            raise LevelTopicError(
                f"{member.topic.partition(index)} has no durable subscription {SUBSCRIPTION!r} "
                "although it was created just now: messages parked there would be lost; try again"
            )


def protect(admin: TopicAdmin, topic: TopicName, facts: Facts, *, is_new: bool = False) -> None:
    """Set the policies that keep parked messages, and lift the limits of our clients."""
    try:
        wanted = rules.own_policies(facts.namespace, facts.broker)
        apply_policies(admin, topic, wanted, is_new=is_new)
    except AdminError as error:
        if error.status != rules.NO_TOPIC_POLICIES:
            raise
        refuse_unsafe(admin, replace(facts, broker=replace(facts.broker, topic_policies=False)))


def apply_policies(
    admin: TopicAdmin, topic: TopicName, wanted: TopicPolicies, *, is_new: bool = False
) -> None:
    """Set policies of a topic, and wait until the broker reports them; a new one has none yet."""

    def missing() -> dict[str, Any]:
        return rules.missing_policies(admin.topic_policies(topic), wanted)

    if not is_new and not missing():
        return
    admin.set_topic_policies(topic, wanted)
    deadline_s = time.monotonic() + WAIT_S
    while True:
        again_s = min(deadline_s, time.monotonic() + _SET_AGAIN_S)
        if await_true(lambda: not missing(), again_s):
            return
        if time.monotonic() >= deadline_s:
            raise LevelTopicError(
                f"the broker accepted the policies of {topic} but does not report them after "
                f"{WAIT_S:.0f} s: is the namespace's system topic healthy? Try again"
            )
        # Pulsar 3.3 loses a policy if another one of the topic is set before it has read the first.
        for name, value in list(missing().items())[:1]:
            admin.set_topic_policies(topic, TopicPolicies(**{name: value}))


def await_true(condition: Callable[[], bool], deadline_s: float) -> bool:
    """Wait until a condition is true, and return whether it is by then."""
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
