"""``delaylevel levels expand|drain|delete|orphans``: what becomes of level topics over time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import click

from delaylevel.cli.views.levels import DESCRIPTION, description_view
from delaylevel.cluster.admin import Admin
from delaylevel.errors import InvalidInputError, StillPendingError
from delaylevel.model.level_topic import LevelTopicDescription, MissingTarget, Mover
from delaylevel.mover.drain import DrainReport
from delaylevel.topics import lifecycle
from delaylevel.topics import registry as topics

from .options import (
    DURATION,
    Settings,
    examples,
    output_option,
    parse_duration,
    parse_unit,
    pass_settings,
)
from .output import Column, emit, emit_one, note

_DRAINED = (
    Column("topic", head="LEVEL TOPIC"),
    Column("window", "number", head="HANDED OFF"),
    Column("due", "number", head="DELIVERED"),
    Column("dead", "number", head="DEAD LETTERS"),
    Column("dropped", "number", wide=True),
    Column("left", "number", head="STILL HELD"),
)
_DELETED = (
    Column("topic", head="LEVEL TOPIC"),
    Column("deleted"),
    Column("drained", "number"),
    Column("discarded_entries", "number", head="DISCARDED"),
)
_ORPHANS = (
    Column("topic", head="LEVEL TOPIC"),
    Column("missing", head="TARGETS GONE"),
    Column("entirely", head="ALL GONE"),
    Column("parked", "number"),
    Column("held", "number"),
    Column("dead_letters", "number"),
    Column("window", "number", wide=True),
    Column("part_of"),
)
_allow_early = click.option(
    "--allow-early",
    is_flag=True,
    help="Drain although an Exclusive or Failover subscription gets messages before they are due.",
)


class _Longer(click.ParamType):  # type: ignore[type-arg] # generic from click 8.5 on
    name = "unit:max"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[timedelta, timedelta]:
        if isinstance(value, tuple):
            return value
        unit, separator, maximum = str(value).partition(":")
        try:
            if not separator:
                raise ValueError(f"{value!r}: write UNIT:MAX, e.g. hour:48h")
            by = parse_unit(unit)
            return by if isinstance(by, timedelta) else by.unit, parse_duration(maximum)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command(
    epilog=examples(
        "delaylevel levels expand orders --max 60d",
        "delaylevel levels expand orders --max 60d --then hour:48h",
    )
)
@click.argument("topic")
@click.option("--max", "maximum", type=DURATION, help="The longest delay of the coarsest level.")
@click.option(
    "--then",
    type=_Longer(),
    multiple=True,
    metavar="UNIT:MAX",
    help="The longest delay of a finer level, e.g. hour:48h; again for more.",
)
@output_option
@pass_settings
def expand(
    settings: Settings,
    topic: str,
    maximum: timedelta | None,
    then: tuple[tuple[timedelta, timedelta], ...],
    output: str,
) -> None:
    """Let the level topic of TOPIC take longer delays.

    Producers and the mover may run: new partitions are complete before anybody uses them. Running
    producers follow at the first delay that was too long so far, or within a minute. Where the
    Spark job runs effectively once, and delays recirculate or a finer level grows, stop it first.
    """
    if maximum is None and not then:
        raise InvalidInputError("say how long a delay may be: --max 60d, or --then hour:48h")
    with Admin.from_connection(settings.connection()) as admin:
        before = topics.describe(admin, topic, search=True)
        levels = lifecycle.longer_levels(before.levels, maximum, dict(then))
        after = lifecycle.expand(admin, before.topic, levels)
    emit_one(description_view(after), DESCRIPTION, output)
    added = after.levels.partitions - before.levels.partitions
    note(f"{added} partitions more. Producers without an admin address need the longer maximum.")
    if after.mover is Mover.FUNCTION:
        note("The Function sees new partitions within a minute.")


@click.command(
    epilog=examples(
        "delaylevel levels drain orders",
        "delaylevel levels drain orders --allow-early",
    )
)
@click.argument("topic")
@_allow_early
@output_option
@pass_settings
def drain(settings: Settings, topic: str, allow_early: bool, output: str) -> None:
    """Hand off now all that is pending for TOPIC; due times are kept.

    Messages go to their business topics, which hold them until they are due (or to the window
    topic, with a tracker). Stop the mover and the producers first.
    """
    with Admin.from_connection(settings.connection()) as admin:
        described = topics.describe(admin, topic, search=True)
        report = _drain(settings, admin, described, allow_early)
    emit_one({"topic": described.topic, **_drain_view(report)}, _DRAINED, output)
    if report.left:
        note(
            f"{report.left} messages are still held, because their targets cannot be written: "
            "`delaylevel levels orphans` shows which are gone."
        )


@click.command(
    epilog=examples(
        "delaylevel levels delete orders",
        "delaylevel levels delete orders --drain",
        "delaylevel levels delete orders --discard 120",
    )
)
@click.argument("topic")
@click.option("--drain", "first_drain", is_flag=True, help="Hand off what is pending, then delete.")
@click.option(
    "--discard",
    type=click.IntRange(min=0),
    metavar="ENTRIES",
    help="Throw away what is pending, if it is so many entries.",
)
@_allow_early
@output_option
@pass_settings
def delete(
    settings: Settings,
    topic: str,
    first_drain: bool,
    discard: int | None,
    allow_early: bool,
    output: str,
) -> None:
    """Delete the level topic of TOPIC, and all that belongs to it.

    Refused while anything is pending, or while somebody is connected. The business topic stays.
    """
    if first_drain and discard is not None:
        raise InvalidInputError("--drain keeps what --discard throws away: give one of them")
    drained = 0
    with Admin.from_connection(settings.connection()) as admin:
        described = topics.describe(admin, topic, search=True)
        if first_drain:
            pending = lifecycle.pending_entries(admin, described)
            if pending.dead_letters:
                raise StillPendingError(
                    f"{described.topic} has {pending.dead_letters} dead letters, which cannot be "
                    "drained: see to them with `delaylevel dlq` first. Nothing was changed",
                    pending.total,
                )
            drained = _drain(settings, admin, described, allow_early).handed_off
        gone = lifecycle.delete(admin, described, discard=discard)
    emit_one(
        {
            "topic": described.topic,
            "deleted": True,
            "drained": drained,
            "discarded_entries": gone.total,
        },
        _DELETED,
        output,
    )


@click.command(
    "set",
    epilog=examples(
        "delaylevel levels set orders --on-missing-target dead-letter",
        "delaylevel levels set orders --on-missing-target hold",
    ),
)
@click.argument("topic")
@click.option(
    "--on-missing-target",
    type=click.Choice([policy.value for policy in MissingTarget]),
    required=True,
    help="What becomes of messages whose business topic does not exist.",
)
@output_option
@pass_settings
def set_(settings: Settings, topic: str, on_missing_target: str, output: str) -> None:
    """Change what the level topic of TOPIC does; messages stay where they are.

    A running Function takes it up when it is restarted, Spark job and dispatcher within seconds.
    """
    with Admin.from_connection(settings.connection()) as admin:
        policy = MissingTarget(on_missing_target)
        after = lifecycle.set_on_missing_target(admin, topic, policy)
    emit_one(description_view(after), DESCRIPTION, output)


@click.command(
    epilog=examples(
        "delaylevel levels orphans",
        "delaylevel levels orphans public/demo -o json",
    )
)
@click.argument("namespace", default="public/default")
@output_option
@pass_settings
def orphans(settings: Settings, namespace: str, output: str) -> None:
    """List level topics in NAMESPACE (public/default) whose business topics are gone.

    Also what is left of level topics that were deleted in part. Nothing is changed.
    """
    if len(namespace.split("/")) != 2 or not all(namespace.split("/")):
        raise InvalidInputError(f"{namespace!r} is not a namespace: write tenant/namespace")
    with Admin.from_connection(settings.connection()) as admin:
        found = lifecycle.orphans(admin, namespace)
    emit(
        [_orphan_view(item) for item in found],
        _ORPHANS,
        output,
        empty=f"No orphans in {namespace}.",
    )


def _drain(
    settings: Settings, admin: Admin, described: LevelTopicDescription, allow_early: bool
) -> DrainReport:
    import pulsar

    from delaylevel.mover.drain import drain as drain_now

    client = pulsar.Client(**settings.client_kwargs(settings.connection()))
    try:
        return drain_now(
            client,
            admin,
            described,
            allow_early=allow_early,
            progress=lambda count: note(f"{count:,} messages") if settings.verbosity else None,
        )
    finally:
        client.close()


def _drain_view(report: DrainReport) -> dict[str, Any]:
    forwarded = report.forwarded
    return {
        "window": forwarded.window,
        "due": forwarded.due,
        "dead": forwarded.dead.total(),
        "dropped": forwarded.dropped.total(),
        "left": report.left,
    }


def _orphan_view(item: lifecycle.Orphan) -> dict[str, Any]:
    return {
        "topic": item.topic,
        "missing": list(item.missing),
        "entirely": item.entirely,
        "parked": item.pending.parked,
        "held": item.pending.held,
        "window": item.pending.window,
        "dead_letters": item.pending.dead_letters,
        "part_of": item.level_topic,
    }
