"""``delaylevel function``: the mover inside Pulsar, on its functions workers."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import click

from delaylevel.cluster.admin import Admin
from delaylevel.errors import InvalidInputError
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.topics import registry as topics

from .options import Settings, examples, output_option, pass_settings
from .output import Column, emit, emit_one, note

_DEPLOYED = (
    Column("function"),
    Column("updated"),
    Column("level_topic"),
    Column("parallelism", "number"),
    Column("inputs"),
)
_STATUS = (
    Column("function"),
    Column("level_topic"),
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
    Column("given_back", "number", wide=True),
    Column("late_ms", "duration"),
    Column("error", wide=True),
    Column("worker", wide=True),
)
_name_option = click.option(
    "--name", metavar="NAME", help="The function's name; by default the level topic's."
)


@click.group(
    epilog=examples(
        "delaylevel function deploy orders",
        "delaylevel function status orders",
        "delaylevel function delete orders",
    )
)
def function() -> None:
    """Move messages inside Pulsar, with a Function and no other cluster.

    For level topics that were made with `levels create --mover function`.
    """


@function.command(
    epilog=examples(
        "delaylevel function deploy orders",
        "delaylevel function deploy orders --parallelism 3 --cpu 0.5 --ram-mb 256",
        "delaylevel function deploy orders --worker-admin-url http://broker.internal:8080",
        "delaylevel function deploy orders --worker-python 3.11 "
        "--worker-platform manylinux2014_x86_64",
        "delaylevel function deploy orders --package-only ./build",
    )
)
@click.argument("topic")
@_name_option
@click.option(
    "--parallelism",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="How many instances.",
)
@click.option("--cpu", type=float, default=1.0, show_default=True, help="Cores for an instance.")
@click.option(
    "--ram-mb",
    type=click.IntRange(64),
    default=512,
    show_default=True,
    help="Memory for an instance.",
)
@click.option(
    "--receiver-queue",
    type=click.IntRange(1),
    default=500,
    show_default=True,
    help="How many messages are fetched ahead, for each partition.",
)
@click.option(
    "--in-flight",
    type=click.IntRange(1),
    default=2000,
    show_default=True,
    help="The most messages that are sent and not confirmed.",
)
@click.option(
    "--worker-admin-url",
    metavar="URL",
    help="The admin address as workers reach it, where it is another than here.",
)
@click.option(
    "--worker-token-file",
    metavar="PATH",
    help="The token of a role of the Function's own, a file on the workers; else it has theirs.",
)
@click.option(
    "--worker-trust-certs-file",
    metavar="PATH",
    help="Certificates to trust (PEM), a file on the workers.",
)
@click.option(
    "--worker-python",
    metavar="X.Y",
    help="The workers' Python, where it is another than here: wheels are downloaded for it.",
)
@click.option(
    "--worker-platform",
    metavar="TAG",
    help="The workers' platform, e.g. manylinux2014_x86_64; together with --worker-python.",
)
@click.option(
    "--package-only",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write the archive and its configuration there, print the pulsar-admin line, and end.",
)
@output_option
@pass_settings
def deploy(
    settings: Settings,
    topic: str,
    name: str | None,
    parallelism: int,
    cpu: float,
    ram_mb: int,
    receiver_queue: int,
    in_flight: int,
    worker_admin_url: str | None,
    worker_token_file: str | None,
    worker_trust_certs_file: str | None,
    worker_python: str | None,
    worker_platform: str | None,
    package_only: Path | None,
    output: str,
) -> None:
    """Put the Function of TOPIC on the functions workers, or replace the one that is there.

    TOPIC is a business topic or a level topic. The archive that workers install has wheels made
    from what is installed here; nothing is downloaded, unless --worker-python asks for another
    Python: then pip downloads them, here.
    """
    from delaylevel.functions import deployment
    from delaylevel.functions.archive import WorkerPython

    if (worker_python is None) != (worker_platform is None):
        raise InvalidInputError("--worker-python and --worker-platform belong together")
    options = deployment.FunctionOptions(
        name=name,
        parallelism=parallelism,
        cpu=cpu,
        ram_mb=ram_mb,
        receiver_queue=receiver_queue,
        in_flight=in_flight,
        admin_url=worker_admin_url,
        token_file=worker_token_file,
        tls_trust_certs_file=worker_trust_certs_file,
        worker_python=WorkerPython(worker_python, worker_platform)
        if worker_python and worker_platform
        else None,
    )
    connection = settings.connection()
    with Admin.from_connection(connection) as admin:
        described = topics.describe(admin, topic, search=True)
    if package_only is not None:
        click.echo(deployment.write_package(package_only, described, connection, options))
        return
    made = deployment.deploy(connection, described, options)
    view = {
        "function": made.function,
        "updated": made.updated,
        "level_topic": described.topic,
        "parallelism": parallelism,
        "inputs": list(made.config["inputSpecs"]),
        "config": made.config,
    }
    emit_one(view, _DEPLOYED, output)
    note(f"`delaylevel function status {topic}` says when it runs.")


@function.command(
    epilog=examples(
        "delaylevel function status orders",
        "delaylevel function status orders -o json",
    )
)
@click.argument("topic")
@_name_option
@output_option
@pass_settings
def status(settings: Settings, topic: str, name: str | None, output: str) -> None:
    """Say how the Function of TOPIC stands, what is wrong, and the remedy.

    The exit code is 1 where an instance is down.
    """
    from delaylevel.functions import deployment, health

    connection = settings.connection()
    with Admin.from_connection(connection) as admin:
        described = topics.describe(admin, topic, search=True)
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


@function.command(epilog=examples("delaylevel function restart orders"))
@click.argument("topic")
@_name_option
@pass_settings
def restart(settings: Settings, topic: str, name: str | None) -> None:
    """Start all instances of the Function of TOPIC anew; messages may arrive twice, none is lost.

    Needed after a standalone broker was started again: its functions stay down by themselves.
    """
    from delaylevel.functions import deployment

    connection, _, called = _find(settings, topic, name)
    deployment.restart(connection, called)
    note(f"{called} starts anew.")


@function.command(epilog=examples("delaylevel function delete orders"))
@click.argument("topic")
@_name_option
@pass_settings
def delete(settings: Settings, topic: str, name: str | None) -> None:
    """Remove the Function of TOPIC; what is parked stays, and the subscriptions that keep it."""
    from delaylevel.functions import deployment

    connection, described, called = _find(settings, topic, name)
    deployment.delete(connection, described, called)
    note(
        f"{called} is deleted. What is parked in {described.topic} stays, and waits for "
        f"`delaylevel function deploy {topic}`."
    )


@function.command(
    epilog=examples(
        "delaylevel function logs orders",
        "delaylevel function logs orders --lines 500",
        "delaylevel function logs orders --follow",
    )
)
@click.argument("topic")
@click.option(
    "--lines", type=click.IntRange(1), default=100, show_default=True, help="The last so many."
)
@click.option("--follow", is_flag=True, help="Go on until Ctrl-C.")
@pass_settings
def logs(settings: Settings, topic: str, lines: int, follow: bool) -> None:
    """Print what the instances of TOPIC's Function have logged.

    They write to a topic of their own, which the broker keeps for a while (by default until its
    ledger is rolled over, some hours at the most). What went wrong before an instance could start
    is in the worker's own output only.
    """
    from delaylevel.functions import deployment
    from delaylevel.producer.client import DelayLevelClient

    connection = settings.connection()
    with Admin.from_connection(connection) as admin:
        described = topics.describe(admin, topic, search=True)
        where = deployment.log_topic(described)
        client = DelayLevelClient(**settings.client_kwargs(connection))
        try:
            kept = list(deployment.log_lines(client, admin, where))
            for line in kept[-lines:]:
                click.echo(line)
            if not kept:
                note("Nothing is logged. An instance logs from the first message on that is ripe.")
            if follow:
                every = deployment.log_lines(client, admin, where, follow=True)
                with contextlib.suppress(KeyboardInterrupt):  # how it is meant to end
                    for line in itertools.islice(every, len(kept), None):
                        click.echo(line)
        finally:
            client.close()


def _find(
    settings: Settings, topic: str, name: str | None
) -> tuple[Any, LevelTopicDescription, str]:
    from delaylevel.functions import deployment

    connection = settings.connection()
    with Admin.from_connection(connection) as admin:
        described = topics.describe(admin, topic, search=True)
    return connection, described, deployment.function_name(described, name)
