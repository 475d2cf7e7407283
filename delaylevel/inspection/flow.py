"""How messages travel through a level topic at one moment, and how fast between two.

From statistics of the topics alone, and from the last few messages of each business topic, whose
due time says how late they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from delaylevel.cluster.port import PartitionStats, TopicAdmin
from delaylevel.cluster.reader import messages_in_range
from delaylevel.errors import NotFoundError
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription, Role
from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName

from .sampling import due_of

_THREADS = 8
_TAIL = 20
_MOST_TAILS = 16


@dataclass(frozen=True)
class Stage:
    """One step of the way, as it stands.

    Attributes:
        name: the level's unit, ``window``, ``held``, ``dead-letter``, or a business topic's full
            name.
        role: what it is; None for a business topic.
        pending_entries: entries that wait in it (a batch is one); None for a business topic.
        estimate: whether that is what the broker happens to know.
        messages_in: messages that it has got since the broker opened it.
        messages_out: messages that consumers of a business topic have got since then; None
            elsewhere.
        behind_ms: for how long the most overdue hand-off is overdue; None where there is none.
        next_hand_off_ms: when the next one is; None where nothing waits.
        alive: names of the consumers that hold it: movers, dispatchers; of a business topic, its
            applications'.
        unattended: how many of its partitions nobody holds.
    """

    name: str
    role: Role | None
    pending_entries: int | None
    estimate: bool
    messages_in: int
    messages_out: int | None
    behind_ms: int | None
    next_hand_off_ms: int | None
    alive: tuple[str, ...]
    unattended: int


@dataclass(frozen=True)
class Flow:
    """The whole way at one moment.

    Attributes:
        topic: the level topic.
        now_ms: the moment, ms since the epoch.
        stages: levels coarse to fine, window, business topics, held, dead letters.
        producers: how many producers are connected to the levels, movers included.
        late_ms: how late the last messages of the business topics were published or delivered by
            us, sorted; 0 for those that the broker still holds or held back itself.
    """

    topic: str
    now_ms: int
    stages: tuple[Stage, ...]
    producers: int
    late_ms: tuple[int, ...]


@dataclass(frozen=True)
class Rates:
    """What changed between two moments, a second; None where it cannot be said.

    Attributes:
        messages_in, messages_out: messages.
        pending: entries.
    """

    messages_in: float | None
    messages_out: float | None
    pending: float | None


def look(admin: TopicAdmin, client: Any, description: LevelTopicDescription, now_ms: int) -> Flow:
    """Look at every stage; nothing is acknowledged or moved.

    Args:
        admin: the cluster.
        client: a ``pulsar.Client``, for the last messages of the business topics.
        description: the level topic.
        now_ms: the present.
    """
    members = list(description.members())
    targets = [TopicName.parse(target) for target in description.targets]
    with ThreadPoolExecutor(_THREADS, "delaylevel-top") as pool:
        found = list(pool.map(lambda member: _stats(admin, member.topic), members))
        business = list(pool.map(lambda target: _stats(admin, target), targets))
        tails = [
            target.partition(index) if index >= 0 else target
            for target, stats in zip(targets, business, strict=True)
            for index in stats
        ][:_MOST_TAILS]
        late = [
            one
            for some in pool.map(lambda tail: _lateness(admin, client, tail), tails)
            for one in some
        ]
    stages = []
    producers: set[str] = set()
    for member, stats in zip(members, found, strict=True):
        if member.role is Role.LEVEL:
            level = description.levels[member.level]
            times = {
                index: oldest + level.hand_off_after_ms(index)
                for index, one in stats.items()
                if (oldest := _oldest(one)) is not None
            }
            stages.append(_stage(level.name, member.role, stats, times, now_ms))
            producers |= {name for one in stats.values() for name in one.producers}
        elif member.role is not Role.LOG:
            stages.append(_stage(member.role.value, member.role, stats, {}, now_ms))
    ending = [stage for stage in stages if stage.role in (Role.HELD, Role.DEAD_LETTER)]
    way = [stage for stage in stages if stage not in ending]
    if description.final_window is FinalWindow.BROKER:
        way.append(_broker_window(business))
    way += [_target(name.full, stats) for name, stats in zip(targets, business, strict=True)]
    return Flow(description.topic, now_ms, (*way, *ending), len(producers), tuple(sorted(late)))


def rates(before: Flow | None, now: Flow) -> Mapping[str, Rates]:
    """Return what has changed from one moment to the next, by the name of the stage."""
    known = {stage.name: stage for stage in before.stages} if before is not None else {}
    seconds = (now.now_ms - before.now_ms) / 1000 if before is not None else 0.0
    found = {}
    for stage in now.stages:
        old = known.get(stage.name)
        if old is None or seconds <= 0:
            found[stage.name] = Rates(None, None, None)
            continue
        found[stage.name] = Rates(
            _rate(old.messages_in, stage.messages_in, seconds),
            _rate(old.messages_out, stage.messages_out, seconds),
            None
            if old.pending_entries is None or stage.pending_entries is None
            else (stage.pending_entries - old.pending_entries) / seconds,
        )
    return found


def quantile(sorted_ms: Sequence[int], share: float) -> int | None:
    """Return a quantile of sorted figures; None of none."""
    if not sorted_ms:
        return None
    return sorted_ms[min(len(sorted_ms) - 1, int(share * len(sorted_ms)))]


def _rate(old: int | None, new: int | None, seconds: float) -> float | None:
    # The broker begins anew when it opens a topic again.
    return None if old is None or new is None or new < old else (new - old) / seconds


def _stats(admin: TopicAdmin, topic: TopicName) -> dict[int, PartitionStats]:
    """Return the figures of a topic's partitions; -1 is a topic without any."""
    try:
        if not admin.partitioned_metadata(topic).partitions:
            return {-1: admin.partition_stats(topic)}
        return dict(admin.partitioned_stats(topic))
    except NotFoundError:
        return {}


def _oldest(stats: PartitionStats) -> int | None:
    subscription = stats.subscriptions.get(SUBSCRIPTION)
    return None if subscription is None else subscription.oldest_publish_ms


def _stage(
    name: str,
    role: Role,
    stats: Mapping[int, PartitionStats],
    hand_off_ms: Mapping[int, int],
    now_ms: int,
) -> Stage:
    own = [one.subscriptions.get(SUBSCRIPTION) for one in stats.values()]
    alive = {consumer.name for one in own if one is not None for consumer in one.consumers}
    overdue = [now_ms - at for at in hand_off_ms.values() if at < now_ms]
    return Stage(
        name,
        role,
        sum(one.backlog_entries for one in own if one is not None),
        False,
        sum(one.messages_in for one in stats.values()),
        None,
        max(overdue, default=None),
        min((at for at in hand_off_ms.values() if at >= now_ms), default=None),
        tuple(sorted(alive)),
        sum(1 for one in own if one is None or not one.consumers),
    )


def _broker_window(business: Sequence[Mapping[int, PartitionStats]]) -> Stage:
    """Return what the broker holds back; every subscription of a partition holds the same."""
    held = sum(
        max((one.delayed_entries for one in stats.subscriptions.values()), default=0)
        for partitions in business
        for stats in partitions.values()
    )
    return Stage(Role.WINDOW.value, Role.WINDOW, held, True, 0, None, None, None, (), 0)


def _target(name: str, stats: Mapping[int, PartitionStats]) -> Stage:
    subscriptions = [one for each in stats.values() for one in each.subscriptions.values()]
    alive = {consumer.name for one in subscriptions for consumer in one.consumers}
    return Stage(
        name,
        None,
        None,
        False,
        sum(one.messages_in for one in stats.values()),
        sum(one.messages_out for one in subscriptions),
        None,
        None,
        tuple(sorted(alive)),
        0,
    )


def _lateness(admin: TopicAdmin, client: Any, partition: TopicName) -> list[int]:
    """Return how long after their due time the last messages were published."""
    try:
        last = admin.last_message_id(partition)
    except NotFoundError:
        return []
    if last is None or last.entry < 0:
        return []
    start = Position(last.ledger, max(0, last.entry - _TAIL + 1))
    found = []
    with closing(
        messages_in_range(client, partition.full, start, last.next_entry, queue=_TAIL)
    ) as messages:
        for message, *_ in messages:
            due_ms = due_of(message.properties())
            if due_ms is not None:
                found.append(max(0, message.publish_timestamp() - due_ms))
    return found[-_TAIL:]
