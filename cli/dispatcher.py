"""``delaylevel dispatcher``: the service that releases due messages from the final window."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
import platformdirs

from delaylevel.cluster import client_log
from delaylevel.cluster.connection import Connection
from delaylevel.model.formatting import format_duration

from . import options
from .command import examples, pass_connection, settings_of
from .output import Column, emit, note
from .values import DURATION_MS

if TYPE_CHECKING:
    from delaylevel.dispatcher import Dispatcher

_STATUS = (
    Column("partition", "number"),
    Column("owner"),
    Column("address", wide=True),
    Column("backlog_entries", "number"),
    Column("oldest_publish_ms", "time", head="OLDEST"),
)


@examples(
    "delaylevel dispatcher run orders",
    "delaylevel dispatcher status orders",
)
@click.group()
def dispatcher() -> None:
    """Release due messages from the final window."""


@examples(
    "delaylevel dispatcher run orders",
    "delaylevel dispatcher run orders invoices --metrics-port 9109",
    "delaylevel dispatcher run orders --delivery effectively-once --memory 1024",
)
@dispatcher.command()
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@options.delivery
@click.option(
    "--memory",
    type=click.IntRange(min=8),
    default=256,
    metavar="MIB",
    help="Memory for pending payloads of each level topic; the rest is spilled to disk.",
)
@click.option(
    "--remember",
    type=click.IntRange(min=2),
    default=2_000_000,
    metavar="IDS",
    help="Number of message IDs to remember for each source, to drop copies.",
)
@click.option(
    "--checkpoint-interval",
    "checkpoint_ms",
    type=DURATION_MS,
    default="1s",
    help="Interval between acknowledgements of released messages.",
)
@options.spill_dir
@options.renamed(
    "--dispatcher-name",
    "name",
    former=["--name"],
    metavar="NAME",
    help="Name of this dispatcher; by default host and process.",
)
@options.metrics
@pass_connection
def run(
    connection: Connection,
    topics: tuple[str, ...],
    memory: int,
    remember: int,
    spill_dir: Path | None,
    metrics_port: int | None,
    metrics_address: str,
    **fields: Any,
) -> None:
    """Run a dispatcher for level topics.

    TOPIC is a business topic or a level topic with the final window "tracker". Any number of
    dispatchers may run, on one machine or many: they share the window's partitions, and take over
    those of a dispatcher that dies or hangs. Spill files are in your state folder unless
    --spill-dir names another. SIGTERM or Ctrl-C ends it when the current batches are published.
    """
    from delaylevel.cluster.admin import Admin
    from delaylevel.dispatcher import Dispatcher, DispatchSettings

    # The publishing thread must not wait the default 5 ms for its turn in the interpreter.
    sys.setswitchinterval(0.001)
    # Messages are freed without the garbage collector, which would look at all of them, and at all
    # modules, many times a second.
    gc.freeze()
    gc.set_threshold(100_000)
    settings = DispatchSettings(
        directory=spill_dir or Path(platformdirs.user_state_dir("delaylevel")) / "dispatch",
        memory_bytes=memory << 20,
        remember=remember + remember % 2,
        **fields,
    )
    with contextlib.ExitStack() as stack:
        # Attempts on partitions that others own fail all the time, and the client would log each
        # of them with -v. The dispatcher logs the events that matter.
        verbosity = settings_of(click.get_current_context()).verbosity
        logger = client_log.for_verbosity(verbosity if verbosity > 1 else 0)
        open_client = partial(connection.open_client, logger=logger)
        client = stack.enter_context(contextlib.closing(open_client()))
        admin = stack.enter_context(Admin.from_connection(connection))
        service = Dispatcher(client, admin, topics, settings, target_client=open_client)

        def stop(signum: int, frame: FrameType | None) -> None:
            service.stop()

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        if metrics_port is not None:
            from delaylevel.dispatcher.metrics import DispatchCollector
            from delaylevel.prometheus import serve

            metrics = serve(DispatchCollector(service), metrics_port, metrics_address)
            port = stack.enter_context(metrics)
            note(f"Metrics at http://{metrics_address}:{port}/metrics")
        for description in service.descriptions:
            partitions = f"{description.window_partitions} partitions"
            note(f"Releasing from {description.window_topic} ({partitions})")
        note("Ctrl-C ends it.")
        count = _ReleaseCount()
        service.run(lambda: count.show(service))
        note(f"{count.released:,} messages released.")


class _ReleaseCount:
    """The number of messages released, including those from partitions given back since."""

    def __init__(self) -> None:
        self.released = 0
        self._last: dict[tuple[str, int], int] = {}

    def show(self, service: Dispatcher) -> None:
        """Count, and on a terminal draw one line; called once a second."""
        from delaylevel.dispatcher.stats import quantile_ms, total_lateness

        found = service.stats()
        before = self.released
        for key, stats in found.items():
            last = self._last.get(key, 0)
            # A partition that was given back and taken again counts from 0.
            self.released += stats.released - (last if stats.released >= last else 0)
        self._last = {key: stats.released for key, stats in found.items()}
        if not sys.stderr.isatty():
            return
        pending = sum(stats.pending for stats in found.values())
        held = sum(sum(stats.held.values()) for stats in found.values())
        dues = [stats.next_due_ms for stats in found.values() if stats.next_due_ms is not None]
        p99 = quantile_ms(total_lateness(found.values()), 0.99)
        recovering = sum(stats.state == "recovering" for stats in found.values())
        line = f"{len(found)} partitions"
        line += f" ({recovering} recovering)" if recovering else ""
        line += f" · {pending:,} pending · {self.released:,} released, {self.released - before:,}/s"
        line += f" · p99 {format_duration(p99)} late" if p99 is not None else ""
        line += f" · {held:,} held" if held else ""
        if dues:
            line += f" · next in {format_duration(max(0, min(dues) - time.time() * 1000))}"
        click.echo(f"\r\x1b[2K{line}", nl=False, err=True)


@examples("delaylevel dispatcher status orders", "delaylevel dispatcher status orders -o json")
@dispatcher.command()
@click.argument("topic")
@options.output
@pass_connection
def status(connection: Connection, topic: str, output: str) -> None:
    """Show owner and backlog of each window partition."""
    from delaylevel.cluster.admin import Admin
    from delaylevel.dispatcher.service import partition_owners

    with Admin.from_connection(connection) as admin:
        rows = [
            {
                "partition": each.partition,
                "owner": each.owner.name if each.owner else None,
                "address": each.owner.address if each.owner else None,
                "backlog_entries": each.backlog_entries,
                "oldest_publish_ms": each.oldest_publish_ms,
            }
            for each in partition_owners(admin, topic)
        ]
    emit(rows, _STATUS, output)
    unowned = [str(row["partition"]) for row in rows if not row["owner"]]
    if unowned:
        note(
            f"No dispatcher owns partition {', '.join(unowned)}: run "
            f"`delaylevel dispatcher run {topic}`."
        )
