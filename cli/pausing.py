"""``delaylevel levels pause|resume``: stop the release of due messages for a time."""

from __future__ import annotations

import click

from delaylevel.cluster.admin import Admin
from delaylevel.model.clock import SystemClock
from delaylevel.model.formatting import exact_duration
from delaylevel.model.pauses import ALL
from delaylevel.topics import lifecycle

from . import options
from .command import Settings, examples, pass_settings
from .output import emit_one, note
from .values import DURATION_MS
from .views.levels import DESCRIPTION, description_view

_target = click.option("--target", metavar="TOPIC", help="Business topic to match.")


@examples(
    "delaylevel levels pause orders",
    "delaylevel levels pause orders --target invoices",
)
@click.command()
@click.argument("topic")
@_target
@options.output
@pass_settings
def pause(settings: Settings, topic: str, target: str | None, output: str) -> None:
    """Let the due messages of TOPIC's level topic wait.

    By default, those of all its business topics. Movers go on. Dispatchers follow within five
    seconds and keep what is due, on disk if it is much, until `levels resume`. A restart changes
    nothing. Messages that are sent without a delay are not paused.
    """
    with Admin.from_connection(settings.connection()) as admin:
        after = lifecycle.pause(admin, topic, target, SystemClock())
    emit_one(description_view(after), DESCRIPTION, output)
    note("Every dispatcher follows within five seconds.")


@examples(
    "delaylevel levels resume orders",
    "delaylevel levels resume orders --target invoices --spread 10m",
)
@click.command()
@click.argument("topic")
@_target
@click.option(
    "--spread",
    "spread_ms",
    type=DURATION_MS,
    default="0s",
    metavar="DURATION",
    help="Time over which the messages are spread, e.g. 10m; 0s for none.",
)
@options.output
@pass_settings
def resume(settings: Settings, topic: str, target: str | None, spread_ms: int, output: str) -> None:
    """Release the due messages of TOPIC's level topic again.

    By default, this ends every pause of the level topic. With --spread, the messages that wait are
    released evenly over this time. Messages that become due later do not wait for them, so they may
    overtake messages with the same key.
    """
    with Admin.from_connection(settings.connection()) as admin:
        after = lifecycle.resume(admin, topic, target, SystemClock(), spread_ms)
    emit_one(description_view(after), DESCRIPTION, output)
    if spread_ms:
        note(f"The messages that wait are released over {exact_duration(spread_ms)}.")
    left = [name for name, _ in after.pauses.paused]
    if left:
        names = ", ".join("all targets" if name == ALL else name for name in left)
        note(f"Still paused: {names}.")
