"""Decisions about a message: handle it or not, and what becomes of it after a failed attempt."""

from __future__ import annotations

import enum
import random as random_numbers
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from delaylevel.errors import InvalidInputError
from delaylevel.model.formatting import parse_delay


class Verdict(enum.Enum):
    """The next step for a received message."""

    HANDLE = enum.auto()
    FILTERED = enum.auto()
    DUPLICATE = enum.auto()
    WAIT = enum.auto()


#: Classes of exceptions.
Errors = tuple[type[BaseException], ...]


@dataclass(frozen=True, init=False)
class Backoff:
    """The delays after failed attempts; after the last one the message is a dead letter.

    Args:
        delays: time from each failed attempt to the next one, timedeltas or texts such as
            ``"10s"``, ``"5m"``, ``"1h30m"`` or ``"1d"``. With none, the first failure is final.
        jitter: random part of a delay, from 0 to 1: 0.1 makes it up to 10 % shorter or longer.
        retry_on: classes of exceptions after which the message is handled again; all by default.
        give_up_on: classes of exceptions after which it is not, whatever ``retry_on`` says.

    Raises:
        InvalidInputError: a delay, the jitter or a class of exceptions is invalid.
    """

    delays: tuple[timedelta, ...]
    jitter: float
    retry_on: Errors
    give_up_on: Errors

    def __init__(
        self,
        *delays: timedelta | str,
        jitter: float = 0.0,
        retry_on: type[BaseException] | Errors = (BaseException,),
        give_up_on: type[BaseException] | Errors = (),
    ) -> None:
        if isinstance(jitter, bool) or not isinstance(jitter, (int, float)) or not 0 <= jitter <= 1:
            raise InvalidInputError(f"jitter is a number from 0 to 1, not {jitter!r}")
        parsed = tuple(parse_delay(delay, "a delay of Backoff") for delay in delays)
        object.__setattr__(self, "delays", parsed)
        object.__setattr__(self, "jitter", float(jitter))
        object.__setattr__(self, "retry_on", _classes(retry_on, "retry_on"))
        object.__setattr__(self, "give_up_on", _classes(give_up_on, "give_up_on"))

    @property
    def attempts(self) -> int:
        """The number of attempts, the first one included."""
        return len(self.delays) + 1

    @property
    def longest(self) -> timedelta | None:
        """The longest time between two attempts; None if there is only one attempt."""
        return max(self.delays) * (1 + self.jitter) if self.delays else None

    def delay(
        self, attempt: int, random: Callable[[], float] = random_numbers.random
    ) -> timedelta | None:
        """Return the time from a failed attempt to the next one; None after the last attempt.

        Args:
            attempt: number of the failed attempt, from 1.
            random: source of numbers from 0 to 1.
        """
        if not 1 <= attempt <= len(self.delays):
            return None
        delay = self.delays[attempt - 1]
        return delay * (1 + self.jitter * (2 * random() - 1)) if self.jitter else delay

    def retries(self, error: BaseException) -> bool:
        """Return True if a message is handled again after this error."""
        return isinstance(error, self.retry_on) and not isinstance(error, self.give_up_on)


def _classes(given: type[BaseException] | Errors, name: str) -> Errors:
    found = tuple(given) if isinstance(given, (tuple, list, set, frozenset)) else (given,)
    for each in found:
        if not (isinstance(each, type) and issubclass(each, BaseException)):
            raise InvalidInputError(
                f"{name} has classes of exceptions, such as ValueError, not {each!r}"
            )
    return found


#: The delays of listeners that configure none.
DEFAULT_BACKOFF = Backoff("10s", "1m", "10m", "1h")


class Retry(Exception):  # noqa: N818 (a wish, not an error)
    """A wish of the handler: handle the message again later. It counts as a failed attempt.

    Args:
        after: time until the next attempt, a timedelta or text such as ``"15m"``; the next delay of
            the listener's ``retry`` by default.
        reason: one line for the log and the dead letter.

    Raises:
        InvalidInputError: the time is no duration, or negative.
    """

    def __init__(self, after: timedelta | str | None = None, reason: str = "") -> None:
        super().__init__(reason or "the handler asked for another attempt")
        self.after = None if after is None else parse_delay(after, "after")
        self.reason = reason


class Reject(Exception):  # noqa: N818
    """A wish of the handler: move the message to the dead-letter topic, without another attempt.

    Args:
        reason: one line for the log and the dead letter.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "the handler rejected the message")
        self.reason = reason


# A reason is one line of a log. It and a traceback become properties of a stored message.
_LONGEST_REASON, _LONGEST_TRACE = 1_000, 8_000


class Decision(NamedTuple):
    """The decision about a message whose attempt failed."""

    delay: timedelta | None  # until the next attempt; None for a dead letter
    reason: str  # the error in one line
    error: BaseException


def reason_of(error: BaseException) -> str:
    """Return an exception in one line of at most 1,000 characters."""
    try:
        text = str(error)
    except Exception:  # an application's own class of exceptions
        text = "(its text cannot be read)"
    if not isinstance(error, (Retry, Reject)):
        kind = type(error).__name__
        text = f"{kind}: {text}" if text else kind
    return one_line(text)


def trace_of(error: BaseException) -> str:
    """Return the traceback of an exception, its last 8,000 characters."""
    try:
        lines = traceback.format_exception(error)
    except Exception:
        return reason_of(error)
    return clean("".join(lines))[-_LONGEST_TRACE:]


def one_line(text: str) -> str:
    """Return a text as the reason of a failed attempt."""
    return " ".join(clean(text).split())[:_LONGEST_REASON]


def clean(text: str) -> str:
    """Return a text that can be encoded as UTF-8: properties cannot be anything else."""
    return text.encode("utf-8", "backslashreplace").decode()


def decide(backoff: Backoff | None, attempt: int, error: BaseException) -> Decision:
    """Return the decision about a message whose attempt failed, by its number from 1."""
    delay = None
    if backoff is not None and not isinstance(error, Reject):
        if isinstance(error, Retry) or backoff.retries(error):
            delay = backoff.delay(attempt)
        if delay is not None and isinstance(error, Retry) and error.after is not None:
            delay = error.after
    return Decision(delay, reason_of(error), error)
