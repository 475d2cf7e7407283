"""Settings of a level topic that can be changed while it is in use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import InvalidInputError, LevelTopicError
from delaylevel.model.clock import Clock
from delaylevel.model.level_topic import (
    Expired,
    FinalWindow,
    LevelTopicDescription,
    MissingTarget,
)
from delaylevel.model.pauses import ALL
from delaylevel.model.topic_name import TopicName

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
    return change(admin, topic, lambda described: replace(described, on_missing_target=policy))


def set_expiry(
    admin: TopicAdmin,
    topic: str,
    *,
    expire_after_ms: int | None = None,
    expired: Expired | None = None,
) -> LevelTopicDescription:
    """Set the default expiry of messages without their own, and the treatment of expired ones.

    The Spark job and the dispatcher apply it within seconds, a Function when it is restarted; to
    messages that are parked already, too.

    Args:
        topic: the level topic, or a topic that :func:`delaylevel.topics.describe` finds it by.
        expire_after_ms: longest time from due time to release, ms; 0 for any; None for no change.
        expired: treatment of the messages; None for no change.

    Returns:
        The description with the expiry.

    Raises:
        InvalidInputError: the time is negative.
    """

    def changed(described: LevelTopicDescription) -> LevelTopicDescription:
        after_ms = described.expire_after_ms if expire_after_ms is None else expire_after_ms
        return replace(described, expire_after_ms=after_ms, expired=expired or described.expired)

    return change(admin, topic, changed)


def pause(admin: TopicAdmin, topic: str, target: str | None, clock: Clock) -> LevelTopicDescription:
    """Let the due messages of a target wait in the window, until `resume`.

    Every dispatcher follows within five seconds, and a restart changes nothing. A target that is
    paused already stays paused.

    Args:
        topic: the level topic, or a topic that :func:`delaylevel.topics.describe` finds it by.
        target: business topic of the level topic; None for all of them.

    Returns:
        The description with the pause.

    Raises:
        TargetNotAllowedError: it is not a target of the level topic.
        LevelTopicError: the broker itself delivers the messages.
    """

    def changed(described: LevelTopicDescription) -> LevelTopicDescription:
        if described.final_window is not FinalWindow.TRACKER:
            raise LevelTopicError(
                f"level topic {described.topic} has the final window "
                f"{described.final_window.value!r}: the broker itself delivers its messages and "
                "cannot be paused; only a level topic with a tracker can"
            )
        name = _target(described, target)
        return replace(described, pauses=described.pauses.pause(name, clock.now_ms()))

    return change(admin, topic, changed)


def resume(
    admin: TopicAdmin, topic: str, target: str | None, clock: Clock, spread_ms: int = 0
) -> LevelTopicDescription:
    """End the pause of a target.

    Args:
        topic: the level topic, or a topic that :func:`delaylevel.topics.describe` finds it by.
        target: business topic of the level topic; None to end all pauses.
        spread_ms: time over which the messages that wait are released, ms; 0 for at once. Messages
            that become due later do not wait for them.

    Returns:
        The description without the pause.

    Raises:
        TargetNotAllowedError: it is not a target of the level topic.
        InvalidInputError: the spread is negative, or the target is not paused.
        LevelTopicError: all targets are paused together.
    """
    if spread_ms < 0:
        raise InvalidInputError(f"the spread is {spread_ms} ms: give 0 or more")

    before = describe(admin, topic, search=True)
    name, paused = _target(before, target), dict(before.pauses.paused)
    if not paused:
        raise InvalidInputError(f"level topic {before.topic} is not paused")
    if name not in (ALL, *paused):
        if ALL in paused:
            raise LevelTopicError(
                f"all targets of level topic {before.topic} are paused together: resume them "
                "together, without naming a target"
            )
        raise InvalidInputError(f"{name} is not paused, but {', '.join(paused)}")
    now_ms = clock.now_ms()
    return change(
        admin,
        before.topic,
        lambda found: replace(found, pauses=found.pauses.resume(name, now_ms, spread_ms)),
    )


def change(
    admin: TopicAdmin,
    topic: str,
    changed: Callable[[LevelTopicDescription], LevelTopicDescription],
) -> LevelTopicDescription:
    """Change settings of a level topic.

    Each setting has a property of its own, and only those that differ are written. So clients that
    change different settings at the same time, or expand the level topic, lose nothing; of two that
    change the same one, the later one counts.

    Args:
        topic: the level topic, or a topic that :func:`delaylevel.topics.describe` finds it by.
        changed: function that returns the description with other settings.

    Returns:
        The description as it is stored now.
    """
    before = describe(admin, topic, search=True)
    written = changed(before).settings_since(before)
    if not written:
        return before
    admin.set_properties(before.name, written)
    return describe(admin, before.topic)


def _target(described: LevelTopicDescription, target: str | None) -> str:
    """Return the full name of a target, or the name of all."""
    if target is None:
        return ALL
    full = TopicName.parse(target).full
    described.check_target(full)
    return full


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
    return change(admin, topic, lambda described: replace(described, attribute=attribute))
