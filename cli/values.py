"""Values that people write on the command line: durations, units, times and pairs."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import click

from delaylevel.model.clock import duration_ms, instant_ms
from delaylevel.model.formatting import parse_duration, parse_iso
from delaylevel.model.strategy import PartitionBy

# Smaller numbers (before March 1973) are more likely seconds that were given by mistake.
_SMALLEST_EPOCH_MS = 100_000_000_000


def parse_unit(text: str) -> PartitionBy | timedelta:
    """Parse a unit: a name (``day``) or a duration (``2s``).

    Raises:
        ValueError: the text is neither.
    """
    named = PartitionBy.__members__.get(text.strip().upper())
    if named is not None:
        return named
    try:
        return parse_duration(text)
    except ValueError:
        names = ", ".join(name.lower() for name in PartitionBy.__members__)
        raise ValueError(f"{text!r} is no unit: write {names}, or a duration such as 2s") from None


def parse_time_ms(text: str, now_ms: int) -> int:
    """Parse a time: ISO-8601 with a zone, epoch milliseconds, or relative to now such as ``+2h``.

    Raises:
        ValueError: the text is not a time, or has no time zone.
    """
    stripped = text.strip()
    if stripped == "now":
        return now_ms
    if stripped[:1] in ("+", "-"):
        offset_ms = duration_ms(parse_duration(stripped[1:]))
        return now_ms + (offset_ms if stripped[0] == "+" else -offset_ms)
    if stripped.isdecimal():
        if int(stripped) < _SMALLEST_EPOCH_MS:
            raise ValueError(
                f"{text!r} is too small for milliseconds since 1970: are these seconds?"
            )
        return int(stripped)
    try:
        moment = parse_iso(stripped)
    except ValueError:
        raise ValueError(
            f"{text!r} is no time: write 2030-01-31T12:00:00Z, epoch milliseconds, or +2h"
        ) from None
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone: add Z or an offset such as +02:00")
    return instant_ms(moment)


def parse_pairs(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    """Parse KEY=VALUE texts into a dict; the callback of a repeatable option."""
    pairs = {}
    for text in values:
        name, separator, value = text.partition("=")
        if not separator or not name.strip():
            raise click.BadParameter(f"{text!r} is not KEY=VALUE", ctx, param)
        pairs[name] = value
    return pairs


class Parsed(click.ParamType):  # type: ignore[type-arg] # generic from click 8.5 on
    """A value that a function parses.

    Args:
        name: the placeholder of the value in the help.
        parse: the function; it raises ValueError for a text that it refuses.
    """

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a text. Other values are defaults, which need no parsing."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class OneOf(click.Choice):  # type: ignore[type-arg] # generic from click 8.2 on
    """A member of an enumeration of strings, written as its value."""

    def __init__(self, members: type[enum.Enum]) -> None:
        super().__init__([member.value for member in members])
        self._members = members

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the member with a value."""
        return self._members(super().convert(value, param, ctx))


DURATION = Parsed("duration", parse_duration)
DURATION_MS = Parsed("duration", lambda text: duration_ms(parse_duration(text)))
UNIT = Parsed("unit", parse_unit)
TIME = Parsed("time", lambda text: parse_time_ms(text, time.time_ns() // 1_000_000))
