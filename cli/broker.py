"""``delaylevel broker``: a real Pulsar broker on this machine, for tests and first steps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from delaylevel.broker.embedded import BrokerStatus, EmbeddedBroker, fetch, instances
from delaylevel.errors import AlreadyRunningError

from .options import examples, output_option
from .output import Column, emit, emit_one, note

_COLUMNS = (
    Column("name"),
    Column("state"),
    Column("service_url"),
    Column("admin_url"),
    Column("functions"),
    Column("started_ms", "time"),
    Column("pid", head="PID"),
    Column("directory", wide=True),
)
_EXIT_NOT_REACHED = 3
_FOLLOW_SECONDS = 0.3

name_option = click.option(
    "--name", default="default", show_default=True, help="Which of this user's instances."
)


def view(status: BrokerStatus) -> dict[str, Any]:
    """An instance as it is printed."""
    return {
        "name": status.name,
        "state": "running" if status.running else "stopped",
        "service_url": status.service_url,
        "admin_url": status.admin_url,
        "functions": status.functions,
        "started_ms": status.started_ms if status.running else None,
        "pid": status.pid,
        "directory": str(status.directory),
    }


def _settings(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, str] | None:
    settings = {}
    for value in values:
        name, separator, text = value.partition("=")
        if not separator or not name.strip():
            raise click.BadParameter(f"{value!r} is not KEY=VALUE", ctx, param)
        settings[name.strip()] = text.strip()
    return settings or None


@click.group(
    epilog=examples(
        "delaylevel broker start",
        "delaylevel broker status -o json",
        "delaylevel broker logs --follow",
        "delaylevel broker stop",
    )
)
def broker() -> None:
    """Run a real Pulsar broker of your own, without Docker.

    It listens on free loopback ports and keeps its data in your state directory. The other
    commands find it by themselves while no other cluster is configured.
    """


@broker.command(
    epilog=examples(
        "delaylevel broker start",
        "delaylevel broker start --functions --name second",
        "delaylevel broker start --conf brokerDeduplicationEnabled=true",
    )
)
@name_option
@click.option(
    "--functions/--no-functions",
    default=None,
    help="With the functions worker; without either, as at the last start.",
)
@click.option(
    "--conf",
    metavar="KEY=VALUE",
    multiple=True,
    callback=_settings,
    help="A setting of standalone.conf, or else of functions_worker.yml; those of the last start "
    "are kept unless one is given.",
)
@click.option(
    "--heap-mb", type=click.IntRange(min=128), help="The largest Java heap, 400 at first."
)
@output_option
def start(
    name: str,
    functions: bool | None,
    conf: dict[str, str] | None,
    heap_mb: int | None,
    output: str,
) -> None:
    """Start an instance, and fetch the server before if need be.

    Starting what runs already only says so, unless it would have to change for it.
    """
    instance = EmbeddedBroker(name, functions=functions, conf=conf, heap_mb=heap_mb, report=note)
    try:
        status = instance.start()
    except AlreadyRunningError:
        status = instance.status()
        changes = conf is not None or heap_mb is not None
        if changes or functions not in (None, status.functions):
            raise
        note(f"The broker {name!r} runs already.")
    emit_one(view(status), _COLUMNS, output)


@broker.command(
    epilog=examples("delaylevel broker status", "delaylevel broker status --name default -o json")
)
@click.option("--name", help="Only this instance; the exit code is 3 when it does not run.")
@output_option
@click.pass_context
def status(ctx: click.Context, name: str | None, output: str) -> None:
    """Show this user's instances and their addresses."""
    if name is None:
        found = [view(status) for status in instances()]
        emit(found, _COLUMNS, output, empty="There is no broker yet: `delaylevel broker start`.")
        return
    one = EmbeddedBroker(name).status()
    emit_one(view(one), _COLUMNS, output)
    if not one.running:
        ctx.exit(_EXIT_NOT_REACHED)


@broker.command(
    epilog=examples("delaylevel broker stop", "delaylevel broker stop --name second --delete-data")
)
@name_option
@click.option("--delete-data", is_flag=True, help="Delete its topics, settings and logs, too.")
def stop(name: str, delete_data: bool) -> None:
    """Stop an instance; its data stays for the next start."""
    instance = EmbeddedBroker(name)
    note(f"The broker {name!r} {'is stopped' if instance.stop() else 'does not run'}.")
    if delete_data:
        instance.remove()
        note(f"{instance.directory} is deleted.")


@broker.command(epilog=examples("delaylevel broker logs -n 20", "delaylevel broker logs --follow"))
@name_option
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=100, show_default=True, help="How many."
)
@click.option("-f", "--follow", is_flag=True, help="Go on until Ctrl-C or the broker ends.")
def logs(name: str, lines: int, follow: bool) -> None:
    """Print what an instance logged since its last start."""
    instance = EmbeddedBroker(name)
    if not instance.log_file.exists():
        note(f"The broker {name!r} has not logged anything.")
        return
    # Where following begins is taken before the last lines are read: nothing is missed.
    position = instance.log_file.stat().st_size
    text = instance.logs(lines)
    if text:
        click.echo(text)
    if follow:
        try:
            _follow(instance, position)
        except KeyboardInterrupt:
            return


def _follow(instance: EmbeddedBroker, position: int) -> None:
    path: Path = instance.log_file
    with path.open("r", encoding="utf-8", errors="replace") as stream:
        stream.seek(position)
        while True:
            running = instance.status().running
            text = stream.read()
            if text:
                click.echo(text, nl=False)
            elif not running:
                return
            else:
                time.sleep(_FOLLOW_SECONDS)


@broker.command("fetch", epilog=examples("delaylevel broker fetch"))
def fetch_command() -> None:
    """Fetch the server with Maven, so that a later start needs no network."""
    click.echo(str(fetch(note)))
