"""Operations on existing level topics: expansion, settings, deletion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from delaylevel.cluster.locks import closed_to_producers
from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import (
    ConflictError,
    InvalidInputError,
    InvalidStrategyError,
    LevelTopicError,
    NotFoundError,
    StillPendingError,
)
from delaylevel.model.clock import Clock, SystemClock, duration_ms
from delaylevel.model.formatting import exact_duration, listed, shell
from delaylevel.model.level_topic import (
    ALL,
    BEING_DELETED,
    DESCRIPTION_PROPERTY,
    PLAN_PROPERTY,
    Expired,
    LevelTopicDescription,
    Member,
    MissingTarget,
    Role,
)
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName

from . import members
from .registry import describe
from .status import LevelTopicStatus, status

__all__ = [
    "change_settings",
    "delete",
    "expand",
    "longer_levels",
    "pause",
    "pending_entries",
    "resume",
]


def change_settings(
    admin: TopicAdmin,
    topic: str,
    *,
    on_missing_target: MissingTarget | None = None,
    expire_after_ms: int | None = None,
    expired: Expired | None = None,
    attribute: str | None = None,
) -> LevelTopicDescription:
    """Change settings of a level topic; None for no change.

    The Spark job and the dispatcher apply them within seconds, a Function when it is restarted; to
    messages that are parked already, too, and to held ones at their next retry. A dispatcher
    applies an attribute to the window partitions that it acquires afterwards.

    Args:
        topic: the level topic, or a topic that :func:`delaylevel.topics.describe` finds it by.
        on_missing_target: policy for messages whose business topic does not exist at hand-off.
        expire_after_ms: longest time from due time to release of messages without their own expiry,
            ms; 0 for any.
        expired: treatment of expired messages.
        attribute: attribute by which live queries select pending messages: ``size``, ``delay``, or
            the name of a property.

    Returns:
        The description with the settings.

    Raises:
        InvalidInputError: a time is negative, or the attribute has no name, or too long a name.
    """
    given = {
        "on_missing_target": on_missing_target,
        "expire_after_ms": expire_after_ms,
        "expired": expired,
        "attribute": attribute,
    }
    settings: dict[str, Any] = {name: each for name, each in given.items() if each is not None}
    return change(admin, topic, lambda described: replace(described, **settings))


def pause(admin: TopicAdmin, topic: str, target: str | None, clock: Clock) -> LevelTopicDescription:
    """Let the due messages of a target wait in the window, until `resume`.

    Every dispatcher follows within five seconds, and a restart changes nothing. A target that is
    paused already stays paused.

    Args:
        topic: the level topic, or a topic that :func:`delaylevel.topics.describe` finds it by.
        target: business topic of the level topic; None for all of them.

    Returns:
        The description with the pause.

    Raises:
        TargetNotAllowedError: it is not a target of the level topic.
        LevelTopicError: the broker itself delivers the messages.
    """

    def changed(described: LevelTopicDescription) -> LevelTopicDescription:
        if not described.cancellable:
            raise LevelTopicError(
                f"level topic {described.topic} cannot be paused: with the final window "
                f"{described.final_window.value!r}, the broker itself delivers its messages"
            )
        name = _target(described, target)
        return replace(described, pauses=described.pauses.pause(name, clock.now_ms()))

    return change(admin, topic, changed)


def resume(
    admin: TopicAdmin, topic: str, target: str | None, clock: Clock, spread_ms: int = 0
) -> LevelTopicDescription:
    """End the pause of a target.

    Args:
        topic: the level topic, or a topic that :func:`delaylevel.topics.describe` finds it by.
        target: business topic of the level topic; None to end all pauses.
        spread_ms: time over which the messages that wait are released, ms; 0 for at once. Messages
            that become due later do not wait for them.

    Returns:
        The description without the pause.

    Raises:
        TargetNotAllowedError: it is not a target of the level topic.
        InvalidInputError: the spread is negative, or there is no pause of the target itself.
    """
    if spread_ms < 0:
        raise InvalidInputError(f"the spread is {spread_ms} ms: give 0 or more")

    def changed(described: LevelTopicDescription) -> LevelTopicDescription:
        name, paused = _target(described, target), dict(described.pauses.paused)
        if not paused or name not in (ALL, *paused):
            raise InvalidInputError(
                f"level topic {described.topic} has no pause of {target or 'any target'} to end; "
                f"paused are {', '.join(paused) or 'none'} (*: all together, without a name)"
            )
        pauses = described.pauses.resume(name, clock.now_ms(), spread_ms)
        return replace(described, pauses=pauses)

    return change(admin, topic, changed)


def change(
    admin: TopicAdmin,
    topic: str,
    changed: Callable[[LevelTopicDescription], LevelTopicDescription],
) -> LevelTopicDescription:
    """Change settings of a level topic, and return the description as it is stored now."""
    before = describe(admin, topic, search=True)
    # Each setting has a property of its own. So clients that change different settings at the same
    # time, or expand the level topic, lose nothing; of two that change the same one, the later one
    # counts.
    written = changed(before).settings_since(before)
    if not written:
        return before
    admin.set_properties(before.name, written)
    return describe(admin, before.topic)


def _target(described: LevelTopicDescription, target: str | None) -> str:
    """Return the full name of a target, or the name of all."""
    if target is None:
        return ALL
    full = TopicName.parse(target).full
    described.check_target(full)
    return full


def longer_levels(
    levels: Levels, maximum: timedelta | None, finer: Mapping[timedelta, timedelta] | None = None
) -> Levels:
    """Return the levels with a longer maximum of the coarsest, and of finer ones by their unit.

    Raises:
        InvalidStrategyError: a maximum would shrink, nothing would change, no level has one of
            the units, or there would be too many partitions.
    """
    wanted = dict(finer or {})
    coarsest = levels.strategies[0].unit
    if maximum is not None and wanted.setdefault(coarsest, maximum) != maximum:
        raise InvalidStrategyError(
            f"the coarsest level cannot take up to {_say(maximum)} and {_say(wanted[coarsest])}"
        )
    found = []
    for strategy in levels.strategies:
        longest = wanted.pop(strategy.unit, strategy.maximum_delay)
        if longest < strategy.maximum_delay:
            raise InvalidStrategyError(
                f"the level by {strategy.unit_name} takes up to {_say(strategy.maximum_delay)} and "
                f"cannot be made shorter ({_say(longest)}): partitions can only be added"
            )
        found.append(
            strategy
            if longest == strategy.maximum_delay
            else PartitionStrategy(
                partition_by=strategy.unit,
                maximum_delay=longest,
                lead=strategy.effective_lead,
                overflow=strategy.overflow,
            )
        )
    if wanted:
        units = ", ".join(_say(unit) for unit in wanted)
        raise InvalidStrategyError(f"there is no level with a unit of {units}: {levels}")
    longer = Levels(found)
    if longer == levels:
        raise InvalidStrategyError(f"the level topic already has these levels: {levels}")
    return longer


def expand(
    admin: TopicAdmin,
    topic: str,
    maximum: timedelta | None,
    finer: Mapping[timedelta, timedelta] | None = None,
) -> LevelTopicDescription:
    """Expand a level topic to longer delays, while producers and movers run.

    The new partitions are created with their subscription and policies before the description
    names them, so that nothing is published to a partition that no mover reads. Running producers
    and movers of this package read the new description by themselves. Call it again to finish an
    interrupted expansion.

    Args:
        topic: the level topic, or a topic that :func:`delaylevel.topics.describe` finds it by.
        maximum: maximum delay of the coarsest level; None to leave it.
        finer: maximum delays of further levels, by their unit.

    Returns:
        The new description.

    Raises:
        InvalidStrategyError: a maximum would shrink, nothing would change, no level has one of the
            units, or the levels need more partitions than they or the broker allow.
        UnsafeNamespaceError: policies of the namespace would delete messages parked for that long.
        LevelTopicError: another client changed the level topic at the same time.
    """
    before = describe(admin, topic, search=True)
    levels = longer_levels(before.levels, maximum, finer)
    after = replace(before, levels=levels, former=(*before.former, before.levels))
    facts = members.facts_of(admin, after)
    members.check_partition_limit(after, facts.broker.max_partitions)
    members.refuse_unsafe(admin, facts)
    grown = [member for member in after.members() if member.role is Role.LEVEL]
    for member in grown:
        _grow(admin, member, levels)
        members.subscribe(admin, member)
        members.protect(admin, member.topic, facts)
    # Pulsar has no compare-and-set for properties: of two clients that expand at the same time,
    # the second one notices here or after its write. A write that takes back a longer expansion
    # leaves more partitions than it describes: then the error asks for the longer one again.
    if describe(admin, after.topic).levels == before.levels:
        admin.set_properties(after.name, {DESCRIPTION_PROPERTY: after.to_json()})
        for member in grown:
            _grow(admin, member, levels)
        found = describe(admin, after.topic)
        if found.levels == levels:
            return found
    raise LevelTopicError(
        f"level topic {after.topic} was changed by another client at the same time: see "
        f"`delaylevel levels describe {shell(after.topic)}`, and expand it again if necessary"
    )


def _grow(admin: TopicAdmin, member: Member, levels: Levels) -> None:
    has = admin.partitioned_metadata(member.topic).partitions
    if has > member.partitions:
        remedy = finishing(levels, member.level, has)
        raise LevelTopicError(
            f"{member.topic} has {has} partitions already, more than {member.partitions}: an "
            f"expansion to a longer maximum was not finished: {remedy}"
        )
    if has < member.partitions:
        admin.expand(member.topic, member.partitions)


def finishing(levels: Levels, level: int, partitions: int) -> str:
    """Return the remedy for a level that has more partitions than are described."""
    strategy = levels.strategies[level]
    longest = _say(strategy.unit * (partitions + 1))
    return f"`delaylevel levels expand` with up to {longest} by {strategy.unit_name} finishes it"


def _say(value: timedelta) -> str:
    return exact_duration(duration_ms(value))


def _everything(admin: TopicAdmin, description: LevelTopicDescription) -> LevelTopicStatus:
    """Return the status with all partitions that exist, described or not: a deletion takes all."""
    return status(admin, description, SystemClock().now_ms(), as_described=False)


def pending_entries(admin: TopicAdmin, description: LevelTopicDescription) -> Counter[str]:
    """Return the numbers of entries that a deletion of the level topic would lose.

    A batch is one entry, and a missing topic has none. The kinds are ``parked``, ``held``, ``in the
    window`` (not released yet) and ``dead letters``.

    Raises:
        LevelTopicError: the broker does not report a partition, so that its contents are unknown.
    """
    stats = _everything(admin, description)
    for rows in stats.topics:
        missing = [row.topic for row in rows if row.stats is None]
        if missing and len(missing) < len(rows):  # a topic that does not exist misses all
            raise LevelTopicError(f"the broker reports no statistics of {missing[0]}: try again")
    return Counter(
        {
            "parked": stats.entries(Role.LEVEL),
            "held": stats.entries(Role.HELD),
            "in the window": stats.entries(Role.WINDOW),
            "dead letters": stats.entries(Role.DEAD_LETTER),
        }
    )


def delete(
    client: Any,
    admin: TopicAdmin,
    description: LevelTopicDescription,
    *,
    discard: int | None = None,
) -> Counter[str]:
    """Delete a level topic with all its member topics; business topics stay.

    Nothing is deleted while entries are pending, or while a producer, mover or dispatcher is
    connected. No producer can open the topics while the entries are counted, so whatever a producer
    was told is stored counts. A refusal changes nothing. The level topic itself is deleted last, so
    that an interrupted deletion can be repeated.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        discard: number of pending entries to throw away; it must match the total of
            :func:`pending_entries`.

    Returns:
        The numbers of entries that were pending and are deleted.

    Raises:
        StillPendingError: entries are pending, and ``discard`` is not their number.
        LevelTopicError: a client is connected; the text names it.
    """
    connected = _connected(_everything(admin, description))
    if connected:
        raise LevelTopicError(
            f"level topic {description.topic} is in use: close producers, and stop mover and "
            f"dispatcher first. Connected: {listed(connected)}. Nothing was deleted"
        )
    metadata = members.metadata_of(admin, description.name)
    state = metadata.properties.get(DESCRIPTION_PROPERTY) if metadata is not None else None
    if begun := state == BEING_DELETED:
        _terminate(admin, description)
    # A broker may refuse exclusive producers of a terminated topic as if there were another.
    with nullcontext() if begun else closed_to_producers(client, _partitions(admin, description)):
        pending = pending_entries(admin, description)
        if pending.total() != (discard or 0):
            raise StillPendingError(_still_pending(description, pending, discard), pending.total())
        mark = {PLAN_PROPERTY: description.to_json(), DESCRIPTION_PROPERTY: BEING_DELETED}
        with suppress(NotFoundError):
            admin.set_properties(description.name, mark)
        # Exclusive producers end with a refusal, and leave no trace. Termination is for ever: it
        # keeps others out while these producers are closed and the topics are deleted.
        _terminate(admin, description)
    for member in reversed(list(description.members())):
        try:
            admin.delete(member.topic)
        except NotFoundError:
            continue  # an earlier deletion was interrupted
        except ConflictError as error:
            raise LevelTopicError(
                f"a client has connected to {member.topic} ({error.reason}), which was not deleted "
                "as a whole. Stop producers and movers, and delete again"
            ) from error
    return pending


def _terminate(admin: TopicAdmin, description: LevelTopicDescription) -> None:
    for member in description.members():
        with suppress(NotFoundError):
            admin.terminate(member.topic)


def _partitions(admin: TopicAdmin, description: LevelTopicDescription) -> list[TopicName]:
    """Return all partitions of the member topics that exist."""
    found: list[TopicName] = []
    for member in description.members():
        with suppress(NotFoundError):
            # An expansion that was not finished has added some that the description does not know.
            count = admin.partitioned_metadata(member.topic).partitions
            found += [member.topic.partition(index) for index in range(count)]
    return found


def _connected(stats: LevelTopicStatus) -> list[str]:
    """Return every connected producer and consumer with its partition, sorted."""
    found = set()
    for row in stats.rows():
        if row.stats is None:
            continue
        names = [f"producer {each.name}" for each in row.stats.publishers]
        for subscription in row.stats.subscriptions.values():
            names += [f"consumer {each.name or each.address}" for each in subscription.consumers]
        found |= {f"{name} ({TopicName.parse(row.topic).local})" for name in names}
    return sorted(found)


def _still_pending(
    description: LevelTopicDescription, pending: Counter[str], discard: int | None
) -> str:
    total = pending.total()
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in pending.items() if count)
    return (
        f"level topic {description.topic} holds {total:,} entries ({kinds or 'none'}), not "
        f"{discard or 0:,}: nothing was deleted. Hand off what is parked or held (`delaylevel "
        f"levels drain {shell(description.topic)}`), let the dispatcher release the window, replay "
        f"or discard dead letters (`delaylevel dlq list {shell(description.topic)}`), or throw all "
        f"away with `--discard {total}`"
    )
