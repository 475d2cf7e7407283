"""``delaylevel levels create|list|describe``: create level topics and show their state."""

from __future__ import annotations

import sys
from typing import Any

import click

from delaylevel.cluster.admin import Admin
from delaylevel.errors import InvalidInputError
from delaylevel.model.clock import SystemClock
from delaylevel.model.formatting import exact_duration, parse_duration, shell
from delaylevel.model.level_topic import (
    DEFAULT_HOLD_PAUSE_MS,
    DEFAULT_WINDOW_PARTITIONS,
    LEVEL_PREFIX,
    LEVEL_SUFFIX,
    MOST_WINDOW_PARTITIONS,
    SIZE_ATTRIBUTE,
    Expired,
    FinalWindow,
    LevelTopicDescription,
    MissingTarget,
    Mover,
)
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.topics import registry as topics
from delaylevel.topics.status import status
from delaylevel.topics.targets import keep

from . import options
from .command import Settings, examples, pass_settings
from .delivery import note_unsubscribed, undelivered
from .lifecycle import delete, drain, expand, orphans, set_
from .output import emit, emit_one, note
from .pausing import pause, resume
from .terminal import has_colour, width_of, write
from .values import DURATION, DURATION_MS, UNIT, Parsed, parse_unit
from .views.levels import (
    DESCRIBE,
    DESCRIPTION,
    LEGEND,
    LIST,
    LIST_LEGEND,
    PARTITIONS,
    description_view,
    list_table_view,
    list_view,
    partition_view,
    problem_lines,
    status_view,
)


def parse_level(text: str) -> PartitionStrategy:
    """Parse a finer level: ``hour:24h``, or with its lead ``hour:24h:5m``.

    Raises:
        ValueError: the text has another form, or its values do not fit together.
    """
    parts = text.split(":")
    if len(parts) not in (2, 3):
        raise ValueError(f"{text!r} is no level: write UNIT:MAX or UNIT:MAX:LEAD, e.g. hour:24h")
    return PartitionStrategy(
        partition_by=parse_unit(parts[0]),
        maximum_delay=parse_duration(parts[1]),
        lead=parse_duration(parts[2]) if len(parts) == 3 else None,
    )


@examples(
    "delaylevel levels create orders --unit day --max-delay 30d --then hour:24h",
    "delaylevel levels list",
    "delaylevel levels describe orders",
    "delaylevel levels expand orders --max-delay 60d",
)
@click.group()
def levels() -> None:
    """Create and manage level topics.

    A level topic belongs to a business topic and holds its long-delayed messages.
    """


@examples(
    "delaylevel levels create orders",
    "delaylevel levels create orders --unit day --max-delay 30d --then hour:24h",
    "delaylevel levels create orders --keep-target",
    "delaylevel levels create orders --target invoices --level-topic _billing-delay-level",
    "delaylevel levels create orders --level-namespace public/levels",
    "delaylevel levels create public/demo/ticks --unit 10s --max-delay 1m --then 2s:10s",
)
@levels.command()
@click.argument("topic")
@click.option(
    "--unit",
    "partition_by",
    type=UNIT,
    default="day",
    help="Unit of the coarsest level: year, month, day, hour, minute, or a duration such as 2s.",
)
@options.max_delay(default="30d")
@click.option(
    "--lead",
    type=DURATION,
    help="Minimum time between the hand-off of a message and its due time.",
)
@click.option(
    "--then",
    type=Parsed("unit:max[:lead]", parse_level),
    multiple=True,
    metavar="UNIT:MAX[:LEAD]",
    help="Unit and longest delay of a finer level, e.g. hour:24h. Repeatable.",
)
@click.option(
    "--overflow",
    type=click.Choice(["reject", "recirculate"]),
    default="reject",
    help="Treatment of longer delays: an error, or several rounds.",
)
@click.option(
    "--target",
    "more_targets",
    multiple=True,
    metavar="TOPIC",
    help="Further business topic to serve. Repeatable.",
)
@options.keep_target
@options.level_topic
@options.level_namespace
@options.mover
@options.final_window
@click.option(
    "--window-partitions",
    type=click.IntRange(1, MOST_WINDOW_PARTITIONS),
    default=DEFAULT_WINDOW_PARTITIONS,
    help="Number of window partitions for the dispatchers to share (with a tracker).",
)
@click.option(
    "--hold-pause",
    "hold_pause_ms",
    type=DURATION_MS,
    default=exact_duration(DEFAULT_HOLD_PAUSE_MS),
    help="Pause before a message is sent again to a target that refused it.",
)
@options.on_missing_target(default=MissingTarget.HOLD.value)
@options.expire_after(default="0s")
@options.expired(default=Expired.DROP.value)
@options.attribute(default=SIZE_ATTRIBUTE)
@options.output
@pass_settings
def create(
    settings: Settings,
    topic: str,
    then: tuple[PartitionStrategy, ...],
    more_targets: tuple[str, ...],
    level_topic: str | None,
    level_namespace: str | None,
    keep_target: bool,
    output: str,
    **fields: Any,
) -> None:
    """Create the level topic of a business topic TOPIC.

    It is called _TOPIC-delay-level, so that no consumer with a pattern such as TOPIC.* receives
    parked messages. With --level-namespace, it is in a namespace of its own, which also protects
    against patterns for all topics of TOPIC's namespace. An existing level topic without the
    underscore, TOPIC-delay-level, is kept.

    Also creates its topics for held messages and dead letters, its subscriptions and policies, and
    with --final-window tracker its window and journal. The command may be repeated: it creates
    missing parts and adds new targets.

    Messages that are due for a business topic without a subscription are held until it has one.
    Give --keep-target if it is meant to have none.
    """
    business = TopicName.parse(topic)
    if level_topic is None and business.local.endswith(LEVEL_SUFFIX):
        served = business.local.removesuffix(LEVEL_SUFFIX).removeprefix(LEVEL_PREFIX)
        raise InvalidInputError(
            f"{topic} looks like a level topic: name the business topic that it serves "
            f"({business.namespace_path}/{served}), and --level-topic if it has another name"
        )
    if level_topic is not None and level_namespace is not None:
        raise InvalidInputError("give --level-topic or --level-namespace, not both")
    strategy = ("partition_by", "maximum_delay", "lead", "overflow")
    coarse = PartitionStrategy(**{name: fields.pop(name) for name in strategy})
    with Admin.from_connection(settings.connection()) as admin:
        wanted = LevelTopicDescription(
            topic=level_topic or topics.default_name(admin, business.full, level_namespace),
            levels=Levels([coarse, *then]),
            targets=(business.full, *more_targets),
            **fields,
        )
        made = topics.create(admin, wanted)
        names = [TopicName.parse(name) for name in (business.full, *more_targets)]
        if keep_target:
            for name in names:
                if done := keep(admin, name):
                    note(f"{done}.")
        emit_one(description_view(made), DESCRIPTION, output)
        if made.final_window is FinalWindow.TRACKER:
            note(
                f"`delaylevel run {shell(topic)}` moves and releases its messages."
                if made.mover is Mover.SPARK
                else f"Also run `delaylevel dispatcher run {shell(topic)}`, which releases "
                "due messages."
            )
        for line in topics.notes(admin, made):
            note(f"Note: {line}.")
        for name in names:
            note_unsubscribed(admin, name)


@examples(
    "delaylevel levels list",
    "delaylevel levels list public/demo",
    "delaylevel levels list -o jsonl | jq .backlog_entries",
)
@levels.command("list")
@options.namespace
@options.output
@pass_settings
def list_(settings: Settings, namespace: str, output: str) -> None:
    """List the level topics of a namespace.

    NAMESPACE is public/default unless given.
    """
    now_ms = SystemClock().now_ms()
    with Admin.from_connection(settings.connection()) as admin:
        found = topics.list_level_topics(admin, namespace)
        rows = [_row(admin, item, now_ms) for item in found]
    if output in ("json", "jsonl"):
        emit(rows, LIST, output)
        return
    shown = [list_table_view(row) for row in rows]
    emit(shown, LIST, output, empty=f"No level topics in {namespace}.", legend=LIST_LEGEND)
    problems = problem_lines(rows, width_of(sys.stdout), has_colour(sys.stdout))
    if problems:
        write(problems)


def _row(admin: Admin, item: topics.FoundLevelTopic, now_ms: int) -> dict[str, Any]:
    if item.description is None:
        return list_view(item, None)
    at = status(admin, item.description, now_ms)
    return list_view(item, at, undelivered(admin, at))


@examples(
    "delaylevel levels describe orders",
    "delaylevel levels describe _orders-delay-level -o wide",
    "delaylevel levels describe orders -o json",
)
@levels.command()
@click.argument("topic")
@options.output
@pass_settings
def describe(settings: Settings, topic: str, output: str) -> None:
    """Show the level topic of TOPIC and its partitions.

    This includes backlogs and the times of the next hand-offs. TOPIC is a business topic, its level
    topic, or any topic that belongs to it. A table leaves out empty partitions; -o wide shows them.
    Nothing is acknowledged or moved.
    """
    with settings.level_topic(topic) as (_, admin, described):
        at = status(admin, described, SystemClock().now_ms())
        state = status_view(at, undelivered(admin, at))
    rows = [partition_view(row, at.now_ms) for row in (*at.partitions, *at.others)]
    if output == "json":
        emit_one({**state, "rows": rows}, DESCRIBE, output)
        return
    if output == "jsonl":
        emit(rows, PARTITIONS, output)
        return
    emit_one(state, DESCRIBE, output, legend=LEGEND)
    shown = rows if output == "wide" else [row for row in rows if row["backlog_entries"]]
    if shown:
        click.echo()
        emit(shown, PARTITIONS, output)
    if len(shown) < len(rows):
        note(f"{len(rows) - len(shown)} empty partitions are not shown; -o wide shows them.")


for _command in (expand, set_, pause, resume, drain, delete, orphans):
    levels.add_command(_command)
