"""``delaylevel broker``: a real Pulsar broker on this machine, for first steps and tests."""

from __future__ import annotations

from typing import Any

import click

from delaylevel.broker.distribution import PULSAR_VERSION, fetch
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cli.views.output import emit_one, note
from delaylevel.cli.views.tables import Column
from delaylevel.cluster.connection.local_brokers import BrokerStatus
from delaylevel.errors import AlreadyRunningError

from . import options
from .options import Group, examples

_COLUMNS = (
    Column("state"),
    Column("version"),
    Column("service_url"),
    Column("admin_url"),
    Column("functions", rank=3),
    Column("started_ms", "time", rank=2),
    Column("pid", head="PID", rank=1),
    Column("log_file", rank=4),
)


def view(status: BrokerStatus) -> dict[str, Any]:
    """Return a broker as one row."""
    names = ("version", "service_url", "admin_url", "functions", "started_ms", "pid")
    return {
        "state": "running" if status.running else "stopped",
        **{name: getattr(status, name) if status.running else None for name in names},
        "directory": str(status.directory),
        "log_file": str(EmbeddedBroker(status.directory).log_file),
    }


@click.group(cls=Group)
def broker() -> None:
    """Run a private Pulsar broker, without Docker.

    It listens on free loopback ports and keeps its data in your state folder. The other commands
    use it while no other cluster is configured.
    """


@examples(
    "delaylevel broker start",
    "delaylevel broker start --functions",
    f"delaylevel broker start --version {PULSAR_VERSION}",
)
@broker.command()
@click.option("--functions", is_flag=True, help="Start with a functions worker.")
@click.option(
    "--version",
    metavar="VERSION",
    help=f"Version of the server; by default that of the last start, or {PULSAR_VERSION}.",
)
@options.output
def start(output: str, **choices: Any) -> None:
    """Start the broker. The first start of a version downloads that server.

    A broker that is already running is left as it is; a start with other settings is refused.
    """
    instance = EmbeddedBroker(report=note, **choices)
    try:
        status = instance.start()  # after one that goes on in another process
    except AlreadyRunningError:
        status = instance.status()
        if any(value and value != getattr(status, name) for name, value in choices.items()):
            raise
        note("The broker runs already.")
    emit_one(view(status), _COLUMNS, output)


@examples("delaylevel broker status", "delaylevel broker status -o json")
@broker.command()
@options.output
@click.pass_context
def status(ctx: click.Context, output: str) -> None:
    """Show the broker and its addresses. The exit code is 3 if it does not run."""
    found = EmbeddedBroker().status()
    emit_one(view(found), _COLUMNS, output)
    if not found.running:
        note("Start it with `delaylevel broker start`.")
        ctx.exit(3)


@examples("delaylevel broker stop", "delaylevel broker stop --delete-data")
@broker.command()
@click.option("--delete-data", is_flag=True, help="Delete its topics, settings and logs.")
def stop(delete_data: bool) -> None:
    """Stop the broker. Its data stays for the next start."""
    instance = EmbeddedBroker()
    note(f"The broker {'is stopped' if instance.stop() else 'does not run'}.")
    if delete_data:
        instance.remove()
        note(f"{instance.directory} is deleted.")


@examples("delaylevel broker fetch")
@broker.command("fetch")
def fetch_command() -> None:
    """Download the server with Maven, and print its folder. A later start then needs no network."""
    click.echo(str(fetch(note)))
