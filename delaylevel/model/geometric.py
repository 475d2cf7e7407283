"""Lists of levels whose units grow geometrically: few partitions for long delays.

The number of partitions of a level is the ratio of its longest delay to its unit. With named units
it is 364 for a year by DAY, and 23 and 59 for the levels below. If all ratios are similar, their
sum is least: with n levels, it is about n times the n-th root of the longest delay in finest units.
Each level more costs one more hop for each message.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from .clock import duration_ms
from .formatting import exact_duration
from .strategy import Levels, PartitionBy, PartitionStrategy, partition_count

#: Units that people can read: parts and multiples of the named ones.
_SECONDS = (1, 2, 5, 10, 15, 20, 30)
_HOURS = (1, 2, 3, 4, 6, 8, 12)
_DAYS = (1, 2, 3, 4, 5, 6, 7, 10, 14, 15, 20, 30, 45, 60, 73, 90, 120, 180, 365)
READABLE = (
    *(timedelta(seconds=count) for count in _SECONDS),
    *(timedelta(minutes=count) for count in _SECONDS),
    *(timedelta(hours=count) for count in _HOURS),
    *(timedelta(days=count) for count in _DAYS),
)
_MOST_LEVELS = 6
# A list is worth a mention if it needs at most this part of the partitions of the one before.
_WORTH_A_HOP = 0.8


def default_lead(unit: timedelta) -> timedelta:
    """Return the lead of the longest named unit that is not longer; a quarter of a shorter unit.

    A level without a lead of its own has a quarter of any unit that is not named. For a long one,
    this is more than an outage takes, and sends messages into the next level's last partition.
    """
    fitting = [by for by in PartitionBy if by.unit <= unit]
    return max(fitting, key=lambda by: by.unit).default_lead if fitting else unit / 4


def geometric_levels(maximum: timedelta, finest: timedelta, count: int) -> Levels | None:
    """Return the list of levels with readable units that has the fewest partitions.

    Args:
        maximum: the longest delay.
        finest: unit of the finest level.
        count: number of levels.

    Returns:
        The list; None if there are not enough units between the finest and the longest delay.
    """
    units = [finest, *(unit for unit in READABLE if finest < unit < maximum), maximum]
    # best[number][index]: partitions of that number of levels below units[index], and their units.
    best: list[tuple[int, tuple[timedelta, ...]] | None] = [None] * len(units)
    best[0] = (0, ())
    for _ in range(count):
        best = [_cheapest(units, best, index) for index in range(len(units))]
    if best[-1] is None:
        return None
    chosen = best[-1][1]
    return Levels(
        PartitionStrategy(
            partition_by=unit,
            maximum_delay=top,
            lead=default_lead(unit),
            partition_limit=max(1, partition_count(top, unit)),
        )
        for unit, top in zip(chosen, (maximum, *chosen), strict=False)
    )


def _cheapest(
    units: list[timedelta], best: list[tuple[int, tuple[timedelta, ...]] | None], index: int
) -> tuple[int, tuple[timedelta, ...]] | None:
    """Return the fewest partitions if one more level covers delays up to ``units[index]``."""
    found = [
        (below[0] + partition_count(units[index], units[lower]), (units[lower], *below[1]))
        for lower, below in enumerate(best[:index])
        if below is not None
    ]
    return min(found, default=None, key=lambda item: (item[0], item[1]))


def geometric_lists(
    maximum: timedelta, finest: timedelta, limit: int, fewest: int | None = None
) -> Iterator[Levels]:
    """Yield lists of two and more levels, each with clearly fewer partitions than the ones before.

    Args:
        limit: largest number of partitions of a level.
        fewest: number of partitions to start from; by default that of the finest level alone.
    """
    if fewest is None:
        fewest = partition_count(maximum, finest) if finest < maximum else 0
    for count in range(2, _MOST_LEVELS + 1):
        levels = geometric_levels(maximum, finest, count)
        if levels is None:
            return
        if levels.partitions > _WORTH_A_HOP * fewest:
            continue
        if all(level.partitions <= limit for level in levels):
            fewest = levels.partitions
            yield levels


def create_options(levels: Levels) -> str:
    """Return the options of ``delaylevel levels create`` for a list of levels."""

    def text(value: timedelta) -> str:
        return exact_duration(duration_ms(value))

    first, *finer = levels.strategies
    words = [
        f"--unit {first.unit_name.lower()} --max-delay {text(first.maximum_delay)} "
        f"--lead {text(first.effective_lead)}"
    ]
    for item in finer:
        parts = (item.unit_name.lower(), text(item.maximum_delay), text(item.effective_lead))
        words.append(f"--then {':'.join(parts)}")
    return " ".join(words)
