"""``delaylevel levels``: create level topics, show, change, pause and delete them."""

from __future__ import annotations

import functools
import sys
from datetime import timedelta
from typing import Any

import click

from delaylevel.cli.views.levels import (
    DESCRIBE,
    LEGEND,
    LIST,
    LIST_LEGEND,
    PARTITIONS,
    emit_description,
    list_view,
    note_unsubscribed,
    partition_view,
    problem_lines,
    some,
    status_view,
)
from delaylevel.cli.views.output import emit, emit_one, note, note_legend
from delaylevel.cli.views.tables import Column
from delaylevel.cli.views.terminal import width_of
from delaylevel.errors import InvalidInputError
from delaylevel.model.clock import SystemClock
from delaylevel.model.formatting import exact_duration, parse_duration, shell
from delaylevel.model.level_topic import (
    LEVEL_PREFIX,
    LEVEL_SUFFIX,
    MOST_WINDOW_PARTITIONS,
    FinalWindow,
    LevelTopicDescription,
    Mover,
)
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.topics import lifecycle
from delaylevel.topics import registry as topics
from delaylevel.topics.status import status
from delaylevel.topics.targets import keep

from . import options
from .options import (
    DURATION,
    DURATION_MS,
    UNIT,
    Group,
    OneOf,
    Parsed,
    Settings,
    examples,
    parse_unit,
    pass_settings,
)


@click.group(cls=Group)
def levels() -> None:
    """Create and manage level topics.

    A level topic belongs to a business topic and holds its long-delayed messages.
    """


@options.topic_command(
    levels, "delaylevel levels pause orders", "delaylevel levels pause orders --target invoices"
)
@options.target
def pause(settings: Settings, topic: str, target: str | None, output: str) -> None:
    """Let the due messages of TOPIC's level topic wait.

    By default, those of all its business topics. Movers go on. Dispatchers follow within five
    seconds and keep what is due, on disk if it is much, until `levels resume`. A restart changes
    nothing. Messages that are sent without a delay are not paused.
    """
    with settings.admin() as admin:
        after = lifecycle.pause(admin, topic, target, SystemClock())
    emit_description(after, output)


@options.topic_command(
    levels,
    "delaylevel levels resume orders",
    "delaylevel levels resume orders --target invoices --spread 10m",
)
@options.target
@click.option(
    "--spread",
    "spread_ms",
    type=DURATION_MS,
    default="0s",
    metavar="DURATION",
    help="Time over which the messages are spread, e.g. 10m; 0s for none.",
)
def resume(settings: Settings, topic: str, target: str | None, spread_ms: int, output: str) -> None:
    """Release the due messages of TOPIC's level topic again.

    By default, this ends every pause of the level topic. With --spread, the messages that wait are
    released evenly over this time. Messages that become due later do not wait for them, so they may
    overtake messages with the same key.
    """
    with settings.admin() as admin:
        after = lifecycle.resume(admin, topic, target, SystemClock(), spread_ms)
    emit_description(after, output)


_DRAINED = (
    Column("topic", "topic", head="LEVEL TOPIC"),
    Column("window", "number", head="HANDED OFF"),
    Column("due", "number", head="DELIVERED"),
    Column("dead", "number", head="DEAD LETTERS"),
    Column("dropped", "number"),
    Column("expired", "number"),
    Column("held", "number", head="STILL HELD"),
)
_DELETED = (
    Column("topic", "topic", head="LEVEL TOPIC"),
    Column("discarded_entries", "number", head="DISCARDED"),
)


_then = functools.partial(
    click.option,
    "--then",
    multiple=True,
    help="Unit and longest delay of a finer level, e.g. hour:24h. Repeatable.",
)


def parse_level(text: str) -> PartitionStrategy:
    """Parse a finer level: ``hour:24h``, or with its lead ``hour:24h:5m``."""
    parts = text.split(":")
    if len(parts) not in (2, 3):
        raise ValueError(f"{text!r} is no level: write UNIT:MAX or UNIT:MAX:LEAD, e.g. hour:24h")
    return PartitionStrategy(
        partition_by=parse_unit(parts[0]),
        maximum_delay=parse_duration(parts[1]),
        lead=parse_duration(parts[2]) if len(parts) == 3 else None,
    )


@options.topic_command(
    levels,
    "delaylevel levels expand orders --max-delay 60d",
    "delaylevel levels expand orders --max-delay 60d --then hour:48h",
)
@options.max_delay()
@_then(type=Parsed("unit:max", parse_level), metavar="UNIT:MAX")
def expand(
    settings: Settings,
    topic: str,
    maximum_delay: timedelta | None,
    then: tuple[PartitionStrategy, ...],
    output: str,
) -> None:
    """Raise the longest delay of TOPIC's level topic.

    Producers and the mover may run meanwhile: new partitions are complete before they are used.
    Running producers notice at the first delay that was too long before, or within a minute.
    """
    if maximum_delay is None and not then:
        raise InvalidInputError("give the new longest delay: --max-delay 60d, or --then hour:48h")
    if any(level.lead is not None for level in then):
        raise InvalidInputError("a lead cannot be changed: write --then UNIT:MAX, e.g. hour:48h")
    finer = {level.unit: level.maximum_delay for level in then}
    with settings.level_topic(topic) as (admin, before):
        after = lifecycle.expand(admin, before.topic, maximum_delay, finer)
    emit_description(after, output)
    note("Configure the new maximum in producers without an admin URL.")


@options.topic_command(
    levels, "delaylevel levels drain orders", "delaylevel levels drain orders --allow-early"
)
@click.option(
    "--allow-early",
    is_flag=True,
    help="Drain even if Exclusive or Failover subscriptions get messages before they are due.",
)
def drain(settings: Settings, topic: str, allow_early: bool, output: str) -> None:
    """Hand off all pending messages of TOPIC now.

    They keep their due times. Messages go to the window topic (with a tracker), or to their
    business topics, where the broker holds them until they are due, and `delaylevel pending` no
    longer shows them. Stop the mover and the producers first.
    """
    from delaylevel.mover.drain import drain as drain_now

    with (
        settings.level_topic(topic) as (admin, described),
        settings.client() as client,
    ):
        report = drain_now(
            client,
            admin,
            described,
            allow_early=allow_early,
            target_client=settings.open_client,
        )
    emit_one({"topic": described.topic, **report.counts()}, _DRAINED, output)


@options.topic_command(
    levels, "delaylevel levels delete orders", "delaylevel levels delete orders --discard 120"
)
@click.option(
    "--discard",
    type=click.IntRange(min=0),
    metavar="ENTRIES",
    help="Number of pending entries to discard, as a confirmation.",
)
def delete(settings: Settings, topic: str, discard: int | None, output: str) -> None:
    """Delete the level topic of TOPIC.

    All topics that belong to it are deleted too, but not the business topic. Refused while messages
    are pending or clients are connected. `delaylevel levels drain` hands off what is pending.
    """
    with (
        # What a creation left behind that was killed can be deleted, too.
        settings.level_topic(topic, unfinished=True) as (admin, described),
        settings.client() as client,
    ):
        gone = lifecycle.delete(client, admin, described, discard=discard)
    view = {"topic": described.topic, "discarded_entries": gone.total()}
    emit_one(view, _DELETED, output)


@options.topic_command(
    levels,
    "delaylevel levels set orders --on-missing-target dead-letter",
    "delaylevel levels set orders --expire-after 1h --expired dead-letter",
    "delaylevel levels set orders --keep-target",
    name="set",
)
@options.on_missing_target()
@options.expire_after()
@options.expired()
@options.attribute()
@options.keep_target
def set_(
    program: Settings,
    topic: str,
    keep_target: bool,
    output: str,
    **settings: Any,
) -> None:
    """Change settings of TOPIC's level topic.

    Messages stay where they are. The Spark job and the dispatcher apply it within seconds, a
    Function when it is restarted. Dispatchers apply --attribute when they are started again.
    --keep-target is for TOPIC itself, or for all business topics if TOPIC is a level topic.
    """
    with program.admin() as admin:
        after = lifecycle.change_settings(admin, topic, **settings)
        if keep_target:
            full = TopicName.parse(topic).full
            for name in (full,) if full in after.targets else after.targets:
                keep(admin, TopicName.parse(name))
    emit_description(after, output)


@options.topic_command(
    levels,
    "delaylevel levels create orders",
    "delaylevel levels create orders --unit day --max-delay 30d --then hour:24h",
    "delaylevel levels create orders --keep-target",
    "delaylevel levels create orders --target invoices --level-topic _billing",
    "delaylevel levels create orders --level-namespace public/levels",
    "delaylevel levels create ticks --unit 10s --max-delay 1m --then 2s:10s",
)
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
@_then(type=Parsed("unit:max[:lead]", parse_level), metavar="UNIT:MAX[:LEAD]")
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
    help="Another business topic to serve. Repeatable.",
)
@options.keep_target
@options.level_topic
@options.level_namespace
@click.option(
    "--mover",
    type=OneOf(Mover),
    default=Mover.SERVICE.value,
    help="Mover of near-due messages: `delaylevel run` or the Spark job, or a Function in Pulsar.",
)
@options.final_window
@click.option(
    "--window-partitions",
    type=click.IntRange(1, MOST_WINDOW_PARTITIONS),
    default=LevelTopicDescription.window_partitions,
    help="Number of window partitions for the dispatchers to share (with a tracker).",
)
@click.option(
    "--hold-pause",
    "hold_pause_ms",
    type=DURATION_MS,
    default=exact_duration(LevelTopicDescription.hold_pause_ms),
    help="Pause before a message is sent again to a target that refused it.",
)
@options.on_missing_target(default=LevelTopicDescription.on_missing_target.value)
@options.expire_after(default="0s")
@options.expired(default=LevelTopicDescription.expired.value)
@options.attribute(default=LevelTopicDescription.attribute)
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
    with settings.admin() as admin:
        wanted = LevelTopicDescription(
            topic=level_topic or topics.default_name(admin, business.full, level_namespace),
            levels=Levels([coarse, *then]),
            targets=(business.full, *more_targets),
            **fields,
        )
        existed = topics.find(admin, wanted.topic) is not None
        made = topics.create(admin, wanted)
        names = [TopicName.parse(name) for name in (business.full, *more_targets)]
        if keep_target:
            for name in names:
                keep(admin, name)
        emit_description(made, output)
        if existed:
            note("The level topic exists already: it keeps its settings, and has all targets now.")
        if made.final_window is FinalWindow.TRACKER:
            note(
                f"`delaylevel run {shell(topic)}` moves and releases its messages."
                if made.mover is Mover.SERVICE
                else f"Also run `delaylevel dispatcher run {shell(topic)}`, which releases "
                "due messages."
            )
        for line in topics.notes(admin, made):
            note(f"Note: {line}.")
        for name in names:
            note_unsubscribed(admin, name)


@examples("delaylevel levels list", "delaylevel levels list public/demo")
@levels.command("list")
@options.namespace
@options.output
@pass_settings
def list_(settings: Settings, namespace: str, output: str) -> None:
    """List the level topics of a namespace.

    NAMESPACE is public/default unless given.
    """
    now_ms = SystemClock().now_ms()
    with settings.admin() as admin:
        found = topics.list_level_topics(admin, namespace)
        rows = [list_view(admin, item, now_ms) for item in found]
    emit(rows, LIST, output, empty=f"No level topics in {namespace}.")
    if output == "table" and rows:
        note_legend(LIST_LEGEND)
        if problems := problem_lines(rows, width_of(sys.stdout)):
            click.echo(problems)


@options.topic_command(
    levels, "delaylevel levels describe orders", "delaylevel levels describe _orders-delay-level"
)
def describe(settings: Settings, topic: str, output: str) -> None:
    """Show the level topic of TOPIC and its partitions.

    This includes backlogs and the times of the next hand-offs. TOPIC is a business topic, its level
    topic, or any topic that belongs to it. A table leaves out empty partitions.
    Nothing is acknowledged or moved.
    """
    with settings.level_topic(topic) as (admin, described):
        at = status(admin, described, SystemClock().now_ms())
        state = status_view(admin, at)
    rows = [partition_view(row, at.now_ms) for row in at.rows()]
    if output == "json":
        emit_one({**state, "rows": rows}, DESCRIBE, output)
        return
    if output == "jsonl":
        emit(rows, PARTITIONS, output)
        return
    emit_one({**state, "problems": some(state["problems"])}, DESCRIBE, output)
    note_legend(LEGEND)
    shown = [row for row in rows if row["backlog_entries"]]
    if shown:
        click.echo()
        emit(shown, PARTITIONS, output)
    if len(shown) < len(rows):
        note(f"{len(rows) - len(shown)} empty partitions are not shown.")
