"""``delaylevel levels expand|set|drain|delete|orphans``: changes to existing level topics."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import click

from delaylevel.cluster.admin import Admin
from delaylevel.cluster.connection import Connection
from delaylevel.errors import InvalidInputError, StillPendingError
from delaylevel.model.formatting import parse_duration, shell
from delaylevel.model.level_topic import Expired, LevelTopicDescription, MissingTarget, Mover
from delaylevel.model.report import ForwardReport
from delaylevel.model.topic_name import TopicName
from delaylevel.topics import lifecycle
from delaylevel.topics import registry as topics
from delaylevel.topics.settings import set_attribute
from delaylevel.topics.targets import keep

from . import options
from .command import Settings, examples, pass_settings
from .output import Column, emit, emit_one, note
from .values import Parsed, parse_unit
from .views.levels import DESCRIPTION, description_view

_DRAINED = (
    Column("topic", "topic", head="LEVEL TOPIC"),
    Column("window", "number", head="HANDED OFF"),
    Column("due", "number", head="DELIVERED"),
    Column("dead", "number", head="DEAD LETTERS"),
    Column("dropped", "number", wide=True),
    Column("expired", "number", wide=True),
    Column("left", "number", head="STILL HELD"),
)
_DELETED = (
    Column("topic", "topic", head="LEVEL TOPIC"),
    Column("deleted"),
    Column("drained", "number"),
    Column("discarded_entries", "number", head="DISCARDED"),
)
_ORPHANS = (
    Column("topic", "topic", head="LEVEL TOPIC"),
    Column("missing", "topic", head="TARGETS GONE"),
    Column("entirely", head="ALL GONE"),
    Column("parked", "number"),
    Column("held", "number"),
    Column("dead_letters", "number", rank=1),
    Column("window", "number", wide=True),
    Column("part_of", "topic"),
)
_allow_early = click.option(
    "--allow-early",
    is_flag=True,
    help="Drain even if Exclusive or Failover subscriptions get messages before they are due.",
)


def parse_longer(text: str) -> tuple[timedelta, timedelta]:
    """Parse the unit of a finer level and its new longest delay: ``hour:48h``.

    Raises:
        ValueError: the text has another form.
    """
    unit, separator, maximum = text.partition(":")
    if not separator:
        raise ValueError(f"{text!r} is no level: write UNIT:MAX, e.g. hour:48h")
    by = parse_unit(unit)
    return by if isinstance(by, timedelta) else by.unit, parse_duration(maximum)


@examples(
    "delaylevel levels expand orders --max-delay 60d",
    "delaylevel levels expand orders --max-delay 60d --then hour:48h",
)
@click.command()
@click.argument("topic")
@options.max_delay()
@click.option(
    "--then",
    type=Parsed("unit:max", parse_longer),
    multiple=True,
    metavar="UNIT:MAX",
    help="Unit and longest delay of a finer level, e.g. hour:24h. Repeatable.",
)
@options.output
@pass_settings
def expand(
    settings: Settings,
    topic: str,
    maximum_delay: timedelta | None,
    then: tuple[tuple[timedelta, timedelta], ...],
    output: str,
) -> None:
    """Raise the longest delay of TOPIC's level topic.

    Producers and the mover may run meanwhile: new partitions are complete before they are used.
    Running producers notice at the first delay that was too long before, or within a minute. Stop
    an effectively-once Spark job first if delays recirculate or a finer level grows.
    """
    if maximum_delay is None and not then:
        raise InvalidInputError("give the new longest delay: --max-delay 60d, or --then hour:48h")
    with settings.level_topic(topic) as (_, admin, before):
        levels = lifecycle.longer_levels(before.levels, maximum_delay, dict(then))
        after = lifecycle.expand(admin, before.topic, levels)
    emit_one(description_view(after), DESCRIPTION, output)
    added = after.levels.partitions - before.levels.partitions
    note(f"{added} partitions added. Configure the new maximum in producers without an admin URL.")
    if after.mover is Mover.FUNCTION:
        note("The Function sees new partitions within a minute.")


@examples(
    "delaylevel levels drain orders",
    "delaylevel levels drain orders --allow-early",
)
@click.command()
@click.argument("topic")
@_allow_early
@options.output
@pass_settings
def drain(settings: Settings, topic: str, allow_early: bool, output: str) -> None:
    """Hand off all pending messages of TOPIC now.

    They keep their due times. Messages go to the window topic (with a tracker), or to their
    business topics, where the broker holds them until they are due. Stop the mover and the
    producers first.
    """
    with settings.level_topic(topic) as (connection, admin, described):
        report = _drain(settings, connection, admin, described, allow_early)
    left = report.held.total()
    view = {
        "topic": described.topic,
        "window": report.window,
        "due": report.due,
        "dead": report.dead.total(),
        "dropped": report.dropped.total(),
        "expired": report.expired.total(),
        "left": left,
    }
    emit_one(view, _DRAINED, output)
    if left:
        note(
            f"{left} messages are still held because their targets refuse messages: "
            "`delaylevel levels orphans` shows missing targets."
        )


@examples(
    "delaylevel levels delete orders",
    "delaylevel levels delete orders --drain",
    "delaylevel levels delete orders --discard 120",
)
@click.command()
@click.argument("topic")
@click.option(
    "--drain", "first_drain", is_flag=True, help="Hand off pending messages, then delete."
)
@click.option(
    "--discard",
    type=click.IntRange(min=0),
    metavar="ENTRIES",
    help="Number of pending entries to discard, as a confirmation.",
)
@_allow_early
@options.output
@pass_settings
def delete(
    settings: Settings,
    topic: str,
    first_drain: bool,
    discard: int | None,
    allow_early: bool,
    output: str,
) -> None:
    """Delete the level topic of TOPIC.

    All topics that belong to it are deleted too, but not the business topic. Refused while messages
    are pending or clients are connected.
    """
    if first_drain and discard is not None:
        raise InvalidInputError(
            "--drain keeps the messages that --discard deletes: give one of them"
        )
    drained = 0
    with settings.level_topic(topic, unfinished=True) as (connection, admin, described):
        if first_drain:
            pending = lifecycle.pending_entries(admin, described)
            if pending.dead_letters:
                raise StillPendingError(
                    f"{described.topic} has {pending.dead_letters} dead letters, which cannot be "
                    "drained: replay or discard them with `delaylevel dlq` first. Nothing was "
                    "changed",
                    pending.total,
                )
            drained = _drain(settings, connection, admin, described, allow_early).handed_off
        with settings.client(connection) as client:
            gone = lifecycle.delete(client, admin, described, discard=discard)
    view = {
        "topic": described.topic,
        "deleted": True,
        "drained": drained,
        "discarded_entries": gone.total,
    }
    emit_one(view, _DELETED, output)


@examples(
    "delaylevel levels set orders --on-missing-target dead-letter",
    "delaylevel levels set orders --expire-after 1h --expired dead-letter",
    "delaylevel levels set orders --attribute amount",
    "delaylevel levels set orders --keep-target",
)
@click.command("set")
@click.argument("topic")
@options.on_missing_target()
@options.expire_after()
@options.expired()
@options.attribute()
@options.keep_target
@options.output
@pass_settings
def set_(
    settings: Settings,
    topic: str,
    on_missing_target: MissingTarget | None,
    expire_after_ms: int | None,
    expired: Expired | None,
    attribute: str | None,
    keep_target: bool,
    output: str,
) -> None:
    """Change settings of TOPIC's level topic.

    Messages stay where they are. The Spark job and the dispatcher apply it within seconds, a
    Function when it is restarted. Dispatchers apply --attribute when they are started again.
    --keep-target is for TOPIC itself, or for all business topics if TOPIC is a level topic.
    """
    expiry = expire_after_ms is not None or expired is not None
    others = on_missing_target is not None or attribute is not None
    if not (expiry or others or keep_target):
        raise InvalidInputError(
            "nothing to change: give --on-missing-target, --expire-after, --expired, --attribute "
            "or --keep-target"
        )
    with Admin.from_connection(settings.connection()) as admin:
        after = topics.describe(admin, topic, search=True)
        if on_missing_target is not None:
            after = lifecycle.set_on_missing_target(admin, after.topic, on_missing_target)
        if attribute is not None:
            after = set_attribute(admin, after.topic, attribute)
        if expiry:
            after = lifecycle.set_expiry(
                admin, after.topic, expire_after_ms=expire_after_ms, expired=expired
            )
        if keep_target:
            full = TopicName.parse(topic).full
            for name in (full,) if full in after.targets else after.targets:
                if done := keep(admin, TopicName.parse(name)):
                    note(f"{done}.")
    emit_one(description_view(after), DESCRIPTION, output)


@examples(
    "delaylevel levels orphans",
    "delaylevel levels orphans public/demo -o json",
)
@click.command()
@options.namespace
@options.output
@pass_settings
def orphans(settings: Settings, namespace: str, output: str) -> None:
    """List level topics without business topics.

    NAMESPACE is public/default unless given. Also lists the remains of partly deleted level topics.
    Nothing is changed. A level topic of the last ten minutes that has had no message is left out.
    """
    with Admin.from_connection(settings.connection()) as admin:
        found = lifecycle.orphans(admin, namespace)
    rows = [
        {
            "topic": item.topic,
            "missing": item.missing,
            "entirely": item.entirely,
            **vars(item.pending),
            "part_of": item.level_topic,
        }
        for item in found
    ]
    emit(rows, _ORPHANS, output, empty=f"No orphans in {namespace}.")
    gone = [name for item in found for name in item.missing]
    if gone:
        note(
            "A broker deletes a topic that has no subscription after a minute. If its messages are "
            "still wanted, create it again and subscribe to it (or, if it is meant to have no "
            f"subscription, `delaylevel levels set {shell(TopicName.parse(gone[0]).short)} "
            "--keep-target`)"
            ". Otherwise delete the level topic: `delaylevel levels delete`."
        )


def _drain(
    settings: Settings,
    connection: Connection,
    admin: Admin,
    described: LevelTopicDescription,
    allow_early: bool,
) -> ForwardReport:
    from delaylevel.mover.drain import drain as drain_now

    with settings.client(connection) as client:
        return drain_now(
            client,
            admin,
            described,
            allow_early=allow_early,
            progress=lambda count: note(f"{count:,} messages") if settings.verbosity else None,
            target_client=partial(connection.open_client, logger=settings.client_logger()),
        )
