"""``delaylevel dispatcher``: the service that releases due messages from the final window."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import platformdirs

from delaylevel.cli.views.live import LiveRegion, Starting, first_unmet, live_region
from delaylevel.cli.views.output import emit, note
from delaylevel.cli.views.tables import Column
from delaylevel.cluster import logs
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.threads import stop_on_signals
from delaylevel.model.formatting import shell

from . import options
from .command import examples, pass_connection, settings_of
from .service import refused_lines, serve_metrics, serving_lines

if TYPE_CHECKING:
    from delaylevel.dispatcher import Dispatcher, DispatchSettings

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
@options.dispatching
@options.metrics
@pass_connection
def run(
    connection: Connection,
    topics: tuple[str, ...],
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
    from delaylevel.cluster.rest.admin import Admin
    from delaylevel.dispatcher import Dispatcher
    from delaylevel.dispatcher.status import start_checks

    tune_interpreter()
    settings = dispatch_settings(**fields)
    with contextlib.ExitStack() as stack:
        # Attempts on partitions that others own fail all the time, and the client would log each
        # of them with -v. The dispatcher logs the events that matter.
        verbosity = settings_of(click.get_current_context()).verbosity
        logger = logs.for_verbosity(verbosity if verbosity > 1 else 0)
        open_client = partial(connection.open_service_client, logger=logger)
        client = stack.enter_context(contextlib.closing(open_client()))
        admin = stack.enter_context(Admin.from_connection(connection, for_service=True))
        service = Dispatcher(client, admin, topics, settings, target_client=open_client)

        stop_on_signals(service.stop)
        if metrics_port is not None:
            from delaylevel.dispatcher.status import DispatchCollector

            serve_metrics(stack, DispatchCollector(service), metrics_port, metrics_address)

        def waiting() -> str:
            return first_unmet(
                [check for group in service.groups() for check in start_checks(group)]
            )

        def serving() -> list[str]:
            served = serving_lines(service.descriptions, {}, service.groups())
            return [*served, *refused_lines(service.refused), "Ctrl-C ends it."]

        with live_region() as region:
            start = Starting(region, f"dispatcher for {', '.join(topics)}", waiting, serving)
            with start:
                service.run(_ReleaseLine(service, region, start).show)
        note(f"{service.released().total():,} messages released.")


def tune_interpreter() -> None:
    """Prepare the interpreter for a dispatcher."""
    # The publishing thread must not wait the default 5 ms for its turn in the interpreter.
    sys.setswitchinterval(0.001)
    # Messages are freed without the garbage collector, which would look at all of them, and at all
    # modules, many times a second.
    gc.freeze()
    gc.set_threshold(100_000)


def dispatch_settings(
    memory: int, remember: int, spill_dir: Path | None, **fields: Any
) -> DispatchSettings:
    """Return the settings of a dispatcher from the values of `options.dispatching`."""
    from delaylevel.dispatcher import DispatchSettings

    return DispatchSettings(
        directory=spill_dir or Path(platformdirs.user_state_dir("delaylevel")) / "dispatch",
        memory_bytes=memory << 20,
        remember=remember + remember % 2,
        **fields,
    )


class _ReleaseLine:
    """One line on a terminal, drawn once a second."""

    def __init__(self, service: Dispatcher, region: LiveRegion, start: Starting) -> None:
        self._service = service
        self._region = region
        self._start = start
        self._before = 0

    def show(self) -> None:
        """Draw the line."""
        from delaylevel.cli.views.service import released_line

        if not (self._region.live and self._start.over):
            return
        before, self._before = self._before, self._service.released().total()
        rate, now_ms = self._before - before, time.time_ns() // 1_000_000
        line = released_line(self._service.stats().values(), self._before, rate, now_ms)
        self._region.show(line)


@examples("delaylevel dispatcher status orders", "delaylevel dispatcher status orders -o json")
@dispatcher.command()
@click.argument("topic")
@options.output
@pass_connection
def status(connection: Connection, topic: str, output: str) -> None:
    """Show owner and backlog of each window partition."""
    from delaylevel.cluster.rest.admin import Admin
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
            f"`delaylevel dispatcher run {shell(topic)}`."
        )
