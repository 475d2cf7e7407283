"""Properties of retried copies and dead letters, and their IDs, without I/O."""

from __future__ import annotations

import hashlib
from urllib.parse import quote

from delaylevel.cluster.failures import error_name
from delaylevel.model import envelope as env
from delaylevel.model import retries
from delaylevel.model.envelope import SchemaRef
from delaylevel.model.unreadable import RAW

from .failure import Failure
from .message import ReceivedMessage

LONGEST_TRACE = 8_000
_LONGEST_REASON = 1_000


def copy_properties(message: ReceivedMessage, error: str) -> dict[str, str]:
    """Return the properties of a retried copy, without those that routing adds.

    Args:
        error: text of the error; empty to leave it out.
    """
    properties = env.application_properties(message.all_properties)
    if message.retry_properties:
        for name in retries.ATTEMPT_PROPERTIES:
            properties.pop(name, None)
    else:
        properties = retries.without_retries(properties)
    properties[retries.FAILED_ATTEMPTS] = str(message.attempt)
    properties[retries.REAL_TOPIC] = message.topic
    properties[retries.REAL_SUBSCRIPTION] = message.subscription
    origin = message.retry_properties.get(retries.ORIGIN_MESSAGE_ID)
    properties[retries.ORIGIN_MESSAGE_ID] = origin or message.position_id
    properties[retries.RETRY_ID] = message.id
    properties[retries.RETRY_PUBLISHED] = str(message.first_published_ms)
    if error:
        properties[retries.ERROR] = error
    return properties


def copy_id(message: ReceivedMessage) -> str:
    """Return the ID of the retried copy that follows this attempt.

    A second copy made by a crash before the acknowledgement has the same ID, and every other copy
    another one, also after a replay of the dead letter.
    """
    rounds = round_of(message)
    return _own_id(message, f"{rounds}.{message.attempt}" if rounds else str(message.attempt))


def letter_id(message: ReceivedMessage) -> str:
    """Return the ID of the dead letter that follows this attempt."""
    return _own_id(message, f"dead.{round_of(message) + 1}")


def _own_id(message: ReceivedMessage, step: str) -> str:
    whole = f"{message.id}#{quote(message.subscription, safe='')}#{step}"
    if len(whole) <= env.LONGEST_ID:
        return whole
    return f"sha256-{hashlib.sha256(clean(whole).encode()).hexdigest()}#{step}"


def letter_properties(
    message: ReceivedMessage,
    found: dict[str, str],
    failure: Failure,
    *,
    retry_topic: str,
    due_ms: int,
    schema: SchemaRef | None,
    compression: str | None,
) -> dict[str, str]:
    """Return all properties of a dead letter.

    Args:
        found: properties of the message, with those that replace unreadable fields.
        retry_topic: full name of the topic to which a replay sends it.
        due_ms: the present time, ms since the epoch.
        schema: the schema of the payload; None for plain bytes.
        compression: name of the compression for a replay; None without one.
    """
    properties = {
        **copy_properties(message, text_of_error(failure)),
        retries.TRACEBACK: clean(failure.trace)[-LONGEST_TRACE:],
        retries.ATTEMPTS: str(message.attempt),
        retries.ROUND: str(round_of(message) + 1),
        env.DUE: str(due_ms),
        env.TARGET: retry_topic,
        env.ID: letter_id(message),
        env.SOURCE: message.position_id,
        env.REASON: reason_for(message, failure),
    }
    # Its attempts are counted from 1 again if it is replayed.
    del properties[retries.FAILED_ATTEMPTS]
    unreadable = (env.UNREADABLE, RAW)
    properties.update((k, v) for k, v in found.items() if k.startswith(unreadable))
    if not failure.trace:
        del properties[retries.TRACEBACK]
    if schema is not None:
        properties[env.SCHEMA] = str(schema)
    if compression is not None:
        properties[env.COMPRESSION] = compression
    return properties


def round_of(message: ReceivedMessage) -> int:
    """Return the number of times that a message has been a dead letter."""
    text = message.retry_properties.get(retries.ROUND, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def reason_for(message: ReceivedMessage, failure: Failure) -> str:
    """Return the reason of a dead letter, in one line."""
    return f"attempt {message.attempt} failed: {text_of_error(failure)}"


def text_of_error(failure: Failure) -> str:
    """Return the error of a failed attempt in one line of at most 1,000 characters."""
    text = failure.reason
    if not text and failure.error is not None:
        text = f"{error_name(failure.error)}: {failure.error}"
    return " ".join(clean(text).split())[:_LONGEST_REASON]


def clean(text: str) -> str:
    """Return a text that can be encoded as UTF-8: properties cannot be anything else."""
    return text.encode("utf-8", "backslashreplace").decode()
