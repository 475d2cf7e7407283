"""Status of a level topic: statistics of its topics, backlogs and next hand-offs, and reports.

This is the one place that requests and interprets statistics. Status, inspection, doctor, the
metrics of the Spark job, deletion and the dispatchers derive their values from these classes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

from delaylevel.cluster.port import ClientStats, PartitionStats, SubscriptionStats, TopicAdmin
from delaylevel.cluster.rules import Problem
from delaylevel.cluster.threads import in_parallel
from delaylevel.errors import BrokerUnreachableError, DelayLevelError, NotFoundError
from delaylevel.model.clock import Clock, SystemClock, earliest
from delaylevel.model.formatting import format_duration, shell
from delaylevel.model.level_topic import (
    SUBSCRIPTION,
    LevelTopicDescription,
    Member,
    Mover,
    Role,
)
from delaylevel.model.topic_name import TopicName
from delaylevel.web.reports import DuePeriod, ProbeCheck, ProblemLine

__all__ = ["LevelTopicStatus", "PartitionStatus", "status"]

#: Properties of a dispatcher's consumers: its name in the group, and the URL of its HTTP service.
NAME_PROPERTY = "delaylevel.dispatcher"
ADDRESS_PROPERTY = "delaylevel.http"


@dataclass(frozen=True)
class PartitionStatus:
    """Status of one partition of a member topic.

    Attributes:
        topic: the partition's full name.
        role: the role of its topic.
        level: the index of its level, 0 for the coarsest; -1 outside the levels.
        level_name: the level's unit (``DAY``), or the role.
        partition: its number.
        backlog_entries: number of pending entries. A batch is one entry.
        storage_bytes: size of its ledgers, including entries that are handed off and still kept.
        oldest_publish_ms: publish time of the oldest pending entry; None if nothing is pending.
        oldest_hand_off_ms: hand-off time of that entry; None outside the levels.
        consumers: names of the mover's or dispatcher's consumers.
        stats: the broker's statistics; None if the partition is missing or was not reported.
    """

    topic: str
    role: Role
    level: int
    level_name: str
    partition: int
    backlog_entries: int
    storage_bytes: int
    oldest_publish_ms: int | None
    oldest_hand_off_ms: int | None
    consumers: tuple[str, ...]
    stats: PartitionStats | None = None

    @property
    def subscription(self) -> SubscriptionStats | None:
        """The durable subscription that keeps the messages; None if it is missing."""
        return None if self.stats is None else self.stats.subscriptions.get(SUBSCRIPTION)

    @property
    def owner(self) -> ClientStats | None:
        """The consumer that owns the partition: the first one, as the subscription is exclusive."""
        return next(iter(self.subscription.consumers), None) if self.subscription else None

    def behind_ms(self, now_ms: int) -> int:
        """Return for how long the oldest hand-off is overdue; 0 if it is not."""
        hand_off_ms = self.oldest_hand_off_ms
        return 0 if hand_off_ms is None else max(0, now_ms - hand_off_ms)


def window_stats(
    admin: TopicAdmin, description: LevelTopicDescription
) -> tuple[PartitionStatus, ...]:
    """Request the status of the window topic alone: of the partitions that the broker reports."""
    member = Member(description.window_topic, Role.WINDOW, description.window_partitions)
    rows = _rows(description, member, admin.partitioned_stats(member.topic))
    return tuple(row for row in rows if row.stats is not None)


def pending_entries_in(stats: PartitionStats) -> int:
    """Return the number of entries that the durable subscription has not acknowledged."""
    subscription = stats.subscriptions.get(SUBSCRIPTION)
    return 0 if subscription is None else subscription.backlog_entries


def _rows(
    description: LevelTopicDescription, member: Member, found: Mapping[int, PartitionStats]
) -> list[PartitionStatus]:
    level = description.levels[member.level] if member.role is Role.LEVEL else None
    rows = []
    for index in sorted({*range(member.partitions), *found}):
        stats = found.get(index)
        known = None if stats is None else stats.subscriptions.get(SUBSCRIPTION)
        subscription = known or SubscriptionStats(0)
        publish_ms, hand_off_ms = subscription.oldest_publish_ms, None
        if level is not None and publish_ms is not None:
            hand_off_ms = publish_ms + level.hand_off_after_ms(index)
        rows.append(
            PartitionStatus(
                topic=member.topic.partition(index).full,
                role=member.role,
                level=member.level,
                level_name=member.role.value if level is None else level.name,
                partition=index,
                backlog_entries=subscription.backlog_entries,
                storage_bytes=0 if stats is None else stats.storage_bytes,
                oldest_publish_ms=publish_ms,
                oldest_hand_off_ms=hand_off_ms,
                consumers=tuple(item.name for item in subscription.consumers),
                stats=stats,
            )
        )
    return rows


# The names of our readers begin with it; their subscriptions end with them.
_READER_PREFIX = f"{SUBSCRIPTION}-"
# Subscriptions of the broker itself, such as that of compaction.
_BROKERS_OWN = ("__", "pulsar.")


def foreign_subscriptions(rows: Sequence[PartitionStatus]) -> list[Problem]:
    """Return the subscriptions of a member topic that are not ours, sorted by name."""
    topic = TopicName.parse(rows[0].topic).without_partition
    if rows[0].role is Role.OUTCOMES:
        return []  # applications may follow them
    found: dict[str, list[SubscriptionStats]] = {}
    for row in rows:
        subscriptions = row.stats.subscriptions if row.stats is not None else {}
        for name, subscription in subscriptions.items():
            our_reader = not subscription.durable and name.startswith(_READER_PREFIX)
            if name != SUBSCRIPTION and not our_reader and not name.startswith(_BROKERS_OWN):
                found.setdefault(name, []).append(subscription)
    problems = []
    for name, everywhere in sorted(found.items()):
        says = f"subscription {name} of {topic} is not ours: it receives what waits there"
        remedy = (
            "close its consumers, or let their pattern leave out our topics (docs/concepts.md, "
            '"Consumers with a pattern")'
        )
        if any(subscription.durable for subscription in everywhere):
            says += ", and keeps them stored"
            remedy += (
                f"; then `pulsar-admin topics unsubscribe {shell(topic)} --subscription "
                f"{shell(name)} --force`"
            )
        addresses = sorted({one.address for item in everywhere for one in item.consumers})
        if addresses:
            says += f" (consumers at {', '.join(addresses)})"
        problems.append(Problem(says, remedy))
    return problems


# Lateness of a healthy mover: one trigger, grouped acknowledgements, the start of a Function.
_USUAL_DELAY_MS = 5000


@dataclass(frozen=True)
class LevelTopicStatus:
    """Status of a level topic at one moment.

    Attributes:
        description: the level topic.
        now_ms: the moment, ms since the epoch.
        everything: a row for each partition of its member topics: levels coarse to fine, held, dead
            letters, window, journal, outcomes.
    """

    description: LevelTopicDescription
    now_ms: int
    everything: tuple[PartitionStatus, ...]

    def rows(self, *roles: Role) -> tuple[PartitionStatus, ...]:
        """Return a row for each partition of the member topics with one of the roles; or of all."""
        return tuple(row for row in self.everything if not roles or row.role in roles)

    @property
    def topics(self) -> Iterator[list[PartitionStatus]]:
        """The rows of each member topic."""
        for _, rows in groupby(self.everything, lambda row: (row.role, row.level)):
            yield list(rows)

    def entries(self, role: Role) -> int:
        """Return the number of entries that are not acknowledged in topics with a role."""
        return sum(row.backlog_entries for row in self.rows(role))

    @property
    def problems(self) -> tuple[str, ...]:
        """Missing topics and subscriptions, a line each."""
        found = []
        for row in self.rows():
            if row.stats is None:
                found.append(f"{row.topic} does not exist, or the broker reports no statistics")
            elif row.subscription is None:
                found.append(
                    f"{row.topic} has no subscription {SUBSCRIPTION!r}, so nothing keeps the "
                    "messages that are parked there; create the level topic again to repair it"
                )
        return tuple(found)

    @property
    def foreign(self) -> tuple[Problem, ...]:
        """The subscriptions of the member topics that are not ours."""
        return tuple(chain.from_iterable(map(foreign_subscriptions, self.topics)))

    def tracked_entries(self, role: Role) -> int | None:
        """Return the entries in a topic that belongs to a tracker; None with ``broker``."""
        return self.entries(role) if self.description.cancellable else None

    @property
    def next_hand_off_ms(self) -> int | None:
        """The earliest hand-off of what is pending; it has passed if the mover is behind."""
        return earliest(row.oldest_hand_off_ms for row in self.rows(Role.LEVEL))

    @property
    def levels(self) -> list[tuple[str, int, int | None]]:
        """Name, number of entries and earliest hand-off (ms since the epoch) of each level."""
        found = []
        for rows in self.topics:
            if rows[0].role is Role.LEVEL:
                entries = sum(row.backlog_entries for row in rows)
                next_ms = earliest(row.oldest_hand_off_ms for row in rows)
                found.append((rows[0].level_name, entries, next_ms))
        return found

    @property
    def behind_ms(self) -> int:
        """For how long the most overdue hand-off is overdue; 0 if none is."""
        return max((row.behind_ms(self.now_ms) for row in self.rows(Role.LEVEL)), default=0)

    @property
    def late(self) -> bool:
        """True if hand-offs are so far behind that messages arrive late."""
        lead_ms = self.description.levels.smallest_lead_ms
        return self.behind_ms > max(lead_ms, _USUAL_DELAY_MS)

    @property
    def mover_alive(self) -> bool:
        """True if every partition of every level has a consumer."""
        rows = self.rows(Role.LEVEL)
        return bool(rows) and all(row.consumers for row in rows)

    def consumers(self, role: Role) -> tuple[str, ...]:
        """Return the names of the movers or dispatchers that read the topics with a role."""
        return tuple(sorted({name for row in self.rows(role) for name in row.consumers}))


def status(
    admin: TopicAdmin,
    description: LevelTopicDescription,
    now_ms: int,
    *,
    as_described: bool = True,
    roles: Collection[Role] = tuple(Role),
) -> LevelTopicStatus:
    """Return the status of a level topic; nothing is acknowledged or moved.

    One request for each member topic, eight at a time. A topic that does not exist has partitions
    without statistics. Times are as accurate as the producers' clocks.

    Args:
        description: the level topic, e.g. from :func:`delaylevel.topics.describe`.
        now_ms: the present, ms since the epoch.
        as_described: return exactly the partitions that the description names, and request those
            that the broker left out one by one. Otherwise return the additional partitions of an
            unfinished expansion too.
        roles: the roles of the member topics; all by default.

    Raises:
        BrokerError: a topic's statistics cannot be read.
    """

    def look(member: Member) -> list[PartitionStatus]:
        try:
            found = dict(admin.partitioned_stats(member.topic))
        except NotFoundError:
            return _rows(description, member, {})
        if as_described:
            described = range(member.partitions)
            for index in sorted({*described} - found.keys()):
                with suppress(NotFoundError):
                    found[index] = admin.partition_stats(member.topic.partition(index))
            found = {index: stats for index, stats in found.items() if index in described}
        return _rows(description, member, found)

    members = [member for member in description.members() if member.role in roles]
    found = in_parallel(look, members)
    return LevelTopicStatus(description, now_ms, tuple(chain.from_iterable(found)))


def reported(
    admin: TopicAdmin, description: LevelTopicDescription, clock: Clock | None = None
) -> LevelTopicStatus:
    """Return the present status of what processes report: levels, window, held and dead letters."""
    now_ms = (clock or SystemClock()).now_ms()
    roles = (Role.LEVEL, Role.HELD, Role.DEAD_LETTER, Role.WINDOW)
    return status(admin, description, now_ms, as_described=False, roles=roles)


#: Time for which statistics of the broker are used again, in s.
_FRESH_S = 10.0


class StatusCache:
    """The status of level topics, at most some seconds old; None if no broker reports one."""

    def __init__(self, read: Callable[[LevelTopicDescription], LevelTopicStatus]) -> None:
        self._read = read
        self._requesting = threading.Lock()
        self._found: dict[str, tuple[float, LevelTopicStatus | None]] = {}  # with its time, in s
        self._silent_s = float("-inf")  # time at which no broker answered, in s

    def read(self, description: LevelTopicDescription) -> LevelTopicStatus | None:
        """Return the status of a level topic."""
        # Whoever waits here finds the answer of the request that is under way.
        with self._requesting:
            now_s = time.monotonic()
            found = self._found.get(description.topic)
            if found is not None and now_s - found[0] <= _FRESH_S:
                return found[1]
            if now_s - self._silent_s <= _FRESH_S:  # one wait is enough for all level topics
                return None
            answer = None
            try:
                answer = self._read(description)
            except DelayLevelError as error:
                if isinstance(error, BrokerUnreachableError) and not error.address:
                    self._silent_s = time.monotonic()
            self._found[description.topic] = time.monotonic(), answer
            return answer

    def read_all(
        self, descriptions: Iterable[LevelTopicDescription]
    ) -> dict[str, LevelTopicStatus | None]:
        """Return the status of level topics by name."""
        return {each.topic: self.read(each) for each in descriptions}


def backlog_series(part: str, found: Mapping[str, LevelTopicStatus | None]) -> Iterator[Any]:
    """Yield the series of what waits, by level topic; None for one that is not reported."""
    from prometheus_client import core

    yield core.GaugeMetricFamily(
        f"delaylevel_{part}_broker_answers",
        "1 if the broker reported the state of every level topic, 0 if not.",
        value=int(None not in found.values()),
    )

    def gauge(name: str, text: str, *labels: str) -> Any:
        return core.GaugeMetricFamily(
            f"delaylevel_{part}_{name}", text, labels=("level_topic", *labels)
        )

    lag = gauge("lag_seconds", "Time that the oldest ready message has been waiting.")
    held = gauge("held_entries", "Entries whose target cannot be written.")
    dead = gauge("dead_letter_entries", "Entries that could not be understood.")
    parked = gauge("parked_entries", "Entries that wait in a level.", "level")
    window = gauge("window_entries", "Entries of the window topic that are not all released.")
    for topic, item in found.items():
        if item is None:
            continue
        lag.add_metric((topic,), item.behind_ms / 1000)
        held.add_metric((topic,), item.entries(Role.HELD))
        dead.add_metric((topic,), item.entries(Role.DEAD_LETTER))
        for name, entries, _ in item.levels:
            parked.add_metric((topic, name), entries)
        in_window = item.tracked_entries(Role.WINDOW)
        if in_window is not None:
            window.add_metric((topic,), in_window)
    yield from (lag, held, dead, parked, window)


def lag_check(
    name: str, description: LevelTopicDescription, at: LevelTopicStatus | None
) -> ProbeCheck:
    """Check that no hand-off is overdue for longer than the lead."""
    if at is None:
        text = "the broker has not reported the backlog: is it reachable?"
        return ProbeCheck(name, False, text)
    lead_ms = description.levels.smallest_lead_ms
    text = f"{format_duration(at.behind_ms)} behind; the lead is {format_duration(lead_ms)}"
    return ProbeCheck(name, at.behind_ms < lead_ms, text)


def parked_levels(found: LevelTopicStatus | None) -> list[DuePeriod]:
    """Return the number of entries in each level, with the time of the next hand-off."""
    if found is None:
        return []
    periods = []
    for label, entries, next_ms in found.levels:
        if next_ms is not None:
            left_ms = next_ms - found.now_ms
            label += f", next in {format_duration(left_ms)}" if left_ms > 0 else ", next now"
        periods.append(DuePeriod(label, entries))
    return periods


def topic_problems(found: LevelTopicStatus) -> list[ProblemLine]:
    """Return the present problems of the levels, of held messages and of dead letters."""
    name = found.description.name.short
    lines = []
    parked = found.entries(Role.LEVEL)
    if parked and not found.consumers(Role.LEVEL):
        command = "mover deploy" if found.description.mover is Mover.FUNCTION else "run"
        remedy = f"Start one: `delaylevel {command} {shell(name)}`."
        lines.append(ProblemLine(f"No mover reads the levels; {parked:,} entries wait", remedy))
    behind_ms = found.behind_ms
    if behind_ms >= found.description.levels.smallest_lead_ms:
        text = f"Hand-offs are {format_duration(behind_ms)} behind"
        remedy = f"See the mover's log, and `delaylevel doctor {shell(name)}`."
        lines.append(ProblemLine(text, remedy))
    held = found.entries(Role.HELD)
    if held:
        remedy = (
            f'Their target could not be written. `delaylevel pending {shell(name)} --where "role = '
            "'held'\" -o json` shows the reasons; the mover tries again after each pause."
        )
        lines.append(ProblemLine(f"{held:,} entries are held", remedy))
    dead = found.entries(Role.DEAD_LETTER)
    if dead:
        text = f"{dead:,} entries are dead letters"
        remedy = f"`delaylevel dlq list {shell(name)}` shows them; replay or discard them."
        lines.append(ProblemLine(text, remedy))
    return lines
