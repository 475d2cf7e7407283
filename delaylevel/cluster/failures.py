"""Errors and results of the Pulsar client, for rooms that do not import the client."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pulsar

from delaylevel.errors import ClientError

log = logging.getLogger(__name__)

#: The result that the client passes to a callback when the broker has stored the message.
OK = pulsar.Result.Ok
_OK_VALUE = OK.value

#: The client's name of the error for a message above the broker's maximum message size.
TOO_LARGE = "MessageTooBig"
#: Names of the errors of single messages: the client refuses them before it sends them, and the
#: producer goes on with the next message.
MESSAGE_REFUSALS = frozenset((TOO_LARGE, "InvalidMessage"))

# The broker has a problem, not the topic: setting the message aside would fail as well.
_TRANSIENT_ERRORS = (
    pulsar.ConnectError,
    pulsar.NotConnected,
    pulsar.ServiceUnitNotReady,
    pulsar.TooManyLookupRequestException,
    pulsar.AlreadyClosed,
    pulsar.Interrupted,
)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raise ClientError for every exception of the client that the block raises.

    Raises:
        ClientError: the client's own exception, with its text and its name.
    """
    try:
        yield
    except pulsar.PulsarException as error:
        name = error_name(error)
        transient = isinstance(error, _TRANSIENT_ERRORS)
        raise ClientError(str(error) or name, name=name, transient=transient) from error


def close_quietly(resource: Any, kind: str) -> None:
    """Close a producer, consumer or reader; ignore a failure, as it is unusable anyway."""
    try:
        resource.close()
    except pulsar.PulsarException as error:
        log.debug("closing a %s: %s", kind, error_name(error))


def error_name(error: BaseException) -> str:
    """Return the client's name of an error, e.g. ``TopicTerminated``."""
    return type(error).__name__


def is_ok(result: Any) -> bool:
    """Return True if this result of a callback means that the broker has stored the message."""
    # Comparing the client's own objects takes three times as long.
    return bool(getattr(result, "value", None) == _OK_VALUE)


def is_too_large(reason: str) -> bool:
    """Return True if this name of an error means that a message is too large for its topic."""
    return reason == TOO_LARGE


def result_name(result: Any) -> str:
    """Return the client's name of a callback's result, e.g. ``TopicTerminated``."""
    return str(result).rpartition(".")[2]
