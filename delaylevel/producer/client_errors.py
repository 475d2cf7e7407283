"""Errors about the broker as exceptions of the Pulsar client, for the handlers of applications.

:mod:`delaylevel.errors` does not import the client. So an application could not catch our errors
with ``except pulsar.PulsarException``. The calls of clients and producers therefore raise every
:class:`~delaylevel.errors.BrokerError` as a subclass of its class that is also an exception of the
client. It keeps the name of the class, the attributes, the traceback and the cause. If the
client has a class for the same failure, such as ``pulsar.TopicNotFound``, it is of that class.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pulsar

from delaylevel.cluster.failures import TRANSIENT_FAILURES
from delaylevel.errors import (
    BrokerError,
    BrokerUnreachableError,
    ClientError,
    DelayLevelError,
    InvalidInputError,
    LevelTopicError,
    NotFoundError,
    PermissionDeniedError,
)

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


# The results that pulsar.asyncio.PulsarException.error() returns.
_RESULTS: tuple[tuple[type[Exception], pulsar.Result], ...] = (
    (BrokerUnreachableError, pulsar.Result.ConnectError),
    (PermissionDeniedError, pulsar.Result.AuthorizationError),
    (NotFoundError, pulsar.Result.TopicNotFound),
    (pulsar.InvalidTopicName, pulsar.Result.InvalidTopicName),
)


class PulsarInvalidTopicError(InvalidInputError, pulsar.InvalidTopicName):
    """The error for a name that is no topic, as an exception of the Pulsar client."""


@contextmanager
def client_errors() -> Iterator[None]:
    """Raise every BrokerError of the block as an exception of the Pulsar client, too.

    Handlers of ``pulsar.PulsarException`` and of ``pulsar.asyncio.PulsarException`` catch it.
    """
    try:
        yield
    except BrokerError as error:
        as_client_error(error)
        raise


def as_client_error(error: DelayLevelError) -> DelayLevelError:
    """Make an error an exception of the Pulsar client, too, and return it."""
    if not hasattr(error, "_client_result"):
        result = _result(error)
        named = getattr(pulsar, result.name, None)
        is_exception = isinstance(named, type) and issubclass(named, pulsar.PulsarException)
        base = named if is_exception else pulsar.PulsarException
        error.__class__ = _pair(type(error), base)  # type: ignore[arg-type]
        error._client_result = result  # type: ignore[attr-defined]
    return error


@functools.cache
def _pair(kind: type[DelayLevelError], named: type[Exception]) -> type[DelayLevelError]:
    """Return the class for errors of one kind.

    Args:
        named: the client's class of the same failure, or ``pulsar.PulsarException``.
    """
    # Imported here: applications without asyncio seldom need it.
    import pulsar.asyncio

    members = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        # The text of pulsar.asyncio starts with the number of a result.
        "__str__": kind.__str__,
        # As in pulsar.asyncio.
        "error": lambda self: self._client_result,
        # The class cannot be found by its name.
        "__reduce__": lambda self: (_restore, (kind, self.args, self.__dict__)),
    }
    exceptions = (named, pulsar.asyncio.PulsarException)
    bases = (kind, *(each for each in exceptions if not issubclass(kind, each)))
    return type(kind.__name__, bases, members)


def _restore(
    kind: type[DelayLevelError], args: tuple[Any, ...], attributes: dict[str, Any]
) -> DelayLevelError:
    """Return a copy of an error, for ``pickle`` and ``copy``."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    del error._client_result  # type: ignore[attr-defined]
    return as_client_error(error)


def _result(error: DelayLevelError) -> pulsar.Result:
    if isinstance(error, ClientError):
        return result_named(error.name)
    for kind, result in _RESULTS:
        if isinstance(error, kind):
            return result
    return pulsar.Result.UnknownError


def result_named(name: str) -> pulsar.Result:
    """Return the client's result of a name; UnknownError if there is none."""
    return pulsar.Result.__members__.get(name, pulsar.Result.UnknownError)
