"""Errors and results of the Pulsar client, for rooms that do not import the client."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pulsar

from delaylevel.errors import (
    AdminError,
    BrokerError,
    BrokerUnreachableError,
    ClientError,
    LevelTopicError,
)
from delaylevel.model.topic_name import TopicName

from .port import TopicAdmin

log = logging.getLogger(__name__)

#: The result that the client passes to a callback when the broker has stored the message.
OK = pulsar.Result.Ok
_OK_VALUE = OK.value

#: The client's name of the error for a message above the broker's maximum message size.
TOO_LARGE = "MessageTooBig"
#: Names of the errors of single messages: the client refuses them before it sends them, and the
#: producer goes on with the next message.
MESSAGE_REFUSALS = frozenset((TOO_LARGE, "InvalidMessage"))
# Redirects in a circle while no broker owns a topic, and too many requests.
_PASSING_STATUSES = (307, 429)
# Answers of a proxy in front of brokers that do not answer.
_GATEWAY_STATUSES = (502, 504)

#: Names of failures that may pass by themselves: the broker has a problem, not the topic.
TRANSIENT_FAILURES = frozenset(
    {
        "AlreadyClosed",
        "BrokerMetadataError",
        "BrokerPersistenceError",
        "ConnectError",
        "Interrupted",
        "LookupError",
        "NotConnected",
        "ReadError",
        "ServiceUnitNotReady",
        "Timeout",
        "TooManyLookupRequestException",
        "UnknownError",  # the answer of brokers that start, or whose ZooKeeper session has expired
    }
)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raise ClientError for every exception of the client that the block raises."""
    try:
        yield
    except pulsar.PulsarException as error:
        raise client_error(error_name(error), str(error)) from error


def client_error(name: str, text: str = "") -> ClientError:
    """Return the error for a failure that the client reported."""
    return ClientError(text or name, name=name, transient=name in TRANSIENT_FAILURES)


def may_pass(error: BaseException | None) -> bool:
    """Return False if an error, or its cause, is a refusal: an answer that will not change."""
    # Without an answer, or while a broker fails over (5xx), the same may succeed in a moment.
    while error is not None:
        if isinstance(error, BrokerUnreachableError):
            return True  # its cause is an error of the network
        if isinstance(error, AdminError):
            return error.status >= 500 or error.status in _PASSING_STATUSES
        if isinstance(error, ClientError):
            return error.transient
        if isinstance(error, pulsar.PulsarException):
            return error_name(error) in TRANSIENT_FAILURES
        if isinstance(error, LevelTopicError) or not isinstance(error, BrokerError):
            return False
        error = error.__cause__
    return True


def is_admin_away(error: BaseException) -> bool:
    """Return True for the error of an admin interface of which no address answers."""
    # Brokers may serve their topics all the same.
    if isinstance(error, AdminError):
        return error.status in _GATEWAY_STATUSES
    return isinstance(error, BrokerUnreachableError) and not error.address


def missing_subscription(admin: TopicAdmin | None, topic: str, subscription: str) -> str:
    """Return the reason of a consumer's timeout if its subscription is missing, else nothing."""
    # The client asks until its timeout, although a broker that creates none refuses the consumer.
    if admin is None:
        return ""
    name = TopicName.parse(topic)
    with suppress(BrokerError):
        count = admin.partitioned_metadata(name).partitions
        for each in [name.partition(index) for index in range(count)] or [name]:
            if subscription not in admin.partition_stats(each).subscriptions:
                return (
                    f"subscription {subscription} of {each} does not exist, and the broker does "
                    "not create it (allowAutoSubscriptionCreation): create it with `pulsar-admin "
                    f"topics create-subscription -s {shlex.quote(subscription)} "
                    f"{shlex.quote(name.full)}`"
                )
    return ""


def close_quietly(resource: Any, kind: str) -> None:
    """Close a client, or a part of one; ignore a failure, as it is unusable anyway."""
    try:
        resource.close()
    except Exception as error:  # its host, such as a worker, may be closing it too
        log.debug("closing a %s: %s", kind, error_name(error))


def error_name(error: BaseException) -> str:
    """Return the client's name of an error, e.g. ``TopicTerminated``."""
    return type(error).__name__


def is_ok(result: Any) -> bool:
    """Return True if this result of a callback means that the broker has stored the message."""
    # Comparing the client's own objects takes three times as long.
    return bool(getattr(result, "value", None) == _OK_VALUE)


def result_name(result: Any) -> str:
    """Return the client's name of a callback's result, e.g. ``TopicTerminated``."""
    return str(result).rpartition(".")[2]
