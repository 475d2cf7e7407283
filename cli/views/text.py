"""Text for people: bars, charts, and short forms of counts, rates and names."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from delaylevel.cli.terminal import cells, cut, padded
from delaylevel.model.topic_name import TopicName

__all__ = ["DAY_MS", "LONGEST_BAR", "SHORTEST_BAR", "bar", "bucket_label", "chart", "count", "cut"]
__all__ += ["local", "rate", "short"]

DAY_MS = 86_400_000
SHORTEST_BAR = 6
LONGEST_BAR = 30
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def bar(share: float, width: int) -> str:
    """Return a bar for a share of a width, drawn in eighths of a character.

    Any share above 0 is visible.
    """
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def chart(labels: Sequence[str], counts: Sequence[str], shares: Sequence[float], width: int) -> str:
    """Return horizontal bars with a label and a count in front of each; row 0 is the header."""
    left, right = max(map(cells, labels)), max(map(len, counts))
    room = max(SHORTEST_BAR, min(LONGEST_BAR * 2, width - left - right - 6))
    return "\n".join(
        f"{padded(label, left)}   {figure.rjust(right)}   {bar(share, room)}".rstrip()
        for label, figure, share in zip(labels, counts, shares, strict=True)
    )


def count(messages: float, exact: bool) -> str:
    """Return a number of messages; an estimate has ``~`` and three significant digits."""
    if exact or messages == 0:
        return f"{messages:,.0f}"
    digits = len(str(round(messages)))
    return f"~{round(messages, min(0, 3 - digits)):,.0f}"


def short(messages: float, exact: bool) -> str:
    """Return a number of messages; from 10,000 on three digits and ``k``, ``M``, ``G``, ``T``."""
    if messages < 9_999.5:
        return count(messages, exact)
    for factor, unit in ((1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")):
        value = messages / factor
        if value < 999.5 or unit == "T":
            break
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{'' if exact else '~'}{value:.{digits}f}{unit}"


def rate(per_second: float | None) -> str:
    """Return a rate in the smallest unit in which it is at least 1: s, min, h or d."""
    if per_second is None:
        return "-"
    for factor, unit in ((1, "s"), (60, "min"), (3600, "h"), (86_400, "d")):
        if per_second * factor >= 1 or unit == "d":
            return f"{per_second * factor:,.1f}/{unit}" if per_second else "0"
    raise AssertionError("unreachable: the last unit always returns")


def local(topic: str) -> str:
    """Return a topic's name without its namespace."""
    return TopicName.parse(topic).local


def bucket_label(from_ms: int, length_ms: int) -> str:
    """Return the start of a period, no more precise than the period is long."""
    moment = datetime.fromtimestamp(from_ms / 1000, timezone.utc)
    if length_ms >= DAY_MS:
        return moment.strftime("%a %Y-%m-%d")
    return moment.strftime("%a %d %H:%M:%S" if length_ms < 60_000 else "%a %d %H:%M")
