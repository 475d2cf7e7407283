"""Expansion of level topics to longer delays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

from delaylevel.cluster.port import OperatorAdmin
from delaylevel.errors import InvalidStrategyError, LevelTopicError
from delaylevel.model.clock import duration_ms
from delaylevel.model.formatting import exact_duration
from delaylevel.model.level_topic import (
    DESCRIPTION_PROPERTY,
    PLAN_PROPERTY,
    LevelTopicDescription,
    Member,
    Role,
)
from delaylevel.model.strategy import Levels, PartitionStrategy

from . import members, safety
from .registry import describe
from .subscriptions import subscribe


def longer_levels(
    levels: Levels, maximum: timedelta | None, finer: Mapping[timedelta, timedelta] | None = None
) -> Levels:
    """Return the levels with longer maxima, and otherwise unchanged.

    Args:
        maximum: maximum delay of the coarsest level; None to leave it.
        finer: maximum delays of further levels, by their unit.

    Raises:
        InvalidStrategyError: a maximum would shrink, nothing would change, no level has one of
            the units, or there would be too many partitions.
    """
    wanted = dict(finer or {})
    if maximum is not None:
        wanted[levels.strategies[0].unit] = maximum
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


def expand(admin: OperatorAdmin, topic: str, levels: Levels) -> LevelTopicDescription:
    """Expand a level topic to longer delays, while producers and movers run.

    The new partitions are created with their subscription and policies before the description
    names them, so that nothing is published to a partition that no mover reads. Running producers
    and movers of this package read the new description by themselves. Call it again to finish an
    interrupted expansion.

    Args:
        topic: the level topic, or a topic that :func:`delaylevel.topics.describe` finds it by.
        levels: the new levels, made from the current ones by :func:`longer_levels`.

    Returns:
        The new description.

    Raises:
        InvalidStrategyError: the levels are no expansion of the current ones, or need more
            partitions than the broker allows.
        UnsafeNamespaceError: policies of the namespace would delete messages parked for that long.
        LevelTopicError: another client changed the level topic at the same time.
    """
    before = describe(admin, topic, search=True)
    if levels == before.levels:
        return before
    _check_expansion(before.levels, levels)
    after = replace(before, levels=levels, former=(*before.former, before.levels))
    policies = members.policies_of(admin, after.name)
    settings = admin.broker_settings()
    safety.check_partition_limit(after, settings.max_partitions)
    members.refuse_unsafe(admin, after, policies, settings)
    admin.set_properties(after.name, {PLAN_PROPERTY: after.to_json()})
    for member in after.members():
        if member.role is Role.LEVEL:
            _grow(admin, member)
            subscribe(admin, member)
            members.protect(admin, member, after, policies, settings)
    # Pulsar has no compare-and-set for properties: of two clients that expand at the same time,
    # the second one notices here or after its write.
    if describe(admin, after.topic).levels != before.levels:
        raise _changed(after)
    admin.set_properties(after.name, {DESCRIPTION_PROPERTY: after.to_json()})
    found = describe(admin, after.topic)
    if found.levels != levels:
        raise _changed(after)
    return found


def _check_expansion(before: Levels, after: Levels) -> None:
    def kind(levels: Levels) -> tuple[object, ...]:
        rest = ((item.unit, item.effective_lead) for item in levels.strategies)
        return (levels.overflow, *rest)

    same = kind(before) == kind(after)
    pairs = zip(before.strategies, after.strategies, strict=False)
    if not same or any(new.maximum_delay < old.maximum_delay for old, new in pairs):
        raise InvalidStrategyError(
            f"{after} is no expansion of {before}: units, leads and overflow stay, and a maximum "
            "only grows"
        )


def _grow(admin: OperatorAdmin, member: Member) -> None:
    has = admin.partitioned_metadata(member.topic).partitions
    if has > member.partitions:
        raise LevelTopicError(
            f"{member.topic} has {has} partitions already, more than {member.partitions}: an "
            "expansion to a longer maximum was not finished; repeat that one"
        )
    if has < member.partitions:
        admin.expand(member.topic, member.partitions)


def _changed(description: LevelTopicDescription) -> LevelTopicError:
    return LevelTopicError(
        f"level topic {description.topic} was changed by another client at the same time: see "
        "`delaylevel levels describe`, and expand it again if necessary"
    )


def _say(value: timedelta) -> str:
    return exact_duration(duration_ms(value))
