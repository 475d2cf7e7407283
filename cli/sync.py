"""``delaylevel sync``: the movers that this machine runs."""

from __future__ import annotations

import signal
import sys
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import click
import platformdirs

from delaylevel.clock import format_duration
from delaylevel.config import Connection
from delaylevel.delivery import Delivery

from .options import DURATION, examples, pass_connection
from .output import note


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
        "delaylevel sync spark orders --master spark://spark.example:7077 "
        "--checkpoint hdfs:///delaylevel/orders",
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
@pass_connection
def spark(
    connection: Connection,
    topics: tuple[str, ...],
    once: bool,
    checkpoint: str | None,
    trigger: timedelta | None,
    master: str,
    delivery: str,
    conf: tuple[str, ...],
    options: tuple[str, ...],
) -> None:
    """Run the Spark sync job for the level topics of TOPIC...

    TOPIC is a business topic or a level topic. One job at a time serves a level topic: a second
    one says who is at work, and ends. SIGTERM and Ctrl-C end the job after the batch that runs.
    """
    from delaylevel.spark_sync import SparkSyncJob, SyncSettings, default_checkpoint

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
    )
    job = SparkSyncJob(connection, settings)

    def stop(signum: int, frame: FrameType | None) -> None:
        note("Stopping after the batch that runs now.")
        job.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    for description in job.descriptions:
        note(f"Moving {description.topic} ({description.levels})")
    if not once:
        note(f"Looking every {format_duration(job.trigger_ms)}. Ctrl-C ends it.")
    moved = 0

    def show(progress: Any) -> None:
        nonlocal moved
        moved += progress.numInputRows
        if sys.stderr.isatty():
            rate = progress.processedRowsPerSecond
            click.echo(f"\r{moved:,} moved, {rate:,.0f}/s in the last batch ", nl=False, err=True)

    job.run(show)
    note(f"{moved:,} messages moved.")


def _pairs(values: tuple[str, ...], option: str) -> dict[str, str]:
    found = {}
    for text in values:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise click.BadParameter(f"{text!r} is not KEY=VALUE", param_hint=option)
        found[name] = value
    return found
