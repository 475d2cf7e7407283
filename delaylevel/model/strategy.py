"""How long delays are cut into levels and partitions: PartitionBy, PartitionStrategy, Levels."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations, pairwise
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from delaylevel.errors import InvalidStrategyError

from .clock import duration_ms
from .formatting import exact_duration

Overflow = Literal["reject", "recirculate"]

DEFAULT_PARTITION_LIMIT = 1000
SMALLEST_UNIT = timedelta(milliseconds=100)
LONGEST_DELAY = timedelta(days=36500)


class PartitionBy(enum.Enum):
    """The units that a delay-level topic is usually partitioned by.

    A month is 30 days and a year 365: delays are durations, not calendar dates.
    """

    YEAR = "YEAR"
    MONTH = "MONTH"
    DAY = "DAY"
    HOUR = "HOUR"
    MINUTE = "MINUTE"

    @property
    def unit(self) -> timedelta:
        """The length of one unit."""
        return _UNITS[self]

    @property
    def default_lead(self) -> timedelta:
        """How long before its due time a message is handed off at the latest, unless configured."""
        return _LEADS[self]


_UNITS = {
    PartitionBy.YEAR: timedelta(days=365),
    PartitionBy.MONTH: timedelta(days=30),
    PartitionBy.DAY: timedelta(days=1),
    PartitionBy.HOUR: timedelta(hours=1),
    PartitionBy.MINUTE: timedelta(minutes=1),
}
# An outage to catch up after is as long for a year as for a day: a quarter of a year of lead
# would only fill the next level's last partition.
_LEADS = {
    PartitionBy.YEAR: timedelta(hours=1),
    PartitionBy.MONTH: timedelta(hours=1),
    PartitionBy.DAY: timedelta(minutes=10),
    PartitionBy.HOUR: timedelta(minutes=5),
    PartitionBy.MINUTE: timedelta(seconds=15),
}
_NAMED = {unit: name for name, unit in _UNITS.items()}


def partition_count(maximum_delay: timedelta, unit: timedelta) -> int:
    """Return ceil(maximum/unit) - 1: how many partitions a level needs.

    Partition k holds the delays in [(k+1) units, (k+2) units); what is under one unit is not
    parked at all. 365 days by DAY need 364.
    """
    return -(-maximum_delay // unit) - 1


class PartitionStrategy(BaseModel):
    """One delay level: how its topic is partitioned and how long a delay it takes.

    Attributes:
        partition_by: the unit, a :class:`PartitionBy` or any timedelta of at least 100 ms.
        maximum_delay: the longest delay; one of exactly this length is accepted.
        lead: how long before its due time a message is handed off at the latest. It has to cover
            one trigger of the mover, the catch-up after an outage and the skew of the producers'
            clocks. By default: YEAR and MONTH 1 h, DAY 10 min, HOUR 5 min, MINUTE 15 s, any other
            unit a quarter of it.
        overflow: what happens to a longer delay: ``"reject"`` raises
            :class:`~delaylevel.errors.DelayTooLongError`, ``"recirculate"`` parks it in the last
            partition, from where it goes round again. It counts on the longest level only.
        partition_limit: how many partitions the level may have; not part of the level's identity.

    Raises:
        InvalidStrategyError: the values cannot work together; the text says what would.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=False)

    partition_by: PartitionBy | timedelta = PartitionBy.DAY
    maximum_delay: timedelta = timedelta(days=30)
    lead: timedelta | None = None
    overflow: Overflow = "reject"
    partition_limit: int = Field(default=DEFAULT_PARTITION_LIMIT, ge=1, repr=False)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _as_strategy_error(error) from None

    @field_validator("partition_by", mode="before")
    @classmethod
    def _name_the_unit(cls, value: object) -> object:
        if isinstance(value, str) and value.upper() in PartitionBy.__members__:
            return PartitionBy[value.upper()]
        if isinstance(value, timedelta):
            return _NAMED.get(value, value)
        return value

    @model_validator(mode="after")
    def _check(self) -> PartitionStrategy:
        unit, maximum = self.unit, self.maximum_delay
        for name, value in (
            ("partition_by", unit),
            ("maximum_delay", maximum),
            ("lead", self.lead),
        ):
            # What a level topic stores of itself is in milliseconds: no other number of partitions
            # may come of it when it is read again.
            if value is not None and value.microseconds % 1000:
                raise ValueError(
                    f"{name}={value!r} is not a whole number of milliseconds: round it"
                )
        if unit < SMALLEST_UNIT:
            raise ValueError(
                f"a unit of {_say(unit)} is too short for a topic; "
                f"the shortest is {_say(SMALLEST_UNIT)}"
            )
        if maximum <= unit:
            raise ValueError(
                f"a maximum_delay of {_say(maximum)} leaves a level by {self.unit_name} without "
                f"partitions: it must exceed one unit ({_say(unit)}); take a finer partition_by"
            )
        if maximum > LONGEST_DELAY:
            raise ValueError(
                f"a maximum_delay of {_say(maximum)} is beyond {_say(LONGEST_DELAY)}; "
                "for delays without an end use overflow='recirculate'"
            )
        lead = self.effective_lead
        if not timedelta(0) < lead < unit:
            raise ValueError(
                f"a lead of {_say(lead)} does not fit a unit of {_say(unit)}: "
                "it must be more than 0 and less than one unit"
            )
        if self.partitions > self.partition_limit:
            proposal = propose_levels(maximum, unit, self.partition_limit)
            says = f"; these levels fit: {proposal}" if proposal else ""
            raise ValueError(
                f"{_say(maximum)} by {self.unit_name} needs {self.partitions:,} partitions, "
                f"more than the limit of {self.partition_limit:,}{says}"
            )
        return self

    @property
    def unit(self) -> timedelta:
        """The length of one unit."""
        by = self.partition_by
        return by.unit if isinstance(by, PartitionBy) else by

    @property
    def unit_name(self) -> str:
        """``DAY``, ``HOUR`` …, or the length of the unit (``2s``)."""
        by = self.partition_by
        return by.value if isinstance(by, PartitionBy) else _say(by)

    @property
    def effective_lead(self) -> timedelta:
        """The lead that applies: the configured one, or the unit's default."""
        if self.lead is not None:
            return self.lead
        by = self.partition_by
        return by.default_lead if isinstance(by, PartitionBy) else by / 4

    @property
    def partitions(self) -> int:
        """How many partitions the level's topic has."""
        return partition_count(self.maximum_delay, self.unit)

    def __str__(self) -> str:
        return f"{self.unit_name} for {_say(self.maximum_delay)} (lead {_say(self.effective_lead)})"


@dataclass(frozen=True)
class Level:
    """One level of a list, in milliseconds: what the router computes with.

    Attributes:
        index: its place in the list, 0 for the coarsest.
        unit_ms, maximum_ms, lead_ms: as in :class:`PartitionStrategy`.
        tolerance_ms: slack for the broker's tick and clocks: 2 s, or a tenth of the unit.
        partitions: how many partitions its topic has.
        suffix: what its topic's name ends in behind the level topic's name; empty for the coarsest.
        name: its unit in words.
    """

    index: int
    unit_ms: int
    maximum_ms: int
    lead_ms: int
    tolerance_ms: int
    partitions: int
    suffix: str
    name: str

    @property
    def near_due_ms(self) -> int:
        """Up to this remaining delay a message goes on; above it, it is parked again."""
        return self.unit_ms + self.lead_ms + self.tolerance_ms

    def hand_off_after_ms(self, partition: int) -> int:
        """Return how long after its publish time a message of this partition is handed off."""
        return (partition + 1) * self.unit_ms - self.lead_ms


class Levels:
    """A list of levels, coarse to fine: a timing wheel made of topics.

    Handing off from one level is routing again into the next: DAY for 30 days and HOUR for 24
    hours take 52 partitions where HOUR alone takes 719.

    Args:
        strategies: one strategy or several; units get shorter, and each finer level's maximum is
            at least the unit of the one before it.

    Raises:
        InvalidStrategyError: the list is empty, out of order, or has a gap.
    """

    __slots__ = ("_levels", "strategies")

    def __init__(self, strategies: PartitionStrategy | Iterable[PartitionStrategy]) -> None:
        chosen = (strategies,) if isinstance(strategies, PartitionStrategy) else tuple(strategies)
        if not chosen:
            raise InvalidStrategyError("a list of levels needs at least one PartitionStrategy")
        for item in chosen:
            if not isinstance(item, PartitionStrategy):
                raise InvalidStrategyError(
                    f"a level is a PartitionStrategy, not {type(item).__name__}: {item!r}"
                )
        for coarse, fine in pairwise(chosen):
            if fine.unit >= coarse.unit:
                raise InvalidStrategyError(
                    f"levels go from coarse to fine: {fine.unit_name} cannot follow "
                    f"{coarse.unit_name}"
                )
            if fine.maximum_delay < coarse.unit:
                raise InvalidStrategyError(
                    f"the level by {fine.unit_name} takes {_say(fine.maximum_delay)} only, but "
                    f"the one by {coarse.unit_name} hands off up to {_say(coarse.unit)} before the "
                    f"due time: give it a maximum_delay of {_say(coarse.unit)}"
                )
        self.strategies: tuple[PartitionStrategy, ...] = chosen
        self._levels = tuple(_level(index, item) for index, item in enumerate(chosen))

    @property
    def overflow(self) -> Overflow:
        """What happens to a delay beyond the longest level."""
        return self.strategies[0].overflow

    @property
    def maximum_ms(self) -> int:
        """The longest delay that is accepted without recirculating, in milliseconds."""
        return self._levels[0].maximum_ms

    @property
    def partitions(self) -> int:
        """How many partitions all levels have together."""
        return sum(level.partitions for level in self._levels)

    @property
    def smallest_lead_ms(self) -> int:
        """The shortest lead of the list, in milliseconds."""
        return min(level.lead_ms for level in self._levels)

    def __len__(self) -> int:
        return len(self._levels)

    def __getitem__(self, index: int) -> Level:
        return self._levels[index]

    def __iter__(self) -> Iterator[Level]:
        return iter(self._levels)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Levels) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self._levels, self.overflow))

    def __str__(self) -> str:
        return ", then ".join(str(item) for item in self.strategies) + f"; {self.overflow}"

    def __repr__(self) -> str:
        return f"Levels({self})"

    def to_json(self) -> dict[str, Any]:
        """Return the list as plain values (durations in ms), the form a level topic stores."""
        return {
            "overflow": self.overflow,
            "levels": [
                {
                    "unit_ms": level.unit_ms,
                    "maximum_ms": level.maximum_ms,
                    "lead_ms": level.lead_ms,
                }
                for level in self._levels
            ],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Levels:
        """Read what :meth:`to_json` wrote.

        Raises:
            InvalidStrategyError: a part is missing or does not fit.
        """
        try:
            overflow = value["overflow"]
            return cls(
                PartitionStrategy(
                    partition_by=timedelta(milliseconds=item["unit_ms"]),
                    maximum_delay=timedelta(milliseconds=item["maximum_ms"]),
                    lead=timedelta(milliseconds=item["lead_ms"]),
                    overflow=overflow,
                    # What exists on a broker was within its limit when it was made.
                    partition_limit=1 << 30,
                )
                for item in value["levels"]
            )
        except (KeyError, TypeError, OverflowError) as error:
            raise InvalidStrategyError(f"a stored list of levels is damaged: {error!r}") from error


def propose_levels(maximum: timedelta, unit: timedelta, limit: int) -> str:
    """Return, in words, levels down to ``unit`` with at most ``limit`` partitions each.

    The fewest levels are taken, and among those the fewest partitions. An empty string says that
    no list of named units fits.
    """
    coarser = [(by.value, by.unit) for by in PartitionBy if unit < by.unit < maximum]
    finest = (_say(unit), unit) if unit not in _NAMED else (_NAMED[unit].value, unit)
    for count in range(len(coarser) + 1):
        fitting: list[tuple[int, str]] = []
        for chosen in combinations(coarser, count):
            tops = [maximum, *(length for _, length in chosen)]
            levels = list(zip([*chosen, finest], tops, strict=True))
            needs = [partition_count(top, length) for (_, length), top in levels]
            if max(needs) <= limit:
                says = ", then ".join(f"{name} for {_say(top)}" for (name, _), top in levels)
                fitting.append((sum(needs), says))
        if fitting:
            return min(fitting)[1]
    return ""


def as_levels(strategy: Levels | PartitionStrategy | Sequence[PartitionStrategy]) -> Levels:
    """Take what users give for ``partition_strategy=`` and return the list of levels."""
    return strategy if isinstance(strategy, Levels) else Levels(strategy)


def _level(index: int, strategy: PartitionStrategy) -> Level:
    unit_ms = duration_ms(strategy.unit)
    return Level(
        index=index,
        unit_ms=unit_ms,
        maximum_ms=duration_ms(strategy.maximum_delay),
        lead_ms=duration_ms(strategy.effective_lead),
        tolerance_ms=min(2000, unit_ms // 10),
        partitions=strategy.partitions,
        suffix="" if index == 0 else "-" + strategy.unit_name.lower(),
        name=strategy.unit_name,
    )


def _say(value: timedelta) -> str:
    return exact_duration(duration_ms(value))


def _as_strategy_error(error: ValidationError) -> InvalidStrategyError:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"] if isinstance(part, str))
        text = str(item["msg"]).removeprefix("Value error, ")
        lines.append(f"{where}: {text} (got {item['input']!r})" if where else text)
    return InvalidStrategyError("; ".join(dict.fromkeys(lines)))
