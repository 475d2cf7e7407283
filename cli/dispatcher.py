"""``delaylevel dispatcher``: the service that releases due messages from the final window."""

from __future__ import annotations

from typing import Any

import click

from delaylevel.cli.views.output import emit, note
from delaylevel.cli.views.tables import Column
from delaylevel.cluster.connection.settings import Connection
from delaylevel.model.formatting import shell

from . import options
from .command import examples, pass_connection
from .run import dispatch_settings, serve

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
    processes: int,
    **fields: Any,
) -> None:
    """Run a dispatcher for level topics.

    TOPIC is a business topic or a level topic with the final window "tracker". Any number of
    dispatchers may run, on one machine or many: they share the window's partitions, and take over
    those of a dispatcher that dies or hangs. Spill files are in your state folder unless
    --spill-dir names another. SIGTERM or Ctrl-C ends it when the current batches are published.
    """
    metrics = (metrics_port, metrics_address)
    serve(connection, topics, dispatch_settings(**fields), metrics, processes, moves=False)


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
