"""``delaylevel demo``: a demonstration on a real broker, in about a minute."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cli.views.output import emit_one, note
from delaylevel.cli.views.tables import Column
from delaylevel.model.formatting import format_duration

from . import options
from .options import examples

if TYPE_CHECKING:
    from delaylevel.demo import Demonstration

_RESULT = (
    *(Column(key, "number") for key in ("sent", "lost", "duplicated", "changed", "early")),
    *(Column(f"late_{name}_ms", "duration") for name in ("p50", "p99", "max")),
    Column("ok", head="ALL IS WELL"),
)
_LINE_EVERY_S = 5.0


@examples("delaylevel demo", "delaylevel demo --messages 20000 -o json")
@click.command()
@click.option(
    "--messages",
    type=click.IntRange(1, 1_000_000),
    default=3000,
    help="Number of messages to send.",
)
@options.output
def demo(messages: int, output: str) -> None:
    """Watch delayed messages arrive on time.

    The demo starts a broker and sends messages through two levels. Everything is real and runs on
    this machine only: a private Pulsar broker, the producer wrapper, the service of `delaylevel
    run`, and a consumer that checks every message. The exit code is 0 only if no message is lost,
    duplicated, changed or early.
    """
    from delaylevel.demo import run

    next_s, phase = 0.0, ""

    def show(at: Demonstration) -> None:
        """Print the progress at each phase, and now and then."""
        nonlocal next_s, phase
        if at.phase != phase or at.seconds >= next_s:
            next_s, phase = at.seconds + _LINE_EVERY_S, at.phase
            note(
                f"{at.seconds:.0f}s {at.phase}: {len(at.sent):,} sent, {len(at.seen):,} delivered, "
                f"median {format_duration(at.late_at(0.5))} late"
            )

    with tempfile.TemporaryDirectory(prefix="delaylevel-demo-") as folder:
        where = Path(folder)
        with EmbeddedBroker(where / "broker", follow_parent=True, report=note) as broker:
            result = run(broker.connection, where / "window", messages, show)
    late = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    view = {
        "sent": len(result.sent),
        "lost": result.lost,
        "duplicated": result.duplicated,
        "changed": len(result.changed),
        "early": result.early,
        **{f"late_{name}_ms": result.late_at(share) for name, share in late.items()},
        "seconds": round(result.seconds, 1),
        "ok": result.ok,
    }
    emit_one(view, _RESULT, output)
    if not result.ok:
        click.get_current_context().exit(1)
