"""Results of the Pulsar client: their exceptions, and the failures that may pass by themselves."""

from __future__ import annotations

from typing import Any

import pulsar

from delaylevel.cluster.failures import TRANSIENT_FAILURES
from delaylevel.errors import LevelTopicError

# An open producer of the client survives these: it reconnects until its messages time out.
_TRANSIENT = TRANSIENT_FAILURES - {"AlreadyClosed", "Interrupted"}  # the client itself was closed


def is_transient(result: Any) -> bool:
    """Return True if opening a producer may succeed later without a change of the topic.

    A result without a name is internal to the client, which uses it for "try again".
    """
    return result.name not in pulsar.Result.__members__ or result.name in _TRANSIENT


def error_of(result: Any) -> Exception:
    """Return the exception that the client's blocking calls raise for a result."""
    named = result.name in pulsar.Result.__members__
    name = result.name if named else f"Result {result.value}"
    error: Exception = getattr(pulsar, name, pulsar.PulsarException)(f"Pulsar error: {name}")
    return error


def result_of(error: BaseException) -> Any:
    """Return the result for callbacks that stands for an exception."""
    if isinstance(error, LevelTopicError):
        return pulsar.Result.TopicNotFound
    name = type(error).__name__
    return pulsar.Result.__members__.get(name, pulsar.Result.UnknownError)
