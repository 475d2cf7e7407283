"""``delaylevel top``: a live view of a topic's messages on their way."""

from __future__ import annotations

import itertools
import sys
from contextlib import AbstractContextManager, nullcontext
from time import sleep

import click

from delaylevel.inspection.flow import Flow

from . import options
from .command import Settings, examples, pass_settings
from .inspecting import inspector, screen
from .live import LiveRegion, live_region
from .output import emit_one
from .terminal import has_colour, write
from .values import DURATION_MS
from .views.flow import flow_text, flow_view

_SHORTEST_S = 0.2


@examples(
    "delaylevel top orders",
    "delaylevel top orders --every 5s",
    "delaylevel top orders --refreshes 1 -o json",
)
@click.command()
@click.argument("topic")
@click.option(
    "--every", "every_ms", type=DURATION_MS, default="2s", help="Interval between refreshes."
)
@click.option(
    "--refreshes",
    type=click.IntRange(min=1),
    help="Number of refreshes; by default endless on a terminal, and 1 otherwise.",
)
@options.output
@pass_settings
def top(settings: Settings, topic: str, every_ms: int, refreshes: int | None, output: str) -> None:
    """Watch the messages of TOPIC on their way.

    Shows levels, window and business topics with their rates. Also shows the movers and dispatchers
    at work. ENTRIES is the backlog, in which a batch counts once, and cancelled messages and
    their cancellations count, too; rates are messages per second. The stage `outcomes` has the
    decisions on cancellations of about the last day.
    Ctrl-C ends it. Nothing is acknowledged or moved.
    """
    width, watched = screen()
    live = watched and output in ("table", "wide")
    turns = itertools.count() if live and refreshes is None else range(refreshes or 1)
    pause_s = max(_SHORTEST_S, every_ms / 1000)
    try:
        with inspector(settings, topic) as look, _drawn_on_stdout(live) as region:
            before = look.flow()
            _draw(region, None, before)
            for _ in turns:
                sleep(pause_s)
                now = look.flow()
                if output in ("json", "jsonl"):
                    emit_one(flow_view(before, now), (), output)
                elif region.live:
                    _draw(region, before, now)
                else:
                    write(flow_text(before, now, width, colour=has_colour(sys.stdout)))
                before = now
    except KeyboardInterrupt:
        pass  # Ctrl-C is the normal end


def _draw(region: LiveRegion, before: Flow | None, now: Flow) -> None:
    if region.live:
        width, height = region.size
        region.show(flow_text(before, now, width, height, colour=has_colour(sys.stdout)))


def _drawn_on_stdout(live: bool) -> AbstractContextManager[LiveRegion]:
    """Open a region on stdout that leaves its last text, or one that shows nothing."""
    return live_region(sys.stdout, keep=True) if live else nullcontext(LiveRegion(None))
