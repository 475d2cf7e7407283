"""Durations, instants and names as text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from datetime import datetime, timedelta

from delaylevel.errors import InvalidInputError

from .clock import instant

_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)(ms|s|m|h|d|w))")
_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_DECIMALS = re.compile(r"(?<=:\d\d)[.,](\d+)")


def format_duration(ms: int | float) -> str:
    """Write a duration for people, rounded: ``850ms``, ``12.3s``, ``4m05s`` or ``3d04h``."""
    sign, value = ("-", -ms) if ms < 0 else ("", ms)
    if value < 999.5:
        return f"{sign}{value:.0f}ms"
    if value < 59_950:
        return f"{sign}{value / 1000:.1f}s"
    minutes, seconds = divmod(round(value / 1000), 60)
    if minutes < 60:
        return f"{sign}{minutes}m{seconds:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{sign}{hours}h{minutes:02d}m"
    return f"{sign}{hours // 24}d{hours % 24:02d}h"


def exact_duration(ms: int) -> str:
    """Write a duration without rounding, as an option takes it: ``3d``, ``1h30m``, ``250ms``."""
    # Level topics are named after their units in this form, so it must not change. Messages that
    # compare configured durations use it too: rounded, two of them could look the same.
    if ms < 0:
        return "-" + exact_duration(-ms)
    if ms == 0:
        return "0s"
    parts: list[str] = []
    for name in ("d", "h", "m", "s", "ms"):
        count, ms = divmod(ms, _UNITS_MS[name])
        if count:
            parts.append(f"{count}{name}")
    return "".join(parts)


def format_instant(ms: int) -> str:
    """Write an instant as ISO-8601 in UTC with milliseconds, e.g. ``2026-03-01T09:00:00.000Z``."""
    try:
        moment = instant(ms)
    except OverflowError:  # beyond the year 9999
        return f"{ms} ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_iso(text: str) -> datetime:
    """Read a time in ISO-8601 with any number of decimals, and ``Z`` for UTC."""
    # Python 3.10 reads only three or six decimals, and brokers leave out zeros at the end.
    text = re.sub(r"[Zz]$", "+00:00", text.strip())
    return datetime.fromisoformat(_DECIMALS.sub(lambda found: f".{found[1]:0<6.6}", text))


def parse_duration(text: str) -> timedelta:
    """Parse a duration such as ``90s``, ``15m``, ``2h``, ``1h30m``, ``250ms`` or ``3d``."""
    compact = text.strip().lower()
    parts = _DURATION.findall(compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        raise ValueError(f"{text!r} is no duration: write 90s, 15m, 2h, 1h30m or 3d")
    try:
        return timedelta(milliseconds=sum(float(n) * _UNITS_MS[unit] for n, unit in parts))
    except OverflowError:
        raise ValueError(f"{text!r} is longer than any calendar: write less") from None


def parse_delay(value: timedelta | str, name: str) -> timedelta:
    """Return a delay given as timedelta or text; ``name`` names it in the error."""
    if isinstance(value, str):
        try:
            return parse_duration(value)
        except ValueError as error:
            raise InvalidInputError(f"{name}: {error}") from None
    if not isinstance(value, timedelta):
        raise InvalidInputError(
            f'{name} is a timedelta or a text such as "15m", not {type(value).__name__}: {value!r}'
        )
    if value < timedelta():
        raise InvalidInputError(f"{name} is negative ({value!r}): a delay is zero or more")
    return value


def listed(names: Sequence[str]) -> str:
    """Return the first five names with commas, and the number of the others."""
    more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def shell(word: object) -> str:
    """Return a word of a command as a shell takes it, such as the name of a topic."""
    return shlex.quote(str(word))
