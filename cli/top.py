"""``delaylevel top``: the way of a topic's messages, live."""

from __future__ import annotations

import time
from datetime import timedelta

import click

from delaylevel.cli.views.pending import flow_text, flow_view

from .inspecting import inspector, screen
from .options import DURATION, Settings, examples, output_option, pass_settings
from .output import emit, emit_one

# To the upper left corner, and wipe what is below.
_HOME = "\x1b[H\x1b[J"
_SHORTEST_S = 0.2


@click.command(
    epilog=examples(
        "delaylevel top orders",
        "delaylevel top orders --every 5s",
        "delaylevel top orders --count 1 -o json",
    )
)
@click.argument("topic")
@click.option("--every", type=DURATION, default="2s", show_default=True, help="How often to look.")
@click.option(
    "--count",
    type=click.IntRange(min=1),
    help="So many looks; by default without end on a terminal, and one elsewhere.",
)
@output_option
@pass_settings
def top(settings: Settings, topic: str, every: timedelta, count: int | None, output: str) -> None:
    """Watch the messages of TOPIC travel: levels, window, business topics, and who moves them.

    ENTRIES is what waits, a batch counted once; rates are messages a second. Ctrl-C ends it.
    Nothing is acknowledged or moved.
    """
    width, watched = screen()
    live = watched and output in ("table", "wide")
    left = count if count is not None else (None if live else 1)
    pause_s = max(_SHORTEST_S, every / timedelta(seconds=1))
    try:
        with inspector(settings, topic) as look:
            before = look.flow()
            while left is None or left > 0:
                time.sleep(pause_s)
                now = look.flow()
                if output == "json":
                    emit_one(flow_view(before, now), (), output)
                elif output == "jsonl":
                    emit([flow_view(before, now)], (), output)
                else:
                    text = flow_text(before, now, width)
                    click.echo(f"{_HOME}{text}" if live else text)
                before = now
                left = None if left is None else left - 1
    except KeyboardInterrupt:
        click.echo()  # Ctrl-C is how it ends
