"""The delays between the attempts to handle a message."""

from __future__ import annotations

import random as random_numbers
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from delaylevel.errors import InvalidInputError
from delaylevel.model.clock import duration_ms
from delaylevel.model.formatting import exact_duration, parse_delay

_MOST_ATTEMPTS = 10_000
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
        if len(parsed) >= _MOST_ATTEMPTS:
            raise InvalidInputError(
                f"Backoff has {len(parsed)} delays: a message has at most {_MOST_ATTEMPTS} attempts"
            )
        object.__setattr__(self, "delays", parsed)
        object.__setattr__(self, "jitter", float(jitter))
        object.__setattr__(self, "retry_on", _classes(retry_on, "retry_on"))
        object.__setattr__(self, "give_up_on", _classes(give_up_on, "give_up_on"))

    @classmethod
    def exponential(
        cls,
        first: timedelta | str,
        longest: timedelta | str,
        attempts: int,
        *,
        factor: float = 2,
        jitter: float = 0.1,
        retry_on: type[BaseException] | Errors = (BaseException,),
        give_up_on: type[BaseException] | Errors = (),
    ) -> Backoff:
        """Return delays that grow by a factor.

        Args:
            first: the first delay.
            longest: the longest delay.
            attempts: number of attempts, the first one included; one more than there are delays.
            factor: quotient of successive delays, at least 1.
            jitter, retry_on, give_up_on: as for :class:`Backoff`.

        Raises:
            InvalidInputError: a value is invalid.
        """
        shortest, limit = parse_delay(first, "first"), parse_delay(longest, "longest")
        if limit < shortest:
            raise InvalidInputError(
                f"the longest delay ({exact_duration(duration_ms(limit))}) is shorter than the "
                f"first ({exact_duration(duration_ms(shortest))}): swap them"
            )
        whole = isinstance(attempts, int) and not isinstance(attempts, bool)
        if not whole or not 1 <= attempts <= _MOST_ATTEMPTS:
            raise InvalidInputError(f"attempts is 1 to {_MOST_ATTEMPTS}, not {attempts!r}")
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor >= 1:
            raise InvalidInputError(f"factor is a number of at least 1, not {factor!r}")
        delays: list[timedelta] = []
        delay_ms, limit_ms = float(duration_ms(shortest)), duration_ms(limit)
        for _ in range(attempts - 1):
            delays.append(timedelta(milliseconds=round(min(delay_ms, limit_ms))))
            delay_ms = min(delay_ms * factor, limit_ms)
        return cls(*delays, jitter=jitter, retry_on=retry_on, give_up_on=give_up_on)

    @property
    def attempts(self) -> int:
        """The number of attempts, the first one included."""
        return len(self.delays) + 1

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
