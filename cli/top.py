"""``delaylevel top``: a live view of a topic's messages on their way."""

from __future__ import annotations

import itertools
from time import sleep

import click

from . import options
from .command import Settings, examples, pass_settings
from .inspecting import inspector, screen
from .output import emit_one
from .values import DURATION_MS
from .views.flow import flow_text, flow_view

# Cursor to the top left corner, then erase everything below it.
_HOME = "\x1b[H\x1b[J"
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
@options.renamed(
    "--refreshes",
    former=["--count"],
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
        with inspector(settings, topic) as look:
            before = look.flow()
            for _ in turns:
                sleep(pause_s)
                now = look.flow()
                if output in ("json", "jsonl"):
                    emit_one(flow_view(before, now), (), output)
                else:
                    text = flow_text(before, now, width)
                    click.echo(f"{_HOME}{text}" if live else text)
                before = now
    except KeyboardInterrupt:
        click.echo()  # Ctrl-C is the normal end
