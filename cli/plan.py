"""``delaylevel plan``: the partitions, storage and memory that a load needs."""

from __future__ import annotations

import re
from typing import Any

import click

from delaylevel.model import plan as planning
from delaylevel.model.benchmarked import FIGURES
from delaylevel.model.level_topic import Mover
from delaylevel.model.plan import Load, Plan

from . import options
from .command import examples
from .output import Column, emit, emit_one, note
from .values import DURATION, Parsed

_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([kmg]i?)?b?$", re.IGNORECASE)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_LOAD = (
    Column("pending", "number"),
    Column("stored_bytes", "size", head="STORED"),
    Column("native_index_bytes", "size", head="INDEX NATIVE"),
    Column("native_rebuild_ms", "duration", head="REBUILD NATIVE"),
)
_PLANS = (
    Column("levels"),
    Column("partitions", "number"),
    Column("window", "number", head="IN WINDOW"),
    Column("window_size_bytes", "size", head="WINDOW SIZE"),
    Column("index_bytes", "size", head="INDEX"),
    Column("tracker_bytes", "size", head="TRACKER"),
    Column("rebuild_ms", "duration", head="REBUILD"),
    Column("moves_per_s", "number", head="MOVES/S"),
    Column("movers", "number"),
    Column("dispatchers", "number"),
    Column("dispatcher_cores", "number"),
)


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
@options.output
def plan(output: str, **fields: Any) -> None:
    """Compute the resources that a load needs.

    These are partitions, storage, memory and movers for lists of levels that fit. The results are
    extrapolated from this project's benchmarks on two shared cores: read them as orders of
    magnitude. The first list of levels is the recommended one. Nothing is contacted.
    """
    load = Load(**fields)
    rows = [plan_view(item) for item in planning.plans(load)]
    if output == "json":
        figures = {
            name: {"value": figure.value, "unit": figure.unit, "command": figure.command}
            for name, figure in FIGURES.items()
        }
        emit_one({**load_view(load), "plans": rows, "figures": figures}, _LOAD, output)
        return
    if output == "jsonl":
        emit(rows, _PLANS, output)
        return
    emit_one(load_view(load), _LOAD, output)
    click.echo()
    emit(rows, _PLANS, output)
    note(
        "The first list is the recommended one. MOVERS: "
        + ("cores of the Spark job" if load.mover is Mover.SPARK else "instances of the Function")
        + ", with twice the capacity that is needed."
    )


def load_view(load: Load) -> dict[str, Any]:
    """Return the load without levels as one row."""
    return {
        "pending": load.pending,
        "stored_bytes": load.stored_bytes,
        "native_index_bytes": load.native_index_bytes,
        "native_rebuild_ms": round(load.native_rebuild_s * 1000),
    }


def plan_view(item: Plan) -> dict[str, Any]:
    """Return a plan as one row."""
    return {
        "levels": ", then ".join(str(strategy) for strategy in item.levels.strategies),
        "partitions": item.partitions,
        "window": item.window,
        "window_size_bytes": item.window_bytes,
        "index_bytes": item.index_bytes,
        "tracker_bytes": item.tracker_bytes,
        "rebuild_ms": round(item.rebuild_s * 1000),
        "moves_per_s": round(item.moves_per_s),
        "movers": item.movers,
        "dispatchers": item.dispatchers,
        "dispatcher_cores": round(item.dispatcher_cores, 2),
    }
