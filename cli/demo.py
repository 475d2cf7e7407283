"""``delaylevel demo``: a demonstration on a real broker, in about two minutes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cli.views.live import Starting, is_live, live_region
from delaylevel.cli.views.output import emit, note
from delaylevel.cli.views.tables import Column, chart
from delaylevel.cli.views.terminal import wrapped
from delaylevel.model.formatting import format_duration

from . import options
from .command import examples

_PARTITIONS = (
    Column("level"),
    Column("partition", "number"),
    Column("from_producer", "number"),
    Column("from_mover", "number"),
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
    this machine only: a private Pulsar broker, the producer wrapper, a mover, a dispatcher, and
    consumers that check every message. The mover is the Spark job, or without PySpark the one of
    `delaylevel run`. The exit code is 0 only if no message is lost, duplicated, changed or early.
    """
    from delaylevel.demo import has_spark, mover_name, run

    if not has_spark():
        note("PySpark is not installed: the local mover of `delaylevel run` moves the messages.")
    with tempfile.TemporaryDirectory(prefix="delaylevel-demo-") as folder:
        note("Starting a private Pulsar broker (downloaded with Maven the first time)...")
        with (
            EmbeddedBroker(
                "demo", directory=Path(folder) / "broker", follow_parent=True, report=note
            ) as broker,
            _view(f"{mover_name()} and dispatcher") as show,
        ):
            result = run(broker.connection, Path(folder) / "checkpoint", messages, show)
    rows = [vars(item) for item in result.partitions]
    summary = {
        "sent": result.sent,
        "straight_to_business_topic": result.undelayed,
        "lost": result.lost,
        "duplicated": result.duplicated,
        "changed": result.damaged,
        "early": result.early,
        "late_p50_ms": result.late_at(0.5),
        "late_p99_ms": result.late_at(0.99),
        "late_max_ms": result.late_at(1.0),
        "seconds": round(result.seconds, 1),
        "ok": result.ok,
    }
    if output in ("json", "jsonl"):
        emit([{**summary, "partitions": rows}], _PARTITIONS, output)
    else:
        emit(rows, _PARTITIONS, output)
        click.echo()
        click.echo(_verdict(summary))
    if not result.ok:
        click.get_current_context().exit(1)


def _verdict(summary: dict[str, Any]) -> str:
    late = ", ".join(
        f"{name} {format_duration(summary[f'late_{name}_ms'])}" for name in ("p50", "p99", "max")
    )
    return (
        f"{summary['sent']:,} sent, {summary['straight_to_business_topic']:,} of them due at once "
        f"and sent straight to their topic; {summary['lost']:,} lost, "
        f"{summary['duplicated']:,} duplicated, {summary['changed']:,} changed, "
        f"{summary['early']:,} early.\n"
        f"Lateness: {late}.\n"
        + ("All is well." if summary["ok"] else "Some messages did not arrive as they should.")
    )


@contextmanager
def _view(parts: str) -> Iterator[Callable[[Any], None]]:
    """Yield a function that shows progress: a live table on a terminal, or a line at times."""
    if is_live():
        phase = "starting"

        def show(snapshot: Any) -> None:
            nonlocal phase
            # Nothing is sent before the mover and the dispatcher are ready.
            phase = "" if snapshot.pending else snapshot.phase
            if not phase:
                region.show(_table(snapshot, *region.size))

        with (
            live_region(processes=True) as region,
            Starting(region, parts, lambda: phase, None),
        ):
            yield show
        return
    last: dict[str, Any] = {"phase": None, "at": -_LINE_EVERY_S}

    def line(snapshot: Any) -> None:
        if snapshot.phase != last["phase"] or snapshot.elapsed_s - last["at"] >= _LINE_EVERY_S:
            last.update(phase=snapshot.phase, at=snapshot.elapsed_s)
            note(_line(snapshot))

    yield line


def _line(snapshot: Any) -> str:
    waiting = sum(snapshot.pending.values())
    late = sorted(snapshot.late_ms)
    median = f", median lateness {format_duration(late[len(late) // 2])}" if late else ""
    return (
        f"{snapshot.elapsed_s:5.0f}s {snapshot.phase}: {snapshot.sent:,} of {snapshot.total:,} "
        f"sent, {snapshot.delivered:,} delivered, {waiting:,} entries in the levels{median}"
    )


def _table(snapshot: Any, width: int, height: int) -> str:
    most = max(snapshot.pending.values(), default=0) or 1
    rows = [("LEVEL", "WAITING", 0.0)]
    for (level, partition), waiting in snapshot.pending.items():
        rows.append((f"{level} {partition}", f"{waiting:,}", waiting / most))
    head = wrapped(_line(snapshot), width)
    room = height - head.count("\n") - 1
    labels, counts, shares = zip(*rows, strict=True)
    return "\n".join((head, *chart(labels, counts, shares, width).splitlines()[:room]))
