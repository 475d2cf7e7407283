"""``delaylevel horizon``: the number of pending messages by due time."""

from __future__ import annotations

from pathlib import Path

import click

from delaylevel.inspection.plot import check_plot, save_plot

from . import options
from .command import Settings, examples, pass_settings
from .inspecting import inspector, note_delivery, reading, screen, target_option
from .output import emit, emit_one, note
from .views.horizon import horizon_note, horizon_text, horizon_view, within_view


@examples(
    "delaylevel horizon orders",
    "delaylevel horizon orders --exact",
    "delaylevel horizon orders --plot orders.svg",
    "delaylevel horizon orders -o json | jq '.within[] | {within, messages}'",
)
@click.command()
@click.argument("topic")
@click.option("--exact", is_flag=True, help="Read every message instead of estimating.")
@target_option
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="File for a drawing of the result: .png or .svg.",
)
@options.output
@pass_settings
def horizon(
    settings: Settings, topic: str, exact: bool, target: str | None, plot: Path | None, output: str
) -> None:
    """Count pending messages of TOPIC by time until due.

    Shows how many are due in the next minute, hour, day and week, and where they wait. TOPIC is a
    business topic or its level topic. Small partitions are counted. Large ones are sampled, and ~
    marks the estimates. Nothing is acknowledged or moved.
    """
    if plot is not None:
        check_plot(plot)  # before a read that may take minutes
    with inspector(settings, topic, target=target) as look, reading() as bar:
        found = look.horizon(exact=exact, tell=bar.tell, expect=bar.expect)
        bar.close()
        note_delivery(look, topic)
    if plot is not None:
        save_plot(found, plot)
    if output == "json":
        emit_one(horizon_view(found), (), output)
        return
    if output == "jsonl":
        emit([within_view(row) for row in found.within], (), output)
        return
    width, watched = screen()
    wide = output == "wide"
    click.echo(horizon_text(found, max(width, 200) if wide else width, bars=watched or wide))
    remarks = horizon_note(found)
    if remarks is not None:
        note(remarks)
    if plot is not None:
        note(f"The plot is in {plot}.")
