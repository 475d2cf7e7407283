"""``delaylevel mover deploy|status|logs|restart|delete``: the Function, a mover inside Pulsar."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import click

from delaylevel.errors import InvalidInputError
from delaylevel.model.clock import SystemClock
from delaylevel.model.formatting import shell

from . import options
from .command import Settings, examples, pass_settings
from .output import Column, emit, emit_one, note

_DEPLOYED = (
    Column("function"),
    Column("updated"),
    Column("level_topic", "topic"),
    Column("parallelism", "number"),
    Column("inputs", "topic"),
)
_STATUS = (
    Column("function"),
    Column("level_topic", "topic"),
    Column("running"),
    Column("backlog_entries", "number", head="BACKLOG"),
    Column("next_hand_off_ms", "time"),
    Column("behind_ms", "duration"),
    Column("held_entries", "number", head="HELD"),
    Column("dead_letter_entries", "number", head="DEAD LETTERS"),
    Column("problems"),
)
_INSTANCES = (
    Column("instance", "number"),
    Column("running"),
    Column("restarts", "number"),
    Column("forwarded", "number"),
    Column("parked_again", "number"),
    Column("held", "number"),
    Column("dead_lettered", "number"),
    Column("expired", "number", wide=True),
    Column("given_back", "number", wide=True),
    Column("late_ms", "duration"),
    Column("error", wide=True),
    Column("worker", wide=True),
)
_name_option = click.option(
    "--function-name",
    "name",
    metavar="NAME",
    help="Name of the Function; by default that of the level topic.",
)


@examples(
    "delaylevel mover deploy orders",
    "delaylevel mover deploy orders --parallelism 3 --cpu 0.5 --ram-mb 256",
    "delaylevel mover deploy orders --worker-admin-url http://broker.internal:8080",
    "delaylevel mover deploy orders --worker-python 3.11 --worker-platform manylinux2014_x86_64",
    "delaylevel mover deploy orders --package-only ./build",
)
@click.command()
@click.argument("topic")
@_name_option
@click.option("--parallelism", type=click.IntRange(1), default=1, help="Number of instances.")
@click.option("--cpu", type=float, default=1.0, help="CPU cores of an instance.")
@click.option(
    "--ram-mb",
    type=click.IntRange(64),
    default=512,
    metavar="MIB",
    help="Memory of an instance.",
)
@click.option(
    "--receiver-queue",
    type=click.IntRange(1),
    default=500,
    help="Number of messages to fetch ahead for each partition.",
)
@click.option(
    "--in-flight",
    type=click.IntRange(1),
    default=2000,
    help="Largest number of messages that are sent and not yet confirmed.",
)
@click.option(
    "--worker-admin-url",
    "admin_url",
    metavar="URL",
    help="Admin URL for the workers, if it differs from the one that this machine uses.",
)
@click.option(
    "--worker-token-file",
    "token_file",
    metavar="PATH",
    help="File on the workers with a token for the Function; by default it uses their token.",
)
@click.option(
    "--worker-trust-certs-file",
    "tls_trust_certs_file",
    metavar="PATH",
    help="File on the workers with trusted certificates (PEM).",
)
@click.option(
    "--worker-python",
    metavar="X.Y",
    help="Python version of the workers, if it differs from this one; pip downloads its wheels.",
)
@click.option(
    "--worker-platform",
    metavar="TAG",
    help="Platform of the workers, e.g. manylinux2014_x86_64; goes with --worker-python.",
)
@click.option(
    "--package-only",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Folder for the archive and its configuration; prints the pulsar-admin command and ends.",
)
@options.output
@pass_settings
def deploy(
    settings: Settings,
    topic: str,
    worker_python: str | None,
    worker_platform: str | None,
    package_only: Path | None,
    output: str,
    **fields: Any,
) -> None:
    """Deploy or update the Function of TOPIC.

    TOPIC is a business topic or a level topic that was made with `levels create --mover function`.
    The archive for the workers has wheels of the packages installed here. Only --worker-python
    downloads anything: pip fetches wheels for that Python to this machine.
    """
    from delaylevel.functions import deployment
    from delaylevel.functions.archive import WorkerPython

    if (worker_python is None) != (worker_platform is None):
        raise InvalidInputError(
            "--worker-python and --worker-platform belong together: give both or neither"
        )
    if worker_python and worker_platform:
        fields["worker_python"] = WorkerPython(worker_python, worker_platform)
    wanted = deployment.FunctionOptions(**fields)
    with settings.level_topic(topic) as (connection, _, described):
        if package_only is not None:
            click.echo(deployment.write_package(package_only, described, connection, wanted))
            return
        made = deployment.deploy(connection, described, wanted)
    view = {
        "function": made.function,
        "updated": made.updated,
        "level_topic": described.topic,
        "parallelism": wanted.parallelism,
        "inputs": list(made.config["inputSpecs"]),
        "config": made.config,
    }
    emit_one(view, _DEPLOYED, output)
    note(f"`delaylevel mover status {shell(topic)}` shows when it runs.")


@examples(
    "delaylevel mover status orders",
    "delaylevel mover status orders -o json",
)
@click.command()
@click.argument("topic")
@_name_option
@options.output
@pass_settings
def status(settings: Settings, topic: str, name: str | None, output: str) -> None:
    """Show the state of the Function of TOPIC.

    This includes its instances, problems and remedies. The exit code is 1 if an instance is down.
    """
    from delaylevel.functions import deployment, health

    with settings.level_topic(topic) as (connection, admin, described):
        called = deployment.function_name(described, name)
        at = health.status(connection, admin, described, called, SystemClock().now_ms())
    rows = [
        {
            "instance": item.number,
            "running": item.running,
            "restarts": item.restarts,
            **item.counts,
            "late_ms": item.late_ms,
            "error": item.error or None,
            "worker": item.worker or None,
        }
        for item in at.instances
    ]
    view = {
        "function": at.function,
        "level_topic": described.topic,
        "running": f"{at.running} of {len(at.instances)}",
        "backlog_entries": at.level.backlog_entries,
        "next_hand_off_ms": at.level.next_hand_off_ms,
        "behind_ms": at.level.behind_ms or None,
        "held_entries": at.level.held_entries,
        "dead_letter_entries": at.level.dead_letter_entries,
        "problems": list(at.problems),
    }
    if output in ("json", "jsonl"):
        emit_one({**view, "instances": rows}, _STATUS, output)
    else:
        emit_one({**view, "problems": len(at.problems) or "none"}, _STATUS, output)
        click.echo()
        emit(rows, _INSTANCES, output)
        for line in at.problems:
            note(f"Problem: {line}.")
    if at.running < len(at.instances):
        click.get_current_context().exit(1)


@examples("delaylevel mover restart orders")
@click.command()
@click.argument("topic")
@_name_option
@pass_settings
def restart(settings: Settings, topic: str, name: str | None) -> None:
    """Restart all instances of the Function of TOPIC.

    Messages may be duplicated, but none is lost. Use it after a restart of a standalone broker,
    which does not start its functions again.
    """
    from delaylevel.functions import deployment

    with settings.level_topic(topic) as (connection, _, described):
        called = deployment.function_name(described, name)
        deployment.restart(connection, called)
    note(f"{called} is restarting.")


@examples("delaylevel mover delete orders")
@click.command()
@click.argument("topic")
@_name_option
@pass_settings
def delete(settings: Settings, topic: str, name: str | None) -> None:
    """Delete the Function of TOPIC. Parked messages and their subscriptions stay."""
    from delaylevel.functions import deployment

    with settings.level_topic(topic) as (connection, _, described):
        called = deployment.function_name(described, name)
        deployment.delete(connection, described, called)
    note(
        f"{called} is deleted. The backlog of {described.topic} stays, and waits for "
        f"`delaylevel mover deploy {shell(topic)}`."
    )


@examples(
    "delaylevel mover logs orders",
    "delaylevel mover logs orders --lines 500",
    "delaylevel mover logs orders --follow",
)
@click.command()
@click.argument("topic")
@options.log
@pass_settings
def logs(settings: Settings, topic: str, lines: int, follow: bool) -> None:
    """Print the log of the Function of TOPIC.

    Its instances log to a topic, which the broker keeps for a while: by default until its ledger
    rolls over, within a few hours. Failures before an instance starts are only in the worker's own
    log.
    """
    from delaylevel.functions import deployment

    with (
        settings.level_topic(topic) as (connection, admin, described),
        settings.client(connection) as client,
    ):
        log = deployment.log_topic(described)
        kept = list(deployment.log_lines(client, admin, log))
        for line in kept[-lines:] if lines else ():
            click.echo(line)
        if not kept:
            note("The log is empty. An instance starts to log at its first ready message.")
        if follow:
            every = deployment.log_lines(client, admin, log, follow=True)
            with contextlib.suppress(KeyboardInterrupt):  # the normal end
                for line in itertools.islice(every, len(kept), None):
                    click.echo(line)


COMMANDS = (deploy, status, logs, restart, delete)
