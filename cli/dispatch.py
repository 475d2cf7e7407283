"""``delaylevel dispatch``: the service of the final window."""

from __future__ import annotations

import contextlib
import signal
import sys
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click
import platformdirs

from delaylevel.cluster import client_log as _clientlog
from delaylevel.cluster.connection import Connection
from delaylevel.model.delivery import Delivery

from .options import (
    DURATION,
    examples,
    output_option,
    pass_connection,
    require_reachable,
    settings_of,
)
from .output import Column, emit, format_duration, note

if TYPE_CHECKING:
    from delaylevel.dispatcher import Dispatcher


@click.group(
    epilog=examples(
        "delaylevel dispatch run orders",
        "delaylevel dispatch status orders",
    )
)
def dispatch() -> None:
    """Release what is due from the final window, to the millisecond."""


@dispatch.command(
    epilog=examples(
        "delaylevel dispatch run orders",
        "delaylevel dispatch run orders invoices --metrics-port 9109",
        "delaylevel dispatch run orders --delivery effectively-once --memory 1024",
    )
)
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option(
    "--delivery",
    type=click.Choice([item.value for item in Delivery]),
    default=Delivery.AT_LEAST_ONCE.value,
    show_default=True,
    help="How often a message may arrive; effectively-once needs the broker's deduplication.",
)
@click.option(
    "--memory",
    type=click.IntRange(min=8),
    default=256,
    show_default=True,
    metavar="MIB",
    help="For payloads that are pending, of each level topic; beyond it they go to disk.",
)
@click.option(
    "--remember",
    type=click.IntRange(min=2),
    default=2_000_000,
    show_default=True,
    help="How many ids of each source to remember, to leave out copies.",
)
@click.option(
    "--checkpoint-interval",
    type=DURATION,
    default="1s",
    show_default=True,
    help="How often what is released is acknowledged.",
)
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="For what does not fit in memory; by default in your state folder.",
)
@click.option("--name", help="Of this dispatcher among others; by default host and process.")
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Serve figures for Prometheus at this port; 0 for any free one.",
)
@click.option(
    "--metrics-address",
    default="127.0.0.1",
    show_default=True,
    help="The address of the interface that figures are served at.",
)
@pass_connection
def run(
    connection: Connection,
    topics: tuple[str, ...],
    delivery: str,
    memory: int,
    remember: int,
    checkpoint_interval: timedelta,
    directory: Path | None,
    name: str | None,
    metrics_port: int | None,
    metrics_address: str,
) -> None:
    """Release what is due for the level topics of TOPIC...

    TOPIC is a business topic or a level topic with the final window "tracker". Run as many
    dispatchers as you like, on one machine or many: they share out the window's partitions, and
    take over from one that dies or stands still. The first SIGTERM or Ctrl-C ends this one after
    what is under way.
    """
    import pulsar

    from delaylevel.cluster.admin import Admin
    from delaylevel.dispatcher import Dispatcher, DispatchSettings

    require_reachable(connection)
    # Threads of one interpreter take turns: the one that publishes must not wait long for its.
    sys.setswitchinterval(0.001)
    settings = DispatchSettings(
        directory=directory or Path(platformdirs.user_state_dir("delaylevel")) / "dispatch",
        delivery=Delivery(delivery),
        checkpoint_ms=round(checkpoint_interval / timedelta(milliseconds=1)),
        memory_bytes=memory << 20,
        remember=remember + remember % 2,
        name=name,
    )
    with contextlib.ExitStack() as stack:
        # Asking for what others own fails most of the time; what matters is logged here.
        chosen = settings_of(click.get_current_context())
        if chosen.verbosity > 1:
            client = pulsar.Client(**chosen.client_kwargs(connection))
        else:
            client = pulsar.Client(**connection.client_kwargs(), logger=_clientlog.silent())
        stack.callback(client.close)
        admin = Admin.from_connection(connection)
        dispatcher = Dispatcher(client, admin, topics, settings)

        def stop(signum: int, frame: FrameType | None) -> None:
            dispatcher.stop()

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        if metrics_port is not None:
            from delaylevel.dispatcher.metrics import DispatchCollector
            from delaylevel.prometheus import serve

            port = stack.enter_context(
                serve(DispatchCollector(dispatcher), metrics_port, metrics_address)
            )
            note(f"Figures at http://{metrics_address}:{port}/metrics")
        for description in dispatcher.descriptions:
            note(
                f"Releasing from {description.window_topic} "
                f"({description.window_partitions} partitions)"
            )
        note("Ctrl-C ends it.")
        seen = _Seen()
        dispatcher.run(lambda: seen.show(dispatcher))
        note(f"{seen.released:,} messages released.")


class _Seen:
    """What was released so far, also from partitions that were given back since."""

    def __init__(self) -> None:
        self.released = 0
        self._last: dict[tuple[str, int], int] = {}

    def show(self, dispatcher: Dispatcher) -> None:
        """Say on a terminal, once a second, how it stands."""
        from delaylevel.dispatcher.stats import quantile_ms, total_lateness

        found = dispatcher.figures()
        before = self.released
        for key, figures in found.items():
            last = self._last.get(key, 0)
            self.released += figures.released - (last if figures.released >= last else 0)
        self._last = {key: figures.released for key, figures in found.items()}
        if not sys.stderr.isatty():
            return
        pending = sum(figures.pending for figures in found.values())
        held = sum(sum(figures.held.values()) for figures in found.values())
        dues = [f.next_due_ms for f in found.values() if f.next_due_ms is not None]
        p99 = quantile_ms(total_lateness(found.values()), 0.99)
        busy = sum(figures.state == "recovering" for figures in found.values())
        line = f"{len(found)} partitions"
        line += f" ({busy} recovering)" if busy else ""
        line += f" · {pending:,} pending · {self.released:,} released, {self.released - before:,}/s"
        line += f" · p99 {format_duration(p99)} late" if p99 is not None else ""
        line += f" · {held:,} held" if held else ""
        if dues:
            import time

            line += f" · next in {format_duration(max(0, min(dues) - time.time() * 1000))}"
        click.echo(f"\r\x1b[2K{line}", nl=False, err=True)


_STATUS = (
    Column("partition", "number"),
    Column("owner"),
    Column("address", wide=True),
    Column("backlog_entries", "number"),
    Column("oldest_publish_ms", "time", head="OLDEST"),
)


@dispatch.command(
    epilog=examples(
        "delaylevel dispatch status orders", "delaylevel dispatch status orders -o json"
    )
)
@click.argument("topic")
@output_option
@pass_connection
def status(connection: Connection, topic: str, output: str) -> None:
    """Show who owns each partition of TOPIC's window, and what waits there."""
    from delaylevel.cluster.admin import Admin
    from delaylevel.dispatcher.service import owners

    require_reachable(connection)
    admin = Admin.from_connection(connection)
    rows = [
        {
            "partition": each.partition,
            "owner": each.owner,
            "address": each.address,
            "backlog_entries": each.backlog_entries,
            "oldest_publish_ms": each.oldest_publish_ms,
        }
        for each in owners(admin, topic)
    ]
    emit(rows, _STATUS, output)
    alone = [str(row["partition"]) for row in rows if not row["owner"]]
    if alone:
        note(
            f"Nobody serves partition {', '.join(alone)}: start `delaylevel dispatch run {topic}`."
        )
