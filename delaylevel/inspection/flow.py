"""Flow of messages through a level topic: its stages at one moment, and rates between two.

The source is the statistics of the topics, and for the lateness the due times of the last few
messages of each business topic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from delaylevel.cluster.port import PartitionStats, TopicAdmin
from delaylevel.cluster.reader import messages_in_range
from delaylevel.cluster.targets.receivers import topic_stats
from delaylevel.cluster.threads import in_parallel
from delaylevel.errors import NotFoundError
from delaylevel.model.envelope import due_of
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Role
from delaylevel.model.message import properties_of
from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.registry import describe
from delaylevel.topics.status import MemberStats, status

# The lateness comes from the last messages of the first partitions of business topics.
_LAST_MESSAGES = 20
_MOST_PARTITIONS = 16


@dataclass(frozen=True)
class Stage:
    """One stage of the path of messages, at one moment.

    Attributes:
        estimate: whether that number covers only the messages that the broker has in memory.
        messages_out: number of messages that consumers of a business topic received since then;
            None elsewhere.
    """

    name: str
    role: Role | None
    pending_entries: int | None
    estimate: bool = False
    messages_in: int = 0
    messages_out: int | None = None
    behind_ms: int | None = None
    next_hand_off_ms: int | None = None
    alive: tuple[str, ...] = ()
    unattended: int = 0


@dataclass(frozen=True)
class Flow:
    """All stages of a level topic at one moment.

    Attributes:
        late_ms: lateness of the last messages of the business topics when they were published or
            delivered by us, sorted; 0 for those that the broker still holds or held back itself.
        paused: name of each paused target, or ``*`` for all, and the begin, ms since the epoch.
    """

    topic: str
    now_ms: int
    stages: tuple[Stage, ...]
    producers: int
    late_ms: tuple[int, ...]
    paused: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Rates:
    """Changes between two moments, per second; None if unknown."""

    messages_in: float | None
    messages_out: float | None
    pending: float | None


def read_flow(
    admin: TopicAdmin, client: Any, description: LevelTopicDescription, now_ms: int
) -> Flow:
    """Return the state of every stage; nothing is acknowledged or moved.

    The ``pulsar.Client`` reads the last messages of the business topics. The description is read
    again, for its pauses.
    """
    description = describe(admin, description.topic)
    level_topic = status(admin, description, now_ms, as_described=False)
    targets = [TopicName.parse(target) for target in description.targets]
    found = in_parallel(lambda target: topic_stats(admin, target) or {}, targets)
    partitions = [partition for stats in found for partition in stats][:_MOST_PARTITIONS]
    late = chain.from_iterable(in_parallel(partial(_lateness, admin, client), partitions))
    late_ms = tuple(sorted(late))
    window = [_stage(member, now_ms) for member in level_topic.of(Role.WINDOW)]
    if description.final_window is FinalWindow.BROKER:
        window = [_broker_window(found)]
    stages = (
        *(_stage(member, now_ms) for member in level_topic.of(Role.LEVEL)),
        *window,
        *(_target(name.full, stats) for name, stats in zip(targets, found, strict=True)),
        *(_stage(member, now_ms) for member in level_topic.of(Role.HELD)),
        *(_stage(member, now_ms) for member in level_topic.of(Role.DEAD_LETTER)),
        *(_stage(member, now_ms) for member in level_topic.of(Role.OUTCOMES)),
    )
    producers = {name for member in level_topic.of(Role.LEVEL) for name in member.producers}
    paused = description.pauses.paused
    return Flow(description.topic, now_ms, stages, len(producers), late_ms, paused)


def rates(before: Flow | None, now: Flow) -> Mapping[str, Rates]:
    """Return the rates between two moments, by the name of the stage."""
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
    """Return a quantile of sorted values; None if there are none."""
    if not sorted_ms:
        return None
    return sorted_ms[min(len(sorted_ms) - 1, int(share * len(sorted_ms)))]


def _rate(old: int | None, new: int | None, seconds: float) -> float | None:
    # The broker's counters start at 0 when it opens the topic again.
    return None if old is None or new is None or new < old else (new - old) / seconds


def _stage(stats: MemberStats, now_ms: int) -> Stage:
    return Stage(
        name=stats.level_name,
        role=stats.member.role,
        pending_entries=stats.backlog_entries,
        messages_in=stats.messages_in,
        behind_ms=stats.behind_ms(now_ms) or None,
        next_hand_off_ms=min((at for at in stats.hand_offs_ms if at >= now_ms), default=None),
        alive=tuple(sorted(stats.consumers)),
        unattended=sum(1 for partition in stats.reported if not partition.consumers),
    )


def _broker_window(business: Sequence[Mapping[TopicName, PartitionStats]]) -> Stage:
    """Return the stage of messages that the broker holds back until they are due.

    Every subscription of a partition holds back the same messages.
    """
    held = sum(
        max((one.delayed_entries for one in stats.subscriptions.values()), default=0)
        for partitions in business
        for stats in partitions.values()
    )
    return Stage(Role.WINDOW.value, Role.WINDOW, held, estimate=True)


def _target(name: str, stats: Mapping[TopicName, PartitionStats]) -> Stage:
    subscriptions = [one for each in stats.values() for one in each.subscriptions.values()]
    alive = {consumer.name for one in subscriptions for consumer in one.consumers}
    return Stage(
        name,
        role=None,
        pending_entries=None,
        messages_in=sum(one.messages_in for one in stats.values()),
        messages_out=sum(one.messages_out for one in subscriptions),
        alive=tuple(sorted(alive)),
    )


def _lateness(admin: TopicAdmin, client: Any, partition: TopicName) -> list[int]:
    """Return the lateness of a partition's last messages at publication, in ms."""
    try:
        last = admin.last_message_id(partition)
    except NotFoundError:
        return []
    if last is None:
        return []
    start = Position(last.ledger, max(0, last.entry - _LAST_MESSAGES + 1))
    found = []
    with closing(
        messages_in_range(client, partition.full, start, last.next_entry, queue=_LAST_MESSAGES)
    ) as messages:
        for message, *_ in messages:
            due_ms = due_of(properties_of(message))
            if due_ms is not None:
                found.append(max(0, message.publish_timestamp() - due_ms))
    return found[-_LAST_MESSAGES:]
