"""``delaylevel broker``: a real Pulsar broker on this machine, for first steps and tests."""

from __future__ import annotations

from typing import Any

import click

from delaylevel.broker.distribution import PULSAR_VERSION, fetch
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cli.views.output import emit, emit_one, note
from delaylevel.cli.views.tables import Column
from delaylevel.cluster.connection.local_brokers import BrokerStatus, instances
from delaylevel.errors import AlreadyRunningError

from . import options
from .options import Group, examples

_COLUMNS = (
    Column("name"),
    Column("state"),
    Column("version"),
    Column("service_url"),
    Column("admin_url"),
    Column("functions", rank=3),
    Column("started_ms", "time", rank=2),
    Column("pid", head="PID", rank=1),
    Column("log_file", rank=4),
)

name_option = click.option(
    "--name", default="default", metavar="NAME", help="Name of the instance."
)


def view(status: BrokerStatus) -> dict[str, Any]:
    """Return an instance as one row."""
    values = vars(status) | {
        "state": "running" if status.running else "stopped",
        "started_ms": status.started_ms if status.running else None,
        "directory": str(status.directory),
        "log_file": str(EmbeddedBroker(status.name).log_file),
    }
    return {name: value for name, value in values.items() if name != "running"}


@click.group(cls=Group)
def broker() -> None:
    """Run a private Pulsar broker, without Docker.

    It listens on free loopback ports and keeps its data in your state folder. The other commands
    use it while no other cluster is configured.
    """


@examples(
    "delaylevel broker start",
    "delaylevel broker start --functions --name second",
    "delaylevel broker start --broker-conf brokerDeduplicationEnabled=true",
    f"delaylevel broker start --name other --version {PULSAR_VERSION}",
)
@broker.command()
@name_option
@click.option(
    "--functions/--no-functions",
    default=None,
    help="Start with or without a functions worker; by default as at the last start.",
)
@options.pairs(
    "--broker-conf",
    "conf",
    help="Setting of standalone.conf or functions_worker.yml; by default those of the last start. "
    "Repeatable.",
)
@click.option(
    "--heap-mb",
    type=click.IntRange(min=128),
    metavar="MIB",
    help="Size of the Java heap; 400 at the first start.",
)
@click.option(
    "--version",
    metavar="VERSION",
    help=f"Version of the server; by default that of the last start, or {PULSAR_VERSION}.",
)
@options.output
def start(name: str, conf: dict[str, str], output: str, **choices: Any) -> None:
    """Start an instance. The first start of a version downloads that server.

    An instance that is already running is left as it is; a start with other settings is refused. So
    is a server that is older than the one that wrote the data of the instance.
    """
    settings = {key.strip(): value.strip() for key, value in conf.items()} or None
    instance = EmbeddedBroker(name, conf=settings, report=note, **choices)
    try:
        if not instance.status().running:
            note(f"Starting the broker {name!r}.")
        status = instance.start()
    except AlreadyRunningError:
        status = instance.status()
        same = {"functions": status.functions, "version": status.version}
        others = [name for name, value in choices.items() if value not in (None, same.get(name))]
        if settings is not None or others:
            raise
        note(f"The broker {name!r} runs already.")
    emit_one(view(status), _COLUMNS, output)


@examples("delaylevel broker status", "delaylevel broker status --name default -o json")
@broker.command()
@click.option("--name", metavar="NAME", help="Name of the instance.")
@options.output
@click.pass_context
def status(ctx: click.Context, name: str | None, output: str) -> None:
    """Show your instances and their addresses.

    With --name, the exit code is 3 if that instance does not run.
    """
    if name is None:
        empty = "There is no broker yet: run `delaylevel broker start`."
        emit(map(view, instances()), _COLUMNS, output, empty=empty)
        return
    one = EmbeddedBroker(name).status()
    emit_one(view(one), _COLUMNS, output)
    if not one.running:
        ctx.exit(3)


@examples("delaylevel broker stop", "delaylevel broker stop --name second --delete-data")
@broker.command()
@name_option
@click.option("--delete-data", is_flag=True, help="Delete its topics, settings and logs.")
def stop(name: str, delete_data: bool) -> None:
    """Stop an instance. Its data stays for the next start."""
    instance = EmbeddedBroker(name)
    note(f"The broker {name!r} {'is stopped' if instance.stop() else 'does not run'}.")
    if delete_data:
        instance.remove()
        note(f"{instance.directory} is deleted.")


@examples("delaylevel broker fetch", f"delaylevel broker fetch --version {PULSAR_VERSION}")
@broker.command("fetch")
@click.option("--version", default=PULSAR_VERSION, metavar="VERSION", help="Version of the server.")
def fetch_command(version: str) -> None:
    """Download a server with Maven, and print its folder.

    A later start then needs no network. Servers of several versions are kept side by side; delete
    the folder of one that you no longer need.
    """
    click.echo(str(fetch(note, version)))
