"""Every error of the package, under one root.

Errors that say "your input is wrong" derive from :class:`InvalidInputError` (and from
``ValueError``); errors that say "the broker, or what is stored on it, is not as it should be"
derive from :class:`BrokerError`. Each carries the data it speaks of as attributes too.
"""

from __future__ import annotations


class DelayLevelError(Exception):
    """The root of all errors that this package raises on purpose."""


class InvalidInputError(DelayLevelError, ValueError):
    """What the caller gave cannot be used; nothing was sent, stored or changed."""


class BrokerError(DelayLevelError):
    """The broker, or something stored on it, did not behave as needed."""


class InvalidDelayError(InvalidInputError):
    """A due time or delay that is negative, absurd, naive, or given twice."""


class DelayTooLongError(InvalidInputError):
    """A delay beyond the longest level, where ``overflow`` is ``"reject"``.

    Attributes:
        delay_ms: the delay that was asked for.
        maximum_delay_ms: the longest that the strategy accepts.
    """

    def __init__(self, message: str, *, delay_ms: int, maximum_delay_ms: int) -> None:
        super().__init__(message)
        self.delay_ms = delay_ms
        self.maximum_delay_ms = maximum_delay_ms


class InvalidStrategyError(InvalidInputError):
    """A partition strategy, or a list of levels, that cannot work."""


class UnsupportedOptionError(InvalidInputError):
    """A producer or send option that would not survive the way through a level topic."""


class EnvelopeError(InvalidInputError):
    """A parked message whose ``delaylevel.*`` properties cannot be understood.

    Attributes:
        reason: one line, as it is written on the dead letter.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class MissingExtraError(DelayLevelError, ImportError):
    """A name that needs an optional dependency which is not installed."""


class ConfigError(InvalidInputError):
    """A configuration file, environment variable or flag that cannot be used."""


class StepsError(InvalidInputError):
    """A user's own steps that lose, change or multiply what the Spark job has to send on."""


class BrokerUnreachableError(BrokerError):
    """Nothing answers at the service or admin address."""


class ClientError(BrokerError):
    """A failure that the Pulsar client reported.

    Attributes:
        name: the client's name of the failure, e.g. ``TopicTerminated``.
        transient: true where the broker, and not the topic, is in trouble.
    """

    def __init__(self, message: str, *, name: str, transient: bool) -> None:
        super().__init__(message)
        self.name = name
        self.transient = transient


class AdminError(BrokerError):
    """The admin REST interface refused a call.

    Attributes:
        status: the HTTP status, e.g. 404.
        reason: what the broker said.
    """

    def __init__(self, message: str, *, status: int, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class NotFoundError(AdminError):
    """The tenant, namespace, topic or subscription does not exist (404)."""


class ConflictError(AdminError):
    """It exists already, or is in use (409, 412)."""


class PermissionDeniedError(AdminError):
    """The token or certificate does not allow this (401, 403)."""


class LevelTopicError(BrokerError):
    """A level topic that is missing, is not ours, or does not fit what was asked of it."""


class StillPendingError(LevelTopicError):
    """Something is pending in what was to be deleted; nothing was.

    Attributes:
        entries: how many entries are pending.
    """

    def __init__(self, message: str, entries: int) -> None:
        super().__init__(message)
        self.entries = entries


class StrategyMismatchError(LevelTopicError):
    """A producer's strategy disagrees with what the level topic says of itself.

    Attributes:
        configured: the producer's own strategy, in words.
        described: the level topic's, in words.
    """

    def __init__(self, message: str, *, configured: str, described: str) -> None:
        super().__init__(message)
        self.configured = configured
        self.described = described


class UnsafeNamespaceError(LevelTopicError):
    """Policies of the namespace would eat what is parked.

    Attributes:
        problems: one line for each policy, with its remedy.
    """

    def __init__(self, message: str, *, problems: tuple[str, ...]) -> None:
        super().__init__(message)
        self.problems = problems


class TargetNotAllowedError(LevelTopicError, InvalidInputError):
    """A business topic that the level topic's description does not list."""


class DataLossError(BrokerError):
    """Messages are gone that a query had still to move; the text says which and how many."""


class AlreadyRunningError(BrokerError):
    """Another mover holds the level; the text says which and since when."""


class PrerequisiteError(DelayLevelError):
    """Java, Maven or another program is missing; the text says what to install."""
