"""Settings of a level topic that can be changed while it is in use."""

from __future__ import annotations

from dataclasses import replace

from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import LevelTopicError
from delaylevel.model.level_topic import (
    DESCRIPTION_PROPERTY,
    LevelTopicDescription,
    MissingTarget,
)

from . import members, safety
from .registry import describe


def set_on_missing_target(
    admin: TopicAdmin, topic: str, policy: MissingTarget
) -> LevelTopicDescription:
    """Set the policy for messages whose business topic does not exist at hand-off.

    The Spark job and the dispatcher apply it within seconds, a Function when it is restarted. It
    applies to messages that are already held at their next retry.

    Args:
        topic: the level topic, or a topic that :func:`delaylevel.topics.describe` finds it by.

    Returns:
        The description with the policy.
    """
    before = describe(admin, topic, search=True)
    if before.on_missing_target is not policy:
        after = replace(before, on_missing_target=policy)
        admin.set_properties(after.name, {DESCRIPTION_PROPERTY: after.to_json()})
    return describe(admin, before.topic)


def set_attribute(admin: TopicAdmin, topic: str, attribute: str) -> LevelTopicDescription:
    """Set the attribute by which live queries select pending messages.

    A dispatcher applies it to the window partitions that it acquires afterwards.

    Args:
        topic: the level topic, or a topic that :func:`delaylevel.topics.describe` finds it by.
        attribute: ``size``, ``delay``, or the name of a property.

    Returns:
        The description with the attribute.

    Raises:
        InvalidInputError: the attribute has no name, or too long a name.
    """
    before = describe(admin, topic, search=True)
    if before.attribute != attribute:
        after = replace(before, attribute=attribute)
        admin.set_properties(after.name, {DESCRIPTION_PROPERTY: after.to_json()})
    return describe(admin, before.topic)


def add_feature(admin: TopicAdmin, topic: str, feature: str) -> LevelTopicDescription:
    """Add a feature to a level topic, which every reader and writer then has to know.

    Upgrade all of them first: versions that do not know the feature stop, or refuse to start. The
    member topics that the feature needs are created before the description names it. A feature that
    the level topic has already is no error; missing member topics are created again.

    Args:
        topic: the level topic, or a topic that :func:`delaylevel.topics.describe` finds it by.
        feature: a name in :data:`delaylevel.model.features.FEATURES`.

    Returns:
        The description with the feature.

    Raises:
        InvalidInputError: this version does not know the feature, or the final window does not
            allow it.
        LevelTopicError: another client changed the level topic at the same time, or the name of a
            member topic is in use.
    """
    before = describe(admin, topic, search=True)
    after = replace(before, features=(*before.features, feature))
    safety.check_features(after)
    safety.check_names(after)
    _create_members(admin, replace(before, features=()), after)
    if after.features == before.features:
        return before
    admin.set_properties(after.name, {DESCRIPTION_PROPERTY: after.to_json()})
    found = describe(admin, after.topic)
    # Pulsar has no compare-and-set for properties: another client may have written meanwhile.
    if feature not in found.features:
        raise LevelTopicError(
            f"level topic {after.topic} was changed by another client at the same time: add the "
            f"feature {feature!r} again"
        )
    return found


def _create_members(
    admin: TopicAdmin, without: LevelTopicDescription, after: LevelTopicDescription
) -> None:
    """Create the member topics that features add, as far as they are missing."""
    added = [member for member in after.members() if member not in set(without.members())]
    if not added:
        return
    policies, settings = members.policies_of(admin, after.name), admin.broker_settings()
    for member in added:
        found = members.existing(admin, member, after)
        members.ensure(admin, member, after, policies, settings, found)
