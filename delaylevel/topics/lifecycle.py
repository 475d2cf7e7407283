"""What becomes of level topics over time: expanded, left without business topics, deleted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta

from delaylevel.cluster.port import OperatorAdmin, PartitionStats, TopicAdmin
from delaylevel.errors import (
    ConflictError,
    InvalidInputError,
    InvalidStrategyError,
    LevelTopicError,
    NotFoundError,
    StillPendingError,
)
from delaylevel.model.clock import duration_ms, format_duration
from delaylevel.model.level_topic import (
    DESCRIPTION_PROPERTY,
    MEMBER_PROPERTY,
    PLAN_PROPERTY,
    SUBSCRIPTION,
    LevelTopicDescription,
    Member,
    MissingTarget,
    Role,
)
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName

from . import members as family
from . import registry as topics
from . import safety

_THREADS = 8


# -- a longer maximum


def longer_levels(
    levels: Levels, maximum: timedelta | None, finer: Mapping[timedelta, timedelta] | None = None
) -> Levels:
    """Return the levels with longer maxima; all else stays as it is.

    Args:
        levels: those of now.
        maximum: the coarsest level's, or None to leave it.
        finer: further levels' by their unit.

    Raises:
        InvalidStrategyError: a maximum would shrink or nothing would change, a unit is not one of
            the levels', or there would be too many partitions.
    """
    wanted = dict(finer or {})
    if maximum is not None:
        wanted[levels.strategies[0].unit] = maximum
    made = []
    for strategy in levels.strategies:
        longest = wanted.pop(strategy.unit, strategy.maximum_delay)
        if longest < strategy.maximum_delay:
            raise InvalidStrategyError(
                f"the level by {strategy.unit_name} takes up to {_say(strategy.maximum_delay)} and "
                f"cannot be made shorter ({_say(longest)}): partitions can only be added"
            )
        made.append(
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
    longer = Levels(made)
    if longer == levels:
        raise InvalidStrategyError(f"the levels are so already: {levels}")
    return longer


def expand(admin: OperatorAdmin, topic: str, levels: Levels) -> LevelTopicDescription:
    """Let a level topic take longer delays, while producers and movers run.

    First the new partitions are made, with subscription and policies; only then does the
    description say so. Nothing is published to a partition that a mover could not read. Running
    producers of this package read the description again by themselves, and so do movers.
    Interrupted, it is finished by calling it again.

    Args:
        admin: the cluster.
        topic: the level topic, or a topic that :func:`delaylevel.topics.describe` finds it by.
        levels: as :func:`longer_levels` makes them from the topic's own.

    Returns:
        What the level topic says of itself now.

    Raises:
        InvalidStrategyError: the levels are no expansion of the topic's own, or need more
            partitions than the broker allows.
        UnsafeNamespaceError: policies would eat what is parked for so long.
        LevelTopicError: somebody else changed the level topic meanwhile.
    """
    before = topics.describe(admin, topic, search=True)
    if levels == before.levels:
        return before
    _check_expansion(before.levels, levels)
    after = replace(before, levels=levels, former=(*before.former, before.levels))
    policies = family.policies_of(admin, after.name)
    settings = admin.broker_settings()
    safety.check_partition_limit(after, settings.max_partitions)
    family.refuse_unsafe(after, policies, settings)
    admin.set_properties(after.name, {PLAN_PROPERTY: after.to_json()})
    for member in after.members():
        if member.role is Role.LEVEL:
            _grow(admin, member)
            family.subscribe(admin, member)
            family.protect(admin, member, after, policies, settings)
    # There is no compare-and-set: who is second sees it here, or at the end.
    if topics.describe(admin, after.topic).levels != before.levels:
        raise _changed(after)
    admin.set_properties(after.name, {DESCRIPTION_PROPERTY: after.to_json()})
    found = topics.describe(admin, after.topic)
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
            f"{member.topic} has {has} partitions already, and {member.partitions} would do: an "
            "expansion to a longer maximum was not finished; ask for that one"
        )
    if has < member.partitions:
        admin.expand(member.topic, member.partitions)


def _changed(description: LevelTopicDescription) -> LevelTopicError:
    return LevelTopicError(
        f"level topic {description.topic} was changed by somebody else at the same time: look at "
        "`delaylevel levels describe`, and expand it again if need be"
    )


# -- what becomes of messages without a business topic


def set_on_missing_target(
    admin: TopicAdmin, topic: str, policy: MissingTarget
) -> LevelTopicDescription:
    """Say what becomes of messages whose business topic does not exist when they are handed off.

    Spark job and dispatcher take it up within seconds, a Function when it is restarted. What is
    held already is seen to at its next try.

    Args:
        admin: the cluster.
        topic: the level topic, or a topic that :func:`delaylevel.topics.describe` finds it by.
        policy: what becomes of them.
    """
    before = topics.describe(admin, topic, search=True)
    if before.on_missing_target is not policy:
        after = replace(before, on_missing_target=policy)
        admin.set_properties(after.name, {DESCRIPTION_PROPERTY: after.to_json()})
    return topics.describe(admin, before.topic)


# -- what is pending


@dataclass(frozen=True)
class PendingEntries:
    """What would be lost with a level topic, in entries. A batch is one entry.

    Attributes:
        parked: in the levels.
        held: their target could not be written.
        window: handed off to the window topic, and not released yet.
        dead_letters: could not be understood.
    """

    parked: int = 0
    held: int = 0
    window: int = 0
    dead_letters: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.parked + self.held + self.window + self.dead_letters

    def __str__(self) -> str:
        parts = [
            (self.parked, "parked"),
            (self.held, "held"),
            (self.window, "in the window"),
            (self.dead_letters, "dead letters"),
        ]
        listed = ", ".join(f"{count:,} {name}" for count, name in parts if count)
        return f"{self.total:,} entries" + (f" ({listed})" if listed else "")


def pending_entries(admin: TopicAdmin, description: LevelTopicDescription) -> PendingEntries:
    """Return what is not acknowledged in a level topic's family; a missing topic holds nothing.

    Raises:
        LevelTopicError: a partition cannot be asked: what it holds is not known.
    """
    counts: dict[Role, int] = dict.fromkeys(Role, 0)
    for member, figures in _all_figures(admin, description):
        if not figures:
            continue
        # More than are described, too: what is there would be deleted with them.
        for index in sorted({*range(member.partitions), *figures}):
            if index not in figures:
                raise LevelTopicError(f"{member.topic.partition(index)} cannot be asked: try again")
            subscription = figures[index].subscriptions.get(SUBSCRIPTION)
            counts[member.role] += subscription.backlog_entries if subscription else 0
    return PendingEntries(
        counts[Role.LEVEL], counts[Role.HELD], counts[Role.WINDOW], counts[Role.DEAD_LETTER]
    )


def _all_figures(
    admin: TopicAdmin, description: LevelTopicDescription
) -> list[tuple[Member, Mapping[int, PartitionStats]]]:
    def look(member: Member) -> tuple[Member, Mapping[int, PartitionStats]]:
        try:
            return member, admin.partitioned_stats(member.topic)
        except NotFoundError:
            return member, {}

    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(look, description.members()))


# -- business topics that are gone


@dataclass(frozen=True)
class Orphan:
    """A level topic that serves a business topic which does not exist, or a part of none.

    Attributes:
        topic: the level topic; or the topic whose level topic does not exist.
        description: of the level topic; None for a part of none.
        missing: targets that do not exist.
        pending: what it still holds.
        level_topic: for a part: the level topic that it belonged to.
    """

    topic: str
    description: LevelTopicDescription | None
    missing: tuple[str, ...]
    pending: PendingEntries
    level_topic: str | None = None

    @property
    def entirely(self) -> bool:
        """Whether none of its business topics exists."""
        return self.description is None or set(self.missing) == set(self.description.targets)


def orphans(admin: TopicAdmin, namespace: str) -> list[Orphan]:
    """Return the level topics of a namespace whose business topics are gone, sorted by name.

    Args:
        admin: the cluster.
        namespace: ``tenant/namespace`` of the level topics; business topics may be elsewhere.

    Raises:
        NotFoundError: the namespace does not exist.
    """
    found = []
    for item in topics.list_level_topics(admin, namespace):
        if item.description is None:
            continue
        missing = _missing(admin, item.description.targets)
        if missing:
            pending = pending_entries(admin, item.description)
            found.append(Orphan(item.topic, item.description, missing, pending))
    return sorted([*found, *_strays(admin, namespace)], key=lambda orphan: orphan.topic)


def _missing(admin: TopicAdmin, targets: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in targets if not admin.topic_exists(TopicName.parse(name)))


def _strays(admin: TopicAdmin, namespace: str) -> Iterable[Orphan]:
    """Yield topics that say they belong to a level topic that does not exist."""
    names = admin.list_partitioned_topics(namespace)
    full = {name.full for name in names}
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda name: family.metadata_of(admin, name), names))
    for name, metadata in zip(names, found, strict=True):
        owner = metadata.properties.get(MEMBER_PROPERTY) if metadata is not None else None
        if owner is None or owner == name.full or owner in full:
            continue
        figures = admin.partitioned_stats(name)
        entries = sum(
            stats.subscriptions[SUBSCRIPTION].backlog_entries
            for stats in figures.values()
            if SUBSCRIPTION in stats.subscriptions
        )
        yield Orphan(name.full, None, (), PendingEntries(parked=entries), owner)


# -- deletion


def delete(
    admin: OperatorAdmin, description: LevelTopicDescription, *, discard: int | None = None
) -> PendingEntries:
    """Delete a level topic with everything that belongs to it; business topics stay.

    Nothing is deleted while anything is pending, or while a producer, mover or dispatcher is
    connected. The level topic itself goes last, so that a deletion that was interrupted can be
    repeated.

    Args:
        admin: the cluster.
        description: the level topic.
        discard: throw away what is pending, if it is so many entries (see
            :class:`PendingEntries`).

    Returns:
        What was pending, and is gone.

    Raises:
        StillPendingError: something is pending, or another number of entries than named.
        LevelTopicError: somebody is connected; the text says who.
    """
    figures = _all_figures(admin, description)
    connected = sorted(
        {
            f"{name} ({member.topic.partition(index).local})"
            for member, stats in figures
            for index, item in stats.items()
            for name in (
                *(f"producer {name}" for name in item.producers),
                *(
                    f"consumer {consumer.name}"
                    for subscription in item.subscriptions.values()
                    for consumer in subscription.consumers
                ),
            )
        }
    )
    if connected:
        raise LevelTopicError(
            f"level topic {description.topic} is in use: close producers, and stop mover and "
            f"dispatcher first. Connected: {_some(connected)}. Nothing was deleted"
        )
    pending = pending_entries(admin, description)
    if discard is not None and discard < 0:
        raise InvalidInputError(f"discard is {discard}: it is a number of entries")
    if pending.total != (discard or 0):
        raise StillPendingError(_still_pending(description, pending, discard), pending.total)
    for member in reversed(list(description.members())):
        try:
            admin.delete(member.topic)
        except NotFoundError:
            continue  # an earlier deletion was interrupted
        except ConflictError as error:
            raise LevelTopicError(
                f"somebody connected to {member.topic} meanwhile ({error.reason}); it was not "
                "deleted as a whole. Stop producers and movers, and delete again"
            ) from error
    return pending


def _still_pending(
    description: LevelTopicDescription, pending: PendingEntries, discard: int | None
) -> str:
    if discard is not None:
        return (
            f"level topic {description.topic} holds {pending}, not {discard:,}: nothing was "
            f"deleted. `--discard {pending.total}` throws away what is there now"
        )
    ways = []
    if pending.parked or pending.held:
        ways.append("hand it off now with `--drain` (due times are kept)")
    if pending.window:
        ways.append("let the dispatcher release what is in the window")
    if pending.dead_letters:
        ways.append("see to the dead letters with `delaylevel dlq`")
    ways.append(f"throw it away with `--discard {pending.total}`")
    return (
        f"level topic {description.topic} still holds {pending}: nothing was deleted. "
        + "; ".join(ways)
    )


def _say(value: timedelta) -> str:
    return format_duration(duration_ms(value))


def _some(names: Sequence[str], most: int = 5) -> str:
    listed = ", ".join(names[:most])
    return listed if len(names) <= most else f"{listed} and {len(names) - most} more"
