"""``delaylevel plan``: the partitions, storage and memory that a load needs."""

from __future__ import annotations

import re
from typing import Any

import click

from delaylevel.model import plan as planning
from delaylevel.model.level_topic import Mover
from delaylevel.model.plan import Load

from . import options
from .command import examples
from .output import emit, emit_one, note
from .values import DURATION, Parsed
from .views.plan import LOAD, PLANS, load_view, plan_view

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
    processes = (
        "cores of the Spark job" if load.mover is Mover.SPARK else "instances of the Function"
    )
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
