"""All errors of the package, under one root.

Errors about the caller's input derive from :class:`InvalidInputError` (and from ``ValueError``).
Errors about the broker, or about data stored on it, derive from :class:`BrokerError`. The values
that a message mentions are also attributes of the error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class DelayLevelError(Exception):
    """Root of all errors that this package raises on purpose."""


class InvalidInputError(DelayLevelError, ValueError):
    """Unusable input from the caller; nothing was sent, stored or changed."""


class BrokerError(DelayLevelError):
    """Unexpected behaviour of the broker, or unexpected data stored on it."""


class InvalidDelayError(InvalidInputError):
    """A due time or delay that is negative, out of range, without a time zone, or given twice."""


class DelayTooLongError(InvalidInputError):
    """A delay beyond the longest level, with ``overflow="reject"``.

    Attributes:
        delay_ms: the requested delay, ms.
        maximum_delay_ms: the longest delay that the strategy accepts, ms.
    """

    def __init__(self, message: str, *, delay_ms: int, maximum_delay_ms: int) -> None:
        super().__init__(message)
        self.delay_ms = delay_ms
        self.maximum_delay_ms = maximum_delay_ms


class InvalidStrategyError(InvalidInputError):
    """A partition strategy or list of levels that cannot work."""


class UnsupportedOptionError(InvalidInputError):
    """A producer or send option that a level topic cannot preserve."""


class MessageTooLargeError(InvalidInputError):
    """A message that is too large to be parked, because later hops could not send it.

    Producers raise a subclass that is also a ``pulsar.MessageTooBig``.

    Attributes:
        size: the message's size, uncompressed, with its keys and properties, in bytes.
        limit: the largest size of a parked message, in bytes.
    """

    def __init__(self, message: str, *, size: int, limit: int) -> None:
        super().__init__(message)
        self.size = size
        self.limit = limit


class EnvelopeError(InvalidInputError):
    """A parked message with missing or invalid ``delaylevel.*`` properties.

    Attributes:
        reason: one line, also stored with the dead letter.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class UnknownTargetError(EnvelopeError):
    """A parked message whose business topic the level topic's description does not list."""


class MissingExtraError(DelayLevelError, ImportError):
    """A name whose optional dependency is not installed."""


@contextmanager
def from_extra(extra: str | None, what: str) -> Iterator[None]:
    """Name the extra, if any, that is missing if an import fails in a ``with`` block."""
    try:
        yield
    except ModuleNotFoundError as error:
        if extra is None or (error.name or "").partition(".")[0] == "delaylevel":
            raise
        text = f"{what} {error.name}: pip install 'delaylevel[{extra}]'"
        raise MissingExtraError(text, name=error.name) from error


class ConfigError(InvalidInputError):
    """An unusable configuration file, environment variable or flag."""


class StepsError(InvalidInputError):
    """User-defined steps that drop, change or duplicate rows that the Spark job must forward."""


class BrokerUnreachableError(BrokerError):
    """No response from the service or admin address.

    Attributes:
        address: ``host:port`` of a broker that does not answer, although another one names it as
            the broker of a topic; empty if no address that was given answers.
    """

    def __init__(self, message: str, *, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class ClientError(BrokerError):
    """A failure that the Pulsar client reported.

    Attributes:
        name: the client's name of the failure, e.g. ``TopicTerminated``.
        transient: True if the broker, not the topic, has a problem.
    """

    def __init__(self, message: str, *, name: str, transient: bool) -> None:
        super().__init__(message)
        self.name = name
        self.transient = transient


class CancellationFailedError(ClientError):
    """A cancellation that the broker did not confirm.

    It may be stored all the same, and take effect. To cancel again does no harm.
    Producers raise a subclass that is also the client's exception for the failure.

    Attributes:
        receipt: the text of the new message's receipt, which is stored; empty unless the message
            was rescheduled.
    """

    def __init__(self, message: str, *, name: str, transient: bool, receipt: str = "") -> None:
        super().__init__(message, name=name, transient=transient)
        self.receipt = receipt


class UnconfirmedMessagesError(BrokerError):
    """Messages sent without a callback that the broker did not confirm.

    Producers raise a subclass that is also a ``pulsar.PulsarException``.

    Attributes:
        count: number of these messages since the last report.
        reasons: number of messages by the client's name of the failure, e.g.
            ``ProducerQueueIsFull``; the first one that occurred comes first.
    """

    def __init__(self, message: str, *, reasons: dict[str, int]) -> None:
        super().__init__(message)
        self.count = sum(reasons.values())
        self.reasons = reasons


class BatchTooLargeError(BrokerError):
    """A batch that exceeds the broker's maximum message size, although no message of it may."""


class AdminError(BrokerError):
    """A call that the admin REST interface refused.

    Attributes:
        status: HTTP status code, e.g. 404.
        reason: the broker's explanation.
    """

    def __init__(self, message: str, *, status: int, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class NotFoundError(AdminError):
    """A tenant, namespace, topic or subscription that does not exist (404)."""


class ConflictError(AdminError):
    """A resource that already exists or is in use (409, 412)."""


class PermissionDeniedError(AdminError):
    """An operation that the token or certificate does not allow (401, 403)."""


class LevelTopicError(BrokerError):
    """A level topic that is missing, not one of ours, or unsuitable for the request."""


class UpgradeRequiredError(LevelTopicError):
    """A level topic that only a later version of this package understands."""


class StillPendingError(LevelTopicError):
    """A deletion refused because another number of entries is there; nothing was deleted.

    Attributes:
        entries: number of pending entries, or of the chosen dead letters.
    """

    def __init__(self, message: str, entries: int) -> None:
        super().__init__(message)
        self.entries = entries


class StrategyMismatchError(LevelTopicError):
    """A strategy that disagrees with the description of the level topic; the text has both."""


class UnsafeNamespaceError(LevelTopicError):
    """Rules of a broker or namespace that would remove parked messages, or stop their release.

    Attributes:
        problems: one line for each, with its remedy.
    """

    def __init__(self, message: str, *, problems: tuple[str, ...]) -> None:
        super().__init__(message)
        self.problems = problems


class TargetNotAllowedError(LevelTopicError, InvalidInputError):
    """A business topic that the level topic's description does not list."""


class DataLossError(BrokerError):
    """Messages lost before a query moved them; the text says which and how many."""


class AlreadyRunningError(BrokerError):
    """Another running instance that holds the resource; the text says which and since when.

    Attributes:
        owner: name of the instance; empty if it is not known.
    """

    def __init__(self, message: str, *, owner: str = "") -> None:
        super().__init__(message)
        self.owner = owner


class PrerequisiteError(DelayLevelError):
    """A missing program, such as Java or Maven; the text says what to install."""
