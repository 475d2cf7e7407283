"""``delaylevel levels``: make level topics, list them, and look into one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import click

from delaylevel.cli.views.levels import (
    DESCRIBE,
    DESCRIPTION,
    LIST,
    PARTITIONS,
    description_view,
    list_view,
    partition_view,
    status_view,
)
from delaylevel.cluster.admin import Admin
from delaylevel.errors import InvalidInputError
from delaylevel.model.clock import SystemClock, duration_ms
from delaylevel.model.level_topic import (
    DEFAULT_HOLD_PAUSE_MS,
    DEFAULT_WINDOW_PARTITIONS,
    LEVEL_SUFFIX,
    MOST_WINDOW_PARTITIONS,
    FinalWindow,
    LevelTopicDescription,
    MissingTarget,
    Mover,
    default_level_topic,
)
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.topics import registry as topics
from delaylevel.topics.status import status

from .lifecycle import delete, drain, expand, orphans, set_
from .options import (
    DURATION,
    Settings,
    examples,
    output_option,
    parse_duration,
    parse_unit,
    pass_settings,
)
from .output import emit, emit_one, note


class _Unit(click.ParamType):  # type: ignore[type-arg] # generic from click 8.5 on
    name = "unit"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> PartitionBy | timedelta:
        if isinstance(value, (PartitionBy, timedelta)):
            return value
        try:
            return parse_unit(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Level(click.ParamType):  # type: ignore[type-arg] # generic from click 8.5 on
    name = "unit:max[:lead]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> PartitionStrategy:
        if isinstance(value, PartitionStrategy):
            return value
        try:
            return parse_level(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.group(
    epilog=examples(
        "delaylevel levels create orders --by day --max 30d --then hour:24h",
        "delaylevel levels list",
        "delaylevel levels describe orders",
        "delaylevel levels expand orders --max 60d",
    )
)
def levels() -> None:
    """Level topics: where long-delayed messages wait."""


@levels.command(
    epilog=examples(
        "delaylevel levels create orders",
        "delaylevel levels create orders --by day --max 30d --then hour:24h",
        "delaylevel levels create orders --target invoices --level-topic billing-delay-level",
        "delaylevel levels create public/demo/ticks --by 10s --max 1m --then 2s:10s",
    )
)
@click.argument("topic")
@click.option(
    "--by",
    type=_Unit(),
    default="day",
    show_default=True,
    help="The unit: year, month, day, hour, minute, or any duration such as 2s.",
)
@click.option(
    "--max",
    "maximum",
    type=DURATION,
    default="30d",
    show_default=True,
    help="The longest delay.",
)
@click.option(
    "--lead",
    type=DURATION,
    help="How long before its due time a message is handed off at the latest.",
)
@click.option(
    "--then",
    type=_Level(),
    multiple=True,
    metavar="UNIT:MAX[:LEAD]",
    help="A finer level below, e.g. hour:24h; again for more.",
)
@click.option(
    "--overflow",
    type=click.Choice(["reject", "recirculate"]),
    default="reject",
    show_default=True,
    help="What happens to longer delays: an error, or several rounds.",
)
@click.option(
    "--target",
    "more_targets",
    multiple=True,
    metavar="TOPIC",
    help="Another business topic that it serves; again for more.",
)
@click.option("--level-topic", metavar="NAME", help="Its name; otherwise TOPIC-delay-level.")
@click.option(
    "--mover",
    type=click.Choice([mover.value for mover in Mover]),
    default=Mover.SPARK.value,
    show_default=True,
    help="Who moves what is near-due.",
)
@click.option(
    "--final-window",
    type=click.Choice([window.value for window in FinalWindow]),
    default=FinalWindow.TRACKER.value,
    show_default=True,
    help="Who holds a message between its last hand-off and its due time.",
)
@click.option(
    "--window-partitions",
    type=click.IntRange(1, MOST_WINDOW_PARTITIONS),
    default=DEFAULT_WINDOW_PARTITIONS,
    show_default=True,
    help="With --final-window tracker: partitions of the window, shared out among dispatchers.",
)
@click.option(
    "--hold-pause",
    type=DURATION,
    default=timedelta(milliseconds=DEFAULT_HOLD_PAUSE_MS),
    show_default="30s",
    help="How long a message rests whose target cannot be written.",
)
@click.option(
    "--on-missing-target",
    type=click.Choice([policy.value for policy in MissingTarget]),
    default=MissingTarget.HOLD.value,
    show_default=True,
    help="What becomes of messages whose business topic does not exist; for a new level topic.",
)
@output_option
@pass_settings
def create(
    settings: Settings,
    topic: str,
    by: PartitionBy | timedelta,
    maximum: timedelta,
    lead: timedelta | None,
    then: tuple[PartitionStrategy, ...],
    overflow: Any,
    more_targets: tuple[str, ...],
    level_topic: str | None,
    mover: str,
    final_window: str,
    window_partitions: int,
    hold_pause: timedelta,
    on_missing_target: str,
    output: str,
) -> None:
    """Make the level topic of a business topic TOPIC.

    With its held and dead-letter topics, with --final-window tracker the window and its release
    log, with subscriptions and policies. Doing it again does no harm: what is missing is made, new
    targets are added.
    """
    business = TopicName.parse(topic)
    if level_topic is None and business.local.endswith(LEVEL_SUFFIX):
        raise InvalidInputError(
            f"{topic} looks like a level topic: name the business topic that it serves "
            f"({topic.removesuffix(LEVEL_SUFFIX)}), and --level-topic where it has its own name"
        )
    coarse = PartitionStrategy(partition_by=by, maximum_delay=maximum, lead=lead, overflow=overflow)
    wanted = LevelTopicDescription(
        topic=level_topic or default_level_topic(business.full),
        levels=Levels([coarse, *then]),
        targets=(business.full, *more_targets),
        mover=Mover(mover),
        final_window=FinalWindow(final_window),
        window_partitions=window_partitions,
        hold_pause_ms=duration_ms(hold_pause),
        on_missing_target=MissingTarget(on_missing_target),
    )
    with Admin.from_connection(settings.connection()) as admin:
        made = topics.create(admin, wanted)
        emit_one(description_view(made), DESCRIPTION, output)
        if made.final_window is FinalWindow.TRACKER:
            note(
                f"Run `delaylevel dispatch run {topic}` beside the mover: it releases what is due."
            )
        for line in topics.notes(admin, made):
            note(f"Note: {line}.")


@levels.command(
    "list",
    epilog=examples(
        "delaylevel levels list",
        "delaylevel levels list public/demo",
        "delaylevel levels list -o jsonl | jq .backlog_entries",
    ),
)
@click.argument("namespace", default="public/default")
@output_option
@pass_settings
def list_(settings: Settings, namespace: str, output: str) -> None:
    """List the level topics of NAMESPACE (public/default), and how they stand."""
    if len(namespace.split("/")) != 2 or not all(namespace.split("/")):
        raise InvalidInputError(f"{namespace!r} is not a namespace: write tenant/namespace")
    now_ms = SystemClock().now_ms()
    with Admin.from_connection(settings.connection()) as admin:
        found = topics.list_level_topics(admin, namespace)
        standing = [
            status(admin, item.description, now_ms) if item.description is not None else None
            for item in found
        ]
    rows = [list_view(item, at) for item, at in zip(found, standing, strict=True)]
    emit(rows, LIST, output, empty=f"No level topics in {namespace}.")


@levels.command(
    epilog=examples(
        "delaylevel levels describe orders",
        "delaylevel levels describe orders-delay-level -o wide",
        "delaylevel levels describe orders -o json",
    )
)
@click.argument("topic")
@output_option
@pass_settings
def describe(settings: Settings, topic: str, output: str) -> None:
    """Show what is parked for TOPIC, and when it is handed off.

    TOPIC is a business topic, its level topic, or any topic that belongs to it. A table leaves
    empty partitions out; -o wide shows them. Nothing is acknowledged or moved.
    """
    with Admin.from_connection(settings.connection()) as admin:
        described = topics.describe(admin, topic, search=True)
        at = status(admin, described, SystemClock().now_ms())
    rows = [partition_view(row, at.now_ms) for row in (*at.partitions, *at.others)]
    if output == "json":
        emit_one({**status_view(at), "rows": rows}, DESCRIBE, output)
        return
    if output == "jsonl":
        emit(rows, PARTITIONS, output)
        return
    emit_one(status_view(at), DESCRIBE, output)
    shown = rows if output == "wide" else [row for row in rows if row["backlog_entries"]]
    if shown:
        click.echo()
        emit(shown, PARTITIONS, output)
    if len(shown) < len(rows):
        note(f"{len(rows) - len(shown)} empty partitions are not shown; -o wide shows them.")


for _command in (expand, set_, drain, delete, orphans):
    levels.add_command(_command)


def parse_level(text: str) -> PartitionStrategy:
    """A finer level: ``hour:24h``, or with its lead ``hour:24h:5m``.

    Raises:
        ValueError: it has another form, or the values cannot work together.
    """
    parts = text.split(":")
    if len(parts) not in (2, 3):
        raise ValueError(f"{text!r} is no level: write UNIT:MAX or UNIT:MAX:LEAD, e.g. hour:24h")
    return PartitionStrategy(
        partition_by=parse_unit(parts[0]),
        maximum_delay=parse_duration(parts[1]),
        lead=parse_duration(parts[2]) if len(parts) == 3 else None,
    )
