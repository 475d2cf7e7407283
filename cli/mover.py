"""``delaylevel mover``: the Spark job, and the Function inside Pulsar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import platformdirs

from delaylevel.cli.views.output import emit, emit_one, note
from delaylevel.cli.views.tables import Column
from delaylevel.cluster.threads import stop_on_signals
from delaylevel.model.clock import SystemClock
from delaylevel.model.formatting import format_duration, shell

from . import options
from .options import Group, Settings, examples, pass_settings
from .run import http_note, serving_lines, starting

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
    Column("problems"),
)
_INSTANCES = (
    Column("instance", "number"),
    Column("running"),
    Column("restarts", "number"),
    Column("error"),
    Column("worker"),
)


@click.group(cls=Group)
def mover() -> None:
    """Hand off near-due messages from level topics.

    They go to a finer level, the final window or their business topic. `run` starts the Spark job;
    `delaylevel run` contains a mover without Spark. `deploy`, `status` and `delete` manage the
    Function, a mover inside Pulsar, for level topics made with `levels create --mover function`.
    """


@options.topic_command(
    mover,
    "delaylevel mover deploy orders",
    "delaylevel mover deploy orders --parallelism 3 --cpu 0.5 --ram-mb 256",
    "delaylevel mover deploy orders --worker-admin-url http://broker:8080",
)
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
def deploy(settings: Settings, topic: str, output: str, **fields: Any) -> None:
    """Deploy or update the Function of TOPIC.

    The workers' Python needs `delaylevel[functions]`.

    TOPIC is a business topic or a level topic that was made with `levels create --mover function`.
    The archive for the workers has the packages that are installed here. They must fit the workers'
    Python: run this with the same minor version, on the same kind of machine.
    """
    from delaylevel.functions import deployment

    wanted = deployment.FunctionOptions(**fields)
    with settings.level_topic(topic) as (_, described):
        made = deployment.deploy(settings.connection, described, wanted)
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


@options.topic_command(
    mover, "delaylevel mover status orders", "delaylevel mover status orders -o json"
)
def status(settings: Settings, topic: str, output: str) -> None:
    """Show the state of the Function of TOPIC.

    This includes its instances, problems and remedies. The exit code is 1 if an instance is down.
    """
    from delaylevel.functions import deployment, health

    with settings.level_topic(topic) as (admin, described):
        at = health.status(settings.connection, admin, described, SystemClock().now_ms())
    rows = [
        {
            "instance": item.number,
            "running": item.running,
            "restarts": item.restarts,
            "error": item.error or None,
            "worker": item.worker or None,
        }
        for item in at.instances
    ]
    view = {
        "function": deployment.function_name(described),
        "level_topic": described.topic,
        "running": f"{at.running} of {len(at.instances)}",
        "problems": list(at.problems),
    }
    emit_one({**view, "instances": rows}, _STATUS, output)
    if output == "table":
        click.echo()
        emit(rows, _INSTANCES, output)
    if at.running < len(at.instances):
        click.get_current_context().exit(1)


@options.topic_command(mover, "delaylevel mover delete orders", prints=False)
def delete(settings: Settings, topic: str) -> None:
    """Delete the Function of TOPIC. Parked messages and their subscriptions stay."""
    from delaylevel.functions import deployment

    with settings.level_topic(topic) as (_, described):
        called = deployment.delete(settings.connection, described)
    note(
        f"{called} is deleted. The backlog of {described.topic} stays, and waits for "
        f"`delaylevel mover deploy {shell(topic)}`."
    )


@examples(
    "delaylevel mover run orders",
    "delaylevel mover run orders invoices --checkpoint /var/lib/delaylevel",
    "delaylevel mover run orders --once   # from cron",
    "delaylevel mover run orders --steps billing.steps:without_closed_accounts",
    "delaylevel mover run orders --master spark://m:7077 --checkpoint hdfs:///dl",
)
@mover.command()
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option(
    "--once", is_flag=True, help="End when everything that is ready is moved, e.g. from cron."
)
@click.option(
    "--checkpoint",
    metavar="FOLDER",
    help="Folder of the query's checkpoint; by default in your state folder.",
)
@options.trigger
@click.option("--master", default="local[2]", metavar="URL", help="Master of Spark.")
@options.pairs("--conf", "spark_conf", help="Configuration property of Spark. Repeatable.")
@options.pairs("--option", "options", help="Option of the streaming source. Repeatable.")
@click.option(
    "--steps",
    metavar="MODULE:FUNCTION",
    help="Function that transforms the DataFrame between source and sink.",
)
@options.metrics
@pass_settings
def run(
    program: Settings,
    topics: tuple[str, ...],
    checkpoint: str | None,
    steps: str | None,
    **fields: Any,
) -> None:
    """Run the Spark job, the mover of level topics.

    TOPIC is a business topic or a level topic. A level topic has one mover at a time: a second job
    reports the name of the first and exits. `delaylevel run` contains a mover without Spark.

    The first SIGTERM or Ctrl-C ends the job after the current batch is committed and acknowledged.
    The second ends it at once, and the next run repeats that batch.

    With the --master of a cluster, this program is Spark's driver. The executors need the Python
    packages, and receive a token from the environment only within Spark's tasks.
    """
    from delaylevel.spark_sync import SparkSyncJob, SyncSettings, default_checkpoint
    from delaylevel.spark_sync.steps import dropped, load_steps

    state = Path(platformdirs.user_state_dir("delaylevel"))
    settings = SyncSettings(
        level_topics=topics,
        checkpoint=checkpoint or default_checkpoint(state, program.connection, topics),
        **fields,
    )
    own_steps = None if steps is None else load_steps(steps)
    job = SparkSyncJob(program.reachable(), settings, steps=own_steps)
    signals = 0

    def stop() -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            note("Stopping after the current batch. The same signal again stops at once.")
            job.stop()
        else:
            note("Stopping at once.")
            job.stop_at_once()

    stop_on_signals(stop)

    def serving() -> list[str]:
        return [
            *serving_lines(job.descriptions, job.refused, "Start the job again then."),
            *(() if job.http_address is None else (http_note(*job.http_address),)),
            f"A batch starts every {format_duration(job.trigger_ms)}. Ctrl-C ends it.",
        ]

    moved = left_out = 0

    def show(progress: Any) -> None:
        nonlocal moved, left_out
        left_out += dropped(progress)
        moved += progress.numInputRows - dropped(progress)

    with starting(
        f"Spark job as mover for {', '.join(topics)}",
        lambda: "" if job.ready.is_set() else "Spark starts Java, Python workers and the query",
        list if settings.once else serving,
    ):
        job.run(show)
    if moved or left_out:
        dropped_by_steps = f" {left_out:,} dropped by the steps." if left_out else ""
        note(f"{moved:,} messages moved.{dropped_by_steps}")
    else:
        note("Nothing was ready: no message moved.")
    if signals > 1:
        note("The last batch is not finished; the next run repeats it.")
        click.get_current_context().exit(1)
