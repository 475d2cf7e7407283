"""The division of delays into levels and partitions: PartitionBy, PartitionStrategy, Levels."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from delaylevel.errors import InvalidStrategyError

from .clock import duration_ms
from .formatting import exact_duration

Overflow = Literal["reject", "recirculate"]
_PARTITION_LIMIT = 1000
SMALLEST_UNIT = timedelta(milliseconds=100)
LONGEST_DELAY = timedelta(days=36500)
#: The remedy for too many partitions.
COARSER_FIRST = "put a coarser level in front (`delaylevel plan` shows levels that fit)"


class PartitionBy(enum.Enum):
    """The named units of partitions. A month is 30 days and a year 365: these are durations."""

    YEAR = "YEAR"
    MONTH = "MONTH"
    DAY = "DAY"
    HOUR = "HOUR"
    MINUTE = "MINUTE"

    @property
    def unit(self) -> timedelta:
        """The length of one unit."""
        return _UNITS[self][0]


# Unit and default lead. The lead covers an outage, and an outage is not longer for longer units: a
# long lead would only fill the last partition of the next level.
_UNITS = {
    PartitionBy.YEAR: (timedelta(days=365), timedelta(hours=1)),
    PartitionBy.MONTH: (timedelta(days=30), timedelta(hours=1)),
    PartitionBy.DAY: (timedelta(days=1), timedelta(minutes=10)),
    PartitionBy.HOUR: (timedelta(hours=1), timedelta(minutes=5)),
    PartitionBy.MINUTE: (timedelta(minutes=1), timedelta(seconds=15)),
}
_NAMED = {by.unit: by for by in PartitionBy}


def partition_count(maximum_delay: timedelta, unit: timedelta) -> int:
    """Return the number of partitions that a level needs, ceil(maximum/unit) - 1."""
    # Partition k holds delays in [(k+1) units, (k+2) units). Delays below one unit are not parked.
    return -(-maximum_delay // unit) - 1


class PartitionStrategy(BaseModel):
    """The partitioning of one level of delays.

    Attributes:
        partition_by: the unit, a :class:`PartitionBy` or any timedelta of at least 100 ms.
        maximum_delay: the longest delay; a delay of exactly this length is accepted.
        lead: the minimum time between hand-off and due time of a message. It must cover one
            trigger of the mover, the catch-up after an outage, and the skew of the producers'
            clocks. Defaults: YEAR and MONTH 1 h, DAY 10 min, HOUR 5 min, MINUTE 15 s, any other
            unit a quarter of the unit.
        overflow: treatment of longer delays: ``"reject"`` raises
            :class:`~delaylevel.errors.DelayTooLongError`, ``"recirculate"`` parks them in the last
            partition and then routes them again. Only the value of the longest level applies.
        partition_limit: largest number of partitions; not part of the level's identity.

    Raises:
        InvalidStrategyError: the values do not fit together; the text suggests a remedy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=False)

    partition_by: PartitionBy | timedelta = PartitionBy.DAY
    maximum_delay: timedelta = timedelta(days=30)
    lead: timedelta | None = None
    overflow: Overflow = "reject"
    partition_limit: int = Field(default=_PARTITION_LIMIT, ge=1, repr=False)

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
        durations = {"partition_by": unit, "maximum_delay": maximum, "lead": self.lead}
        for name, value in durations.items():
            # The description is stored in milliseconds; rounding could change the partition count.
            if value is not None and value.microseconds % 1000:
                raise ValueError(
                    f"{name}={value!r} is not a whole number of milliseconds: round it"
                )
        if unit < SMALLEST_UNIT:
            raise ValueError(
                f"a unit of {_text(unit)} is too short for a topic; "
                f"the shortest is {_text(SMALLEST_UNIT)}"
            )
        if maximum <= unit:
            raise ValueError(
                f"a maximum_delay of {_text(maximum)} leaves a level by {self.unit_name} without "
                f"partitions: it must exceed one unit ({_text(unit)}); take a finer partition_by"
            )
        if maximum > LONGEST_DELAY:
            raise ValueError(
                f"a maximum_delay of {_text(maximum)} is beyond {_text(LONGEST_DELAY)}; "
                "for unlimited delays use overflow='recirculate'"
            )
        lead = self.effective_lead
        if not timedelta(0) < lead < unit:
            raise ValueError(
                f"a lead of {_text(lead)} does not fit a unit of {_text(unit)}: "
                "it must be more than 0 and less than one unit"
            )
        if self.partitions > self.partition_limit:
            raise ValueError(
                f"{_text(maximum)} by {self.unit_name} needs {self.partitions:,} partitions, more "
                f"than the limit of {self.partition_limit:,}: {COARSER_FIRST}"
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
        return _unit_name(self.unit)

    @property
    def default_lead(self) -> timedelta:
        """The lead of the unit by default."""
        by = self.partition_by
        return _UNITS[by][1] if isinstance(by, PartitionBy) else by / 4

    @property
    def effective_lead(self) -> timedelta:
        """The configured lead, or the default of the unit."""
        return self.default_lead if self.lead is None else self.lead

    @property
    def partitions(self) -> int:
        """The number of partitions of the level's topic."""
        return partition_count(self.maximum_delay, self.unit)

    def __str__(self) -> str:
        lead = _text(self.effective_lead)
        return f"{self.unit_name} for {_text(self.maximum_delay)} (lead {lead})"


@dataclass(frozen=True)
class Level:
    """One level of a list, in milliseconds."""

    index: int  # in the list, 0 for the coarsest
    unit_ms: int
    maximum_ms: int
    lead_ms: int
    partitions: int
    suffix: str  # of its topic's name after that of the level topic; empty for the coarsest
    name: str

    @property
    def near_due_ms(self) -> int:
        """The longest remaining delay with which a message leaves the level."""
        # With a tolerance for the broker's tick and clocks.
        return self.unit_ms + self.lead_ms + min(2000, self.unit_ms // 10)

    def hand_off_after_ms(self, partition: int) -> int:
        """Return the time from publishing to hand-off for a message in this partition."""
        return (partition + 1) * self.unit_ms - self.lead_ms


class Levels:
    """A list of levels, coarse to fine: a timing wheel made of topics.

    Hand-off from one level means routing into the next: DAY for 30 days and HOUR for 24 hours take
    52 partitions, while HOUR alone takes 719.

    Args:
        strategies: one strategy, or several with decreasing units. The maximum of each finer level
            is at least the unit of the previous one.

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
                    f"levels must go from coarse to fine: {fine.unit_name} cannot follow "
                    f"{coarse.unit_name}"
                )
            # It comes up to one unit and a lead early. What the lead adds takes the last partition.
            if fine.maximum_delay < coarse.unit:
                raise InvalidStrategyError(
                    f"the level by {fine.unit_name} accepts only {_text(fine.maximum_delay)}, but "
                    f"the one by {coarse.unit_name} hands off up to {_text(coarse.unit)} before "
                    f"the due time: give it a maximum_delay of {_text(coarse.unit)}"
                )
        self.strategies: tuple[PartitionStrategy, ...] = chosen
        self._levels = tuple(
            Level(
                index=index,
                unit_ms=duration_ms(item.unit),
                maximum_ms=duration_ms(item.maximum_delay),
                lead_ms=duration_ms(item.effective_lead),
                partitions=item.partitions,
                suffix="" if index == 0 else "-" + item.unit_name.lower(),
                name=item.unit_name,
            )
            for index, item in enumerate(chosen)
        )

    @property
    def overflow(self) -> Overflow:
        """The treatment of delays beyond the longest level."""
        return self.strategies[0].overflow

    @property
    def maximum_ms(self) -> int:
        """The longest delay that is accepted without recirculating, in milliseconds."""
        return self._levels[0].maximum_ms

    @property
    def partitions(self) -> int:
        """The number of partitions of all levels together."""
        return sum(level.partitions for level in self._levels)

    @property
    def options(self) -> str:
        """The options of ``delaylevel levels create`` for this list."""
        text = ""
        for item in self.strategies:
            unit, longest = item.unit_name.lower(), _text(item.maximum_delay)
            own = item.effective_lead != item.default_lead
            text += f" --then {unit}:{longest}" if text else f"--unit {unit} --max-delay {longest}"
            if own:
                text += f"{':' if '--then' in text else ' --lead '}{_text(item.effective_lead)}"
        return text + f" --overflow {self.overflow}" * (self.overflow != "reject")

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
        """Return the list as plain values (durations in ms), as stored in a level topic."""
        return {
            "overflow": self.overflow,
            "levels": [
                {name: getattr(level, name) for name in ("unit_ms", "maximum_ms", "lead_ms")}
                for level in self._levels
            ],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Levels:
        """Return the list from the values of :meth:`to_json`."""
        try:
            overflow = value["overflow"]
            return cls(
                PartitionStrategy(
                    partition_by=timedelta(milliseconds=item["unit_ms"]),
                    maximum_delay=timedelta(milliseconds=item["maximum_ms"]),
                    lead=timedelta(milliseconds=item["lead_ms"]),
                    overflow=overflow,
                    # An existing topic was within its limit when it was created.
                    partition_limit=1 << 30,
                )
                for item in value["levels"]
            )
        except (KeyError, TypeError, OverflowError) as error:
            raise InvalidStrategyError(f"a stored list of levels is damaged: {error!r}") from error


def as_levels(strategy: Levels | PartitionStrategy | Sequence[PartitionStrategy]) -> Levels:
    """Return the list of levels for a ``partition_strategy=`` argument."""
    return strategy if isinstance(strategy, Levels) else Levels(strategy)


def _unit_name(unit: timedelta) -> str:
    return _NAMED[unit].value if unit in _NAMED else _text(unit)


def _text(value: timedelta) -> str:
    return exact_duration(duration_ms(value))


def _as_strategy_error(error: ValidationError) -> InvalidStrategyError:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"] if isinstance(part, str))
        text = str(item["msg"]).removeprefix("Value error, ")
        lines.append(f"{where}: {text} (got {item['input']!r})" if where else text)
    return InvalidStrategyError("; ".join(dict.fromkeys(lines)))
