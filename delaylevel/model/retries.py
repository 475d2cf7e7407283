"""Retries of a subscription: the names of its topics, and properties of its dead letters.

The names of the topics are those of the Java client.
"""

from __future__ import annotations

from collections.abc import Mapping

from .topic_name import TopicName

RETRY_SUFFIX = "-RETRY"
DEAD_LETTER_SUFFIX = "-DLQ"

# The names of the Java client, so that its consumers and tools understand a retried copy. None of
# them begins with ``delaylevel.``, because routing removes such properties.
#: Number of failed attempts so far.
FAILED_ATTEMPTS = "RECONSUMETIMES"
#: Business topic of the first message.
REAL_TOPIC = "REAL_TOPIC"
#: Subscription that the copy is for.
REAL_SUBSCRIPTION = "REAL_SUBSCRIPTION"
#: Position of the first message.
ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
_JAVA = frozenset((FAILED_ATTEMPTS, REAL_TOPIC, REAL_SUBSCRIPTION, ORIGIN_MESSAGE_ID))

#: Prefix of our own properties of retried copies and of their dead letters.
RETRY_PREFIX = "delaylevel-retry-"
#: ID of the first message, the same for all attempts.
RETRY_ID = RETRY_PREFIX + "id"
#: Publish time of the first message, ms since the epoch.
RETRY_PUBLISHED = RETRY_PREFIX + "published"
#: Error of the last attempt, e.g. ``ValueError: text``.
ERROR = RETRY_PREFIX + "error"
#: Traceback of the last attempt, of a dead letter.
TRACEBACK = RETRY_PREFIX + "traceback"
#: Number of attempts before the message became a dead letter.
ATTEMPTS = RETRY_PREFIX + "attempts"
#: Properties that describe the attempts that failed.
ATTEMPT_PROPERTIES = frozenset((ERROR, TRACEBACK, ATTEMPTS))
#: Number of times that the message has been a dead letter.
ROUND = RETRY_PREFIX + "round"

# Properties of a retry or dead-letter topic itself: the subscription to which it belongs.
OWNER_TOPIC = "delaylevel-retry.topic"
OWNER_SUBSCRIPTION = "delaylevel-retry.subscription"
OWNER_LEVEL_TOPIC = "delaylevel-retry.level-topic"


def retry_topic(topic: str, subscription: str) -> TopicName:
    """Return the topic of retried copies; ``topic`` may be a partition."""
    return _own(topic, subscription, RETRY_SUFFIX)


def dead_letter_topic(topic: str, subscription: str) -> TopicName:
    """Return the topic of dead letters; ``topic`` may be a partition."""
    return _own(topic, subscription, DEAD_LETTER_SUFFIX)


def replayed_properties(properties: Mapping[str, str], other_target: bool) -> dict[str, str]:
    """Return the properties of a subscription's dead letter, or other message, for a replay.

    With another target than the retry topic, its consumers would take it for a copy of their own.
    """
    if ATTEMPTS not in properties:
        return dict(properties)
    if other_target:
        return without_retries(properties)
    return {name: value for name, value in properties.items() if name not in ATTEMPT_PROPERTIES}


def without_retries(properties: Mapping[str, str]) -> dict[str, str]:
    """Return properties without those that retries add."""
    return {
        name: value
        for name, value in properties.items()
        if name not in _JAVA and not name.startswith(RETRY_PREFIX)
    }


def _own(topic: str, subscription: str, suffix: str) -> TopicName:
    return TopicName.parse(topic).without_partition.with_suffix(f"-{subscription}{suffix}")
