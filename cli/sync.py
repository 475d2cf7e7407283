"""``delaylevel sync``: the movers that this machine runs."""

from __future__ import annotations

import signal
import sys
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
import platformdirs

from delaylevel.cluster.connection import Connection
from delaylevel.model.delivery import Delivery
from delaylevel.model.formatting import format_duration

from .options import DURATION, Settings, examples, pass_settings, require_reachable
from .output import note

if TYPE_CHECKING:
    from delaylevel.spark_sync import SyncSettings

_CONNECTION_FLAGS = (
    "service_url",
    "admin_url",
    "token_file",
    "tls_trust_certs_file",
    "tls_certificate_file",
    "tls_private_key_file",
)


@click.group(
    epilog=examples(
        "delaylevel sync spark orders",
        "delaylevel sync spark orders invoices --once",
    )
)
def sync() -> None:
    """Move what has become near-due from level topics towards the business topics."""


@sync.command(
    epilog=examples(
        "delaylevel sync spark orders",
        "delaylevel sync spark orders invoices --checkpoint /var/lib/delaylevel/checkpoint",
        "delaylevel sync spark orders --once   # from cron",
        "delaylevel sync spark orders --metrics-port 9108",
        "delaylevel sync spark orders --steps billing.steps:without_closed_accounts",
        "delaylevel sync spark orders --master spark://spark.example:7077 "
        "--checkpoint hdfs:///delaylevel/orders",
        "delaylevel sync spark orders --master spark://spark.example:7077 --print-command",
    )
)
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option("--once", is_flag=True, help="Move what is ripe now, and end (for cron).")
@click.option("--checkpoint", help="The query's checkpoint; by default in your state folder.")
@click.option("--trigger", type=DURATION, help="How often to look; by default by the lead.")
@click.option("--master", default="local[2]", show_default=True, help="Spark's master.")
@click.option(
    "--delivery",
    type=click.Choice([item.value for item in Delivery]),
    default=Delivery.AT_LEAST_ONCE.value,
    show_default=True,
    help="How often a message may arrive; effectively-once needs the broker's deduplication.",
)
@click.option("--conf", multiple=True, metavar="KEY=VALUE", help="A Spark setting. Repeatable.")
@click.option("--option", "options", multiple=True, metavar="K=V", help="A source option.")
@click.option(
    "--steps",
    metavar="MODULE:FUNCTION",
    help="DataFrame steps of your own between source and sink: a function of one DataFrame.",
)
@click.option(
    "--ship/--no-ship",
    default=True,
    help="Send the packages to the cluster's executors (default), or rely on what they have.",
)
@click.option(
    "--package",
    "packages",
    multiple=True,
    metavar="NAME",
    help="Send this installed package, too. Repeatable.",
)
@click.option(
    "--executor-python",
    metavar="NAME|PATH",
    help="The executors' Python; by default this one's pythonX.Y, from their PATH.",
)
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
@click.option(
    "--print-command",
    is_flag=True,
    help="Print the spark-submit command that runs the same job, and end.",
)
@pass_settings
def spark(
    program: Settings,
    topics: tuple[str, ...],
    once: bool,
    checkpoint: str | None,
    trigger: timedelta | None,
    master: str,
    delivery: str,
    conf: tuple[str, ...],
    options: tuple[str, ...],
    steps: str | None,
    ship: bool,
    packages: tuple[str, ...],
    executor_python: str | None,
    metrics_port: int | None,
    metrics_address: str,
    print_command: bool,
) -> None:
    """Run the Spark sync job for the level topics of TOPIC...

    TOPIC is a business topic or a level topic. One job at a time serves a level topic: a second
    one says who is at work, and ends.

    SIGTERM and Ctrl-C end the job after the batch that runs, which is committed and acknowledged;
    given once more, at once, and the next run does that batch again.

    With a --master of a cluster this program is Spark's driver. Executors get the Python packages
    from it; a token from the environment goes to them inside Spark's tasks only.
    """
    from delaylevel.spark_sync import Executors, SparkSyncJob, SyncSettings, default_checkpoint
    from delaylevel.spark_sync.steps import dropped, load_steps

    connection = program.connection()
    names = tuple(topics)
    state = Path(platformdirs.user_state_dir("delaylevel"))
    settings = SyncSettings(
        level_topics=names,
        checkpoint=checkpoint or default_checkpoint(state, connection, names),
        once=once,
        trigger_ms=None if trigger is None else round(trigger / timedelta(milliseconds=1)),
        master=master,
        delivery=Delivery(delivery),
        options=_pairs(options, "--option"),
        spark_conf=_pairs(conf, "--conf"),
        executors=Executors(ship=ship, packages=packages, python=executor_python),
        metrics_port=metrics_port,
        metrics_address=metrics_address,
    )
    if print_command:
        _print_command(connection, settings, steps)
        return
    own_steps = None if steps is None else load_steps(steps)
    require_reachable(connection)
    job = SparkSyncJob(connection, settings, steps=own_steps)
    asked = 0

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            note("Stopping after the batch that runs now. Once more stops at once.")
            job.stop()
        else:
            note("Stopping at once.")
            job.stop_at_once()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    for description in job.descriptions:
        note(f"Moving {description.topic} ({description.levels})")
    if not once:
        note(f"Looking every {format_duration(job.trigger_ms)}. Ctrl-C ends it.")
    moved = left_out = 0

    def show(progress: Any) -> None:
        nonlocal moved, left_out
        left_out += dropped(progress)
        moved += progress.numInputRows - dropped(progress)
        if sys.stderr.isatty():
            rate = progress.processedRowsPerSecond
            click.echo(f"\r{moved:,} moved, {rate:,.0f}/s in the last batch ", nl=False, err=True)

    job.run(show)
    note(f"{moved:,} messages moved." + (f" {left_out:,} dropped by the steps." if steps else ""))
    if asked > 1:
        note("The batch that ran is not finished; the next run does it again.")
        click.get_current_context().exit(1)


def _print_command(connection: Connection, settings: SyncSettings, steps: str | None) -> None:
    """Print the spark-submit command of a job; what it sends to executors is made already."""
    from delaylevel.spark_sync.cluster import submit_command

    arguments = [*_connection_arguments(connection), "sync", "spark", *settings.level_topics]
    arguments += ["--master", settings.master, "--checkpoint", settings.checkpoint]
    arguments += ["--delivery", settings.delivery.value, "--no-ship"]
    if settings.executors.python is not None:
        arguments += ["--executor-python", settings.executors.python_name]
    if steps is not None:
        arguments += ["--steps", steps]
    if settings.once:
        arguments.append("--once")
    if settings.trigger_ms is not None:
        arguments += ["--trigger", f"{settings.trigger_ms}ms"]
    if settings.metrics_port is not None:
        arguments += ["--metrics-port", str(settings.metrics_port)]
        arguments += ["--metrics-address", settings.metrics_address]
    for name, value in settings.options.items():
        arguments += ["--option", f"{name}={value}"]
    command = submit_command(settings.master, settings.executors, settings.spark_conf, arguments)
    click.echo(str(command))
    if connection.token is not None:
        note("The token is not in the command: set DELAYLEVEL_TOKEN where it is run.")


def _connection_arguments(connection: Connection) -> list[str]:
    found = []
    for name in _CONNECTION_FLAGS:
        value = getattr(connection, name)
        if value is not None:
            found += [f"--{name.replace('_', '-')}", str(value)]
    if connection.tls_allow_insecure:
        found.append("--tls-allow-insecure")
    if not connection.tls_validate_hostname:
        found.append("--no-tls-validate-hostname")
    return found


def _pairs(values: tuple[str, ...], option: str) -> dict[str, str]:
    found = {}
    for text in values:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise click.BadParameter(f"{text!r} is not KEY=VALUE", param_hint=option)
        found[name] = value
    return found
