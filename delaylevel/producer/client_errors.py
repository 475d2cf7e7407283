"""Errors about the broker as exceptions of the Pulsar client, for the handlers of applications.

:mod:`delaylevel.errors` does not import the client. So an application could not catch our errors
with ``except pulsar.PulsarException``. The calls of clients and producers therefore raise every
:class:`~delaylevel.errors.BrokerError` as a subclass of its class that is also an exception of the
client. It keeps the name of the class, the attributes, the traceback and the cause.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pulsar

from delaylevel.errors import (
    BrokerError,
    BrokerUnreachableError,
    ClientError,
    NotFoundError,
    PermissionDeniedError,
)

# The results that pulsar.asyncio.PulsarException.error() returns.
_RESULTS: tuple[tuple[type[BrokerError], pulsar.Result], ...] = (
    (BrokerUnreachableError, pulsar.Result.ConnectError),
    (PermissionDeniedError, pulsar.Result.AuthorizationError),
    (NotFoundError, pulsar.Result.TopicNotFound),
)


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


def as_client_error(error: BrokerError) -> BrokerError:
    """Make an error an exception of the Pulsar client, too, and return it."""
    if not isinstance(error, pulsar.PulsarException):
        error.__class__ = _pair(type(error))
        error._result = _result(error)  # type: ignore[attr-defined]
    return error


@functools.cache
def _pair(kind: type[BrokerError]) -> type[BrokerError]:
    """Return the class for errors of one kind."""
    # Imported here: applications without asyncio seldom need it.
    import pulsar.asyncio

    members = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        # The text of pulsar.asyncio starts with the number of a result.
        "__str__": kind.__str__,
        # The class cannot be found by its name.
        "__reduce__": lambda self: (_restore, (kind, self.args, self.__dict__)),
    }
    bases = (kind, pulsar.PulsarException, pulsar.asyncio.PulsarException)
    return type(kind.__name__, bases, members)


def _restore(
    kind: type[BrokerError], args: tuple[Any, ...], attributes: dict[str, Any]
) -> BrokerError:
    """Return a copy of an error, for ``pickle`` and ``copy``."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return as_client_error(error)


def _result(error: BrokerError) -> pulsar.Result:
    if isinstance(error, ClientError):
        return result_named(error.name)
    for kind, result in _RESULTS:
        if isinstance(error, kind):
            return result
    return pulsar.Result.UnknownError


def result_named(name: str) -> pulsar.Result:
    """Return the client's result of a name; UnknownError if there is none."""
    return pulsar.Result.__members__.get(name, pulsar.Result.UnknownError)
