"""``delaylevel plan``: the partitions, storage and memory that a load needs."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import click

from delaylevel.cli.views.output import emit, emit_one, note
from delaylevel.cli.views.tables import Column, short
from delaylevel.model import plan as planning
from delaylevel.model.clock import duration_ms
from delaylevel.model.formatting import exact_duration
from delaylevel.model.level_topic import Mover
from delaylevel.model.plan import Load, Plan
from delaylevel.model.strategy import Levels

from . import options
from .command import examples
from .options import DURATION, Parsed

LOAD = (
    Column("pending", "number"),
    Column("stored_bytes", "size", head="STORED"),
    Column("native_index_bytes", "size", head="INDEX NATIVE"),
    Column("native_rebuild_ms", "duration", head="REBUILD NATIVE"),
    Column("nine_messages", "number", head="DUE AT NINE"),
    Column("dispatchers", "number"),
    Column("nine_release_ms", "duration", head="RELEASED WITHIN"),
)
PLANS = (
    Column("units", head="LEVELS"),
    Column("partitions", "number"),
    Column("writes", "number"),
    Column("moves_short", "number", head="MOVES/S", wide=True),
    Column("peak_short", "number", head="PEAK/S"),
    Column("window_short", "number", head="WINDOW"),
    Column("movers", "number"),
    Column("cost_short", "number", head="COST"),
    Column("window_size_bytes", "size", head="WINDOW SIZE", wide=True),
    Column("index_bytes", "size", head="INDEX", wide=True),
    Column("tracker_bytes", "size", head="TRACKER", wide=True),
    Column("rebuild_ms", "duration", head="REBUILD", wide=True),
    Column("dispatcher_cores", "number", wide=True),
    Column("broker_cores", "number", wide=True),
    Column("create", wide=True),
)


def unit_names(levels: Levels) -> str:
    """Return the units of a list of levels."""
    return " ".join(exact_duration(level.unit_ms) for level in levels)


def load_view(load: Load) -> dict[str, Any]:
    """Return the load without levels as one row."""
    return {
        "pending": load.pending,
        "stored_bytes": load.stored_bytes,
        "native_index_bytes": load.native_index_bytes,
        "native_rebuild_ms": round(load.native_rebuild_s * 1000),
        "nine_messages": load.nine_messages,
        "dispatchers": load.dispatchers,
        "nine_release_ms": round(load.nine_release_s * 1000),
    }


def plan_view(item: Plan) -> dict[str, Any]:
    """Return a plan as one row; the keys that end in ``_short`` are for tables."""
    return {
        "levels": ", then ".join(str(strategy) for strategy in item.levels.strategies),
        "units": unit_names(item.levels),
        "create": create_options(item.levels),
        "partitions": item.partitions,
        "writes": round(item.writes, 2),
        "window": item.window,
        "peak_window": item.peak_window,
        "window_short": short(item.peak_window, True),
        "window_size_bytes": item.window_bytes,
        "index_bytes": item.index_bytes,
        "tracker_bytes": item.tracker_bytes,
        "rebuild_ms": round(item.rebuild_s * 1000),
        "moves_per_s": round(item.moves_per_s),
        "moves_short": short(item.moves_per_s, True),
        "peak_moves_per_s": round(item.peak_moves_per_s),
        "peak_short": short(item.peak_moves_per_s, True),
        "movers": item.movers,
        "cost": round(item.cost, 2),
        "cost_short": f"{item.cost:,.1f}",
        "broker_cores": round(item.broker_cores, 2),
        "dispatchers": item.dispatchers,
        "dispatcher_cores": round(item.dispatcher_cores, 2),
    }


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


_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([kmg]i?)?b?$", re.IGNORECASE)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def parse_size(text: str) -> int:
    """Parse a size such as ``1024``, ``1KiB`` or ``2MB``, in bytes."""
    match = _SIZE.match(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size: write 1024, 1KiB or 2MB")
    return round(float(match[1]) * _FACTORS[(match[2] or "").lower()])


@examples(
    "delaylevel plan --rate 2000 --max-delay 30d --size 1KiB",
    "delaylevel plan --rate 500 --max-delay 365d --size 2KiB --final-window broker",
    "delaylevel plan --rate 50 --max-delay 7d --mean-delay 3h --size 300 --mover function",
    "delaylevel plan --rate 2000 --max-delay 30d --size 1KiB --at-nine 0.3 --nine-within 2m",
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
    "--nine-within",
    type=DURATION,
    help="Time from nine o'clock in which the dispatchers release these.",
)
@options.output
def plan(output: str, **fields: Any) -> None:
    """Compute the resources that a load needs.

    These are partitions, storage, memory, movers and dispatchers for lists of levels that fit, also
    at the peak of the day: a part of all messages is due at nine o'clock. The results are
    extrapolated from this project's benchmarks on two shared cores: read them as orders of
    magnitude. The first list of levels is the recommended one. Nothing is contacted.
    """
    load = Load(**fields)
    rows = [plan_view(item) for item in planning.plans(load)]
    if output == "json":
        emit_one({**load_view(load), "plans": rows}, LOAD, output)
        return
    if output == "jsonl":
        emit(rows, PLANS, output)
        return
    emit_one(load_view(load), LOAD, output)
    click.echo()
    emit(rows, PLANS, output)
    processes = "instances of the Function"
    if load.mover is Mover.SERVICE:
        processes = "cores (`delaylevel run` uses one, the Spark job any number)"
    peak = (
        f"Assumed peak: {load.nine_share:.0%} of all messages are due at nine o'clock; see "
        "--at-nine and --nine-within."
        if load.nine_messages
        else "No peak is assumed: see --at-nine."
    )
    note(
        "The first list is the recommended one: the lowest COST. -o wide shows the options to "
        f"create each. MOVERS: {processes}, with twice the capacity that the mean needs, and "
        f"enough for PEAK/S. {peak}"
    )
