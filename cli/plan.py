"""``delaylevel plan``: the partitions, storage and memory that a load needs."""

from __future__ import annotations

from typing import Any

import click
from pydantic import ByteSize, TypeAdapter

from delaylevel.cli.views.output import emit, emit_one, note
from delaylevel.cli.views.tables import Column
from delaylevel.model import plan as planning
from delaylevel.model.formatting import exact_duration
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, default_level_topic
from delaylevel.model.strategy import Levels

from . import options
from .options import DURATION, Parsed, examples

_LOAD = (
    Column("pending", "number"),
    Column("stored_bytes", "size", head="STORED"),
)
_PLANS = (
    Column("units", head="LEVELS"),
    Column("partitions", "number"),
    Column("window", "number"),
    Column("window_bytes", "size", head="WINDOW SIZE"),
    Column("memory_bytes", "size", head="MEMORY"),
    Column("restart_ms", "duration"),
    Column("needs_finer_level", head="FINER NEEDED"),
)
_SIZE = TypeAdapter(ByteSize)


def parse_size(text: str) -> int:
    """Parse a size such as ``1024``, ``1KiB`` or ``2MB``, in bytes."""
    try:
        # pydantic ignores what follows a number: it would take 1,024 for 1.
        if ByteSize.byte_string_re.fullmatch(text.strip()) is None:
            raise ValueError
        return int(_SIZE.validate_python(text.strip()))
    except ValueError:
        raise ValueError(f"{text!r} is no size: write 1024, 1KiB or 2MB") from None


def _creation_command(levels: Levels, window: FinalWindow) -> str:
    topic = default_level_topic("TOPIC")
    described = LevelTopicDescription(topic, levels, ("TOPIC",), final_window=window)
    return described.creation_command()


@examples(
    "delaylevel plan --rate 2000 --max-delay 30d --size 1KiB",
    "delaylevel plan --rate 500 --max-delay 1d --size 2KiB --final-window broker",
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
@options.final_window
@options.output
def plan(output: str, **fields: Any) -> None:
    """Compute the resources that a load needs.

    These are storage, and for lists of levels that fit: partitions, disk and memory of the final
    window, and whether a finer level is needed. The results are extrapolated from this project's
    benchmarks on two shared cores: read them as orders of magnitude. Nothing is contacted.
    """
    load = planning.Load(**fields)
    found = planning.plans(load)
    best = planning.recommended(found)
    view = {"pending": load.pending, "stored_bytes": load.stored_bytes}
    rows = [
        {
            "units": " ".join(exact_duration(level.unit_ms) for level in item.levels),
            "create": _creation_command(item.levels, load.final_window),
            "partitions": item.levels.partitions,
            "window": item.window,
            "window_bytes": item.window_bytes,
            "memory_bytes": item.memory_bytes,
            "restart_ms": round(item.restart_s * 1000),
            "needs_finer_level": item.needs_finer_level,
            "recommended": item is best,
        }
        for item in found
    ]
    if output == "json":
        emit_one({**view, "plans": rows}, (), output)
    elif output == "jsonl":
        emit(rows, (), output)
    else:
        emit_one(view, _LOAD, output)
        click.echo()
        emit(rows, _PLANS, output)
        note(f"Recommended: `{_creation_command(best.levels, load.final_window)}`.")
