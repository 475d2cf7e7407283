"""``delaylevel plan``: the partitions, storage and memory that a load needs."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from delaylevel.errors import InvalidInputError
from delaylevel.inspection.plot import check_plot, save_curves
from delaylevel.model import benchmarked as bench
from delaylevel.model import plan as planning
from delaylevel.model.benchmarked import FIGURES
from delaylevel.model.clock import duration_ms
from delaylevel.model.formatting import exact_duration
from delaylevel.model.level_topic import Mover
from delaylevel.model.plan import Load
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.simulation.traffic import Traffic
from delaylevel.simulation.year import BIN_MS, SimulatedDay, simulate

from . import options
from .command import examples
from .levels import parse_level
from .output import emit, emit_one, note
from .values import DURATION, Parsed
from .views.plan import (
    FACTS,
    LOAD,
    PARTS,
    PLANS,
    RECOVERIES,
    curves,
    facts_view,
    load_view,
    part_views,
    plan_view,
    recovery_views,
    simulated_view,
    unit_names,
)

_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([kmg]i?)?b?$", re.IGNORECASE)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def parse_size(text: str) -> int:
    """Parse a size such as ``1024``, ``1KiB`` or ``2MB``, in bytes.

    Raises:
        ValueError: the text is not a size.
    """
    match = _SIZE.match(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size: write 1024, 1KiB or 2MB")
    return round(float(match[1]) * _FACTORS[(match[2] or "").lower()])


@examples(
    "delaylevel plan --rate 2000 --max-delay 30d --size 1KiB",
    "delaylevel plan --rate 500 --max-delay 365d --size 2KiB --final-window broker",
    "delaylevel plan --rate 50 --max-delay 7d --mean-delay 3h --size 300 --mover function",
    "delaylevel plan --rate 2000 --max-delay 30d --size 1KiB --at-nine 0.3 --nine-within 2m",
    "delaylevel plan --rate 100000 --max-delay 365d --size 1KiB --simulate",
    "delaylevel plan --rate 500 --max-delay 30d --size 1KiB --simulate --nine-spread 1h",
)
@click.command()
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    required=True,
    metavar="PER_SECOND",
    help="Number of delayed messages per second.",
)
@options.max_delay(required=True)
@click.option(
    "--size", type=Parsed("size", parse_size), required=True, help="Size of a message, e.g. 1KiB."
)
@click.option("--mean-delay", type=DURATION, help="Mean delay; by default half of the longest.")
@click.option(
    "--copies",
    type=click.IntRange(min=1),
    default=2,
    help="Number of bookies that store each message.",
)
@click.option(
    "--subscriptions",
    type=click.IntRange(min=1),
    default=1,
    help="Number of subscriptions of the business topic; each has an index in the broker.",
)
@options.mover
@options.final_window
@click.option(
    "--partition-limit",
    type=click.IntRange(min=1),
    default=1000,
    help="Largest number of partitions of a level.",
)
@click.option(
    "--at-nine",
    "nine_share",
    type=click.FloatRange(0, 1),
    default=0.1,
    metavar="SHARE",
    help="Share of the messages that are due at nine o'clock, 0 to 1.",
)
@click.option(
    "--nine-spread",
    type=DURATION,
    default="0s",
    help="Time from nine o'clock on over which these are due.",
)
@click.option(
    "--nine-within",
    type=DURATION,
    help="Time that the dispatchers have after that to release these.",
)
@click.option("--simulate", is_flag=True, help="Simulate the traffic up to one day in detail.")
@click.option(
    "--days",
    type=click.IntRange(min=1),
    help="Number of days to simulate; by default one more than the longest delay.",
)
@click.option(
    "--level",
    "given_levels",
    type=Parsed("unit:max[:lead]", parse_level),
    multiple=True,
    metavar="UNIT:MAX[:LEAD]",
    help="Level to simulate instead of the recommended ones, from coarse to fine. Repeatable.",
)
@click.option(
    "--movers",
    type=click.IntRange(min=1),
    help="Number of cores or instances of the simulated mover; by default the number planned.",
)
@click.option(
    "--dispatchers",
    type=click.IntRange(min=1),
    help="Number of simulated dispatchers; by default the number planned.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="File for a drawing of the result: .png or .svg.",
)
@options.output
def plan(
    output: str,
    simulate: bool,
    days: int | None,
    given_levels: tuple[PartitionStrategy, ...],
    movers: int | None,
    dispatchers: int | None,
    plot: Path | None,
    **fields: Any,
) -> None:
    """Compute the resources that a load needs.

    These are partitions, storage, memory, movers and dispatchers for lists of levels that fit, also
    at the peak of the day: a part of all messages is due at nine o'clock. The results are
    extrapolated from this project's benchmarks on two shared cores: read them as orders of
    magnitude. The first list of levels is the recommended one. Nothing is contacted.

    With --simulate, traffic goes through the levels on a virtual clock until storage is steady. The
    result is one day: storage, loads, peaks, and the recovery after an outage of an hour.
    """
    load = Load(**fields)
    if simulate:
        found = _simulated(load, given_levels, days, movers, dispatchers, plot)
        _show_day(load, found, output)
        if plot is not None:
            title = f"{unit_names(found.levels)}: {load.rate:,.0f} messages per second, one day"
            save_curves(plot, title, curves(found), BIN_MS)
            note(f"The plot is in {plot}.")
        return
    if given_levels or days or movers or dispatchers or plot:
        raise click.UsageError(
            "--days, --level, --movers, --dispatchers and --plot need --simulate"
        )
    best, *others = planning.plans(load)
    geometric = planning.geometric_plans(load, [best, *others])
    by_cost = sorted([*others, *geometric], key=lambda item: (item.cost, item.partitions))
    rows = [plan_view(item) for item in (best, *by_cost)]
    if output == "json":
        figures = {
            name: {"value": figure.value, "unit": figure.unit, "command": figure.command}
            for name, figure in FIGURES.items()
        }
        emit_one({**load_view(load), "plans": rows, "figures": figures}, LOAD, output)
        return
    if output == "jsonl":
        emit(rows, PLANS, output)
        return
    emit_one(load_view(load), LOAD, output)
    click.echo()
    emit(rows, PLANS, output)
    note(
        "The first list is the recommended one: the lowest COST of the lists of named units. -o "
        "wide shows the options to create each. MOVERS: "
        + ("cores of the Spark job" if load.mover is Mover.SPARK else "instances of the Function")
        + ", with twice the capacity that the mean needs, and enough for PEAK/S. "
        + _peak_text(load)
    )


def _peak_text(load: Load) -> str:
    """Return the assumption about the peak of the day."""
    if not load.nine_messages:
        return "No peak is assumed: see --at-nine."
    spread_ms = duration_ms(load.nine_spread)
    over = f"over {exact_duration(spread_ms)}" if spread_ms else "at once"
    return (
        f"Assumed peak: {load.nine_share:.0%} of all messages are due at nine o'clock, {over}; see "
        "--at-nine, --nine-spread and --nine-within."
    )


def _simulated(
    load: Load,
    given: tuple[PartitionStrategy, ...],
    days: int | None,
    movers: int | None,
    dispatchers: int | None,
    plot: Path | None,
) -> SimulatedDay:
    """Return a simulated day of a load with the given levels, or with the recommended ones."""
    if plot is not None:
        check_plot(plot)
    if given and given[0].maximum_delay < load.maximum_delay:
        raise InvalidInputError(
            f"the first --level accepts only {exact_duration(duration_ms(given[0].maximum_delay))}"
            f": give it a maximum of {exact_duration(duration_ms(load.maximum_delay))}"
        )
    chosen = planning.plan(load, Levels(given)) if given else planning.plans(load)[0]
    per_mover = bench.SPARK_RATE if load.mover is Mover.SPARK else bench.FUNCTION_RATE
    number = dispatchers or max(1, chosen.dispatchers)
    traffic = Traffic(
        rate=load.rate,
        maximum_ms=duration_ms(load.maximum_delay),
        mean_ms=load.mean / timedelta(milliseconds=1),
        peak_share=load.nine_share,
        peak_spread_ms=duration_ms(load.nine_spread),
    )
    note(f"Simulating {unit_names(chosen.levels)} ...")
    return simulate(
        chosen.levels,
        traffic,
        days=days,
        mover_rate=(movers or chosen.movers) * per_mover.value,
        dispatcher_rate=number * bench.BURST_RATE.value,
        rebuild_s=chosen.rebuild_s / number,
    )


def _show_day(load: Load, found: SimulatedDay, output: str) -> None:
    if output in ("json", "jsonl"):
        emit_one(simulated_view(load, found), FACTS, output)
        return
    emit_one(facts_view(load, found), FACTS, output)
    click.echo()
    emit(part_views(load, found), PARTS, output)
    click.echo()
    emit(recovery_views(found), RECOVERIES, output)
    note(
        "MESSAGES and SIZE are the largest of the day, on all bookies. Times are those of the time "
        "zone of nine o'clock; each peak is the mean of ten seconds."
    )
