"""Checks of running processes: movers, dispatchers, producers' clocks, and growing backlogs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from delaylevel.cluster.rules import Problem
from delaylevel.cluster.threads import in_parallel
from delaylevel.errors import DelayLevelError
from delaylevel.model.formatting import format_duration, format_instant, shell
from delaylevel.model.level_topic import ALL, SUBSCRIPTION, FinalWindow, Mover, Role
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.hosts import missing_dispatcher
from delaylevel.topics.status import PartitionStatus

from .context import Finding, LevelTopicContext

# The tolerated share of the broker's limit of acknowledged ranges.
_HOLES = 0.1
_RANGES = "managedLedgerMaxUnackedRangesToPersist"
_DEFAULT_RANGES = 10_000
# With about twice as many, brokers were seen to dispatch hardly anything, whatever their limit.
_SLOW_RANGES = 50_000


def mover(context: LevelTopicContext) -> Finding:
    """Check that every partition of the levels and the held topic has a mover."""
    description = context.description
    remedy = f"`delaylevel run {shell(description.topic)}`"
    problems = []
    if description.mover is Mover.FUNCTION:
        remedy = f"`delaylevel mover deploy {shell(description.topic)}`"
        problems += _function_problems(context, remedy)
    rows = context.status.rows(Role.LEVEL, Role.HELD)
    idle = [row for row in rows if not row.consumers]
    if idle and not problems:
        all_idle = len(idle) == len(rows)
        missing = "no mover is connected" if all_idle else f"no mover reads {idle[0].topic}"
        problems.append(_unattended(missing, idle, rows, remedy))
    return Finding.of(problems, ", ".join(context.status.consumers[:3]))


def _function_problems(context: LevelTopicContext, deploy: str) -> list[Problem]:
    from delaylevel.functions import health
    from delaylevel.functions.deployment import function_name

    description = context.description
    function = function_name(description)
    try:
        found = health.status(
            context.cluster.connection, context.admin, description, context.now_ms
        )
    except DelayLevelError as error:
        return [Problem(f"function {function}: {error}", deploy)]
    if all(item.running for item in found.instances):
        return [Problem(f"function {function}: {line}", deploy) for line in found.misconfigured]
    return [
        Problem(
            f"function {function}: {found.problems[0] if found.problems else 'instances are down'}",
            f"`pulsar-admin functions restart --fqfn {shell(function)}`, and read the log of its "
            "instances on the workers",
        )
    ]


def dispatcher(context: LevelTopicContext) -> Finding:
    """Check that every window partition has a dispatcher that releases, if one is needed."""
    if context.description.final_window is not FinalWindow.TRACKER:
        return Finding(note="none needed: the broker holds near-due messages")
    rows = context.status.rows(Role.WINDOW)
    idle = [row for row in rows if not row.consumers]
    if not idle:
        stale = missing_dispatcher(context.status, context.description.topic)
        return Finding.of(filter(None, [stale]), ", ".join(context.status.dispatchers[:3]))
    command = "dispatcher run" if context.description.mover is Mover.FUNCTION else "run"
    remedy = f"`delaylevel {command} {shell(context.description.topic)}`"
    missing = f"no dispatcher serves {idle[0].topic}"
    return Finding.of([_unattended(missing, idle, rows, remedy)])


def _unattended(
    missing: str, idle: Sequence[PartitionStatus], rows: Sequence[PartitionStatus], remedy: str
) -> Problem:
    return Problem(f"{missing}: {len(idle)} of {len(rows)} partitions have no consumer", remedy)


def pauses(context: LevelTopicContext) -> Finding:
    """Check that no targets are paused."""
    description = context.description
    return Finding.of(
        Problem(
            f"{'all targets are' if name == ALL else f'{name} is'} paused since "
            f"{format_instant(since_ms)}: due messages wait in the window",
            f"`delaylevel levels resume {shell(description.topic)}"
            + ("`" if name == ALL else f" --target {shell(name)}`"),
        )
        for name, since_ms in description.pauses.paused
    )


def lateness(context: LevelTopicContext) -> Finding:
    """Check that hand-offs are behind by less than the lead."""
    behind_ms = context.status.behind_ms
    lead_ms = context.description.levels.smallest_lead_ms
    if not context.status.late or not context.status.mover_alive:
        # A missing mover is the finding of another check.
        return Finding(note=f"behind by {format_duration(behind_ms)}" if behind_ms else "")
    return Finding.failed(
        f"hand-offs are {format_duration(behind_ms)} behind, more than the lead of "
        f"{format_duration(lead_ms)}: messages arrive late",
        "find the cause of the delay (the mover's log, a slow target), or give the mover more "
        "cores or instances",
    )


def producer_clocks(context: LevelTopicContext) -> Finding:
    """Check that no parked message was published in the future."""
    slack_ms = max(1000, context.description.levels.smallest_lead_ms // 2)
    topics = [row.topic for row in context.status.partitions if row.backlog_entries]

    def first_ahead(topic: str) -> object:
        until_ms = context.cluster.clock.now_ms() + slack_ms
        return context.admin.message_id_at(TopicName.parse(topic), until_ms + 1)

    found = zip(topics, in_parallel(first_ahead, topics), strict=True)
    wrong = [topic for topic, position in found if position is not None]
    if not wrong:
        return Finding()
    return Finding.failed(
        f"the clock of a producer of {wrong[0]} is more than {format_duration(slack_ms)} ahead",
        "synchronize the producers' clocks with NTP (chrony); no message is lost, but due "
        "times that are computed from this clock are wrong by as much",
    )


def held(context: LevelTopicContext) -> Finding:
    """Check that no messages are held because their target cannot be written."""
    return _empty(
        context.status.held_entries,
        "entries are held because their target could not be written",
        "the mover delivers them when it can write the target; its log has the reason",
    )


def dead_letters(context: LevelTopicContext) -> Finding:
    """Check that there are no dead letters."""
    return _empty(
        context.status.dead_letter_entries,
        "entries are dead letters: messages that could not be read or delivered",
        f"list them with `delaylevel dlq list {shell(context.description.topic)}`, then "
        "replay or discard "
        "them",
    )


def _empty(entries: int, problem: str, remedy: str) -> Finding:
    return Finding.failed(f"{entries:,} {problem}", remedy) if entries else Finding()


def holes(context: LevelTopicContext) -> Finding:
    """Check for holes in acknowledgements: the broker forgets ranges beyond a limit.

    Consumers of business topics and the Function acknowledge messages one by one.
    """
    told = (context.cluster.configuration or {}).get(_RANGES)
    limit = int(told or _DEFAULT_RANGES)
    watched: dict[TopicName, tuple[str, ...]] = {
        TopicName.parse(row.topic): (SUBSCRIPTION,)
        for row in context.status.rows(Role.LEVEL, Role.HELD)
    }
    for partition, stats in context.target_partitions.items():
        watched[partition] = tuple(stats.subscriptions)

    def count(item: tuple[TopicName, tuple[str, ...]]) -> list[tuple[int, str]]:
        partition, subscriptions = item
        cursors = context.cursors(partition)
        return [
            (
                int(cursors[name].get("totalNonContiguousDeletedMessagesRange", 0)),
                f"{name} of {partition}",
            )
            for name in subscriptions
            if name in cursors
        ]

    found = chain.from_iterable(in_parallel(count, watched.items()))
    counts = sorted(found, reverse=True)
    remedy = "look for a consumer that keeps messages for long without acknowledging them"
    if context.description.final_window is FinalWindow.BROKER:
        remedy += "; a finer last level leaves fewer messages to the broker"
    assumed = "" if told else f" ({_RANGES}, assumed: only superusers may read it)"
    problems = [
        Problem(
            f"subscription {subscription} has {number:,} holes in its acknowledgements; the "
            f"broker keeps {limit:,}{assumed} over a restart, and delivers the rest again"
            + ("; with 100,000, brokers dispatch hardly anything" * (number > _SLOW_RANGES)),
            remedy,
        )
        for number, subscription in counts
        if number > min(_HOLES * limit, _SLOW_RANGES)
    ]
    most = counts[0][0] if counts else 0
    return Finding.of(problems, f"at most {most:,} of {limit:,}{assumed}")
