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
FAILED_ATTEMPTS = "RECONSUMETIMES"  # so far
REAL_TOPIC = "REAL_TOPIC"  # of the first message
REAL_SUBSCRIPTION = "REAL_SUBSCRIPTION"  # that the copy is for
ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"  # position of the first message
_JAVA = frozenset((FAILED_ATTEMPTS, REAL_TOPIC, REAL_SUBSCRIPTION, ORIGIN_MESSAGE_ID))

#: Prefix of our own properties of retried copies and of their dead letters.
RETRY_PREFIX = "delaylevel-retry-"
RETRY_ID = RETRY_PREFIX + "id"  # of the first message, the same for all attempts
RETRY_PUBLISHED = RETRY_PREFIX + "published"  # publish time of the first message, in ms
ERROR = RETRY_PREFIX + "error"  # of the last attempt, e.g. ``ValueError: text``
TRACEBACK = RETRY_PREFIX + "traceback"  # of the last attempt, of a dead letter
ATTEMPTS = RETRY_PREFIX + "attempts"  # before the message became a dead letter
ATTEMPT_PROPERTIES = frozenset((ERROR, TRACEBACK, ATTEMPTS))  # of those that failed
ROUND = RETRY_PREFIX + "round"  # number of times that the message has been a dead letter

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
    """Return the properties of a subscription's dead letter, or other message, for a replay."""
    if ATTEMPTS not in properties:
        return dict(properties)
    if other_target:  # than the retry topic: its consumers would take it for a copy of their own
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
