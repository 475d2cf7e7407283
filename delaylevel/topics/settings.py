"""Settings of a level topic that can be changed while it is in use."""

from __future__ import annotations

from dataclasses import replace

from delaylevel.cluster.port import TopicAdmin
from delaylevel.model.level_topic import (
    DESCRIPTION_PROPERTY,
    LevelTopicDescription,
    MissingTarget,
)

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
