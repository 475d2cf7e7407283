"""Checks of what runs: movers, dispatcher, clocks of producers, and what piles up."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from delaylevel.errors import DelayLevelError
from delaylevel.model.formatting import format_duration
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, Mover, Role
from delaylevel.model.topic_name import TopicName

from .context import LevelTopicContext
from .finding import Outcome, Problem

# Of the broker's limit of acknowledgement ranges that it keeps.
_HOLES = 0.1
_DEFAULT_RANGES = 10_000
# Below so many a bookie's read-ahead does no harm that anybody would see.
_SPREAD = 20_000
_READ_AHEAD = "dbStorage_readAheadCacheBatchSize"
_READ_AHEAD_BEST = 20
_READ_AHEAD_DEFAULT = 100
_FREE_BYTES = 256 * 1024 * 1024


def mover(patient: LevelTopicContext) -> Outcome:
    """Somebody hands off what becomes near-due."""
    description = patient.description
    start = f"`delaylevel sync spark {description.topic}`"
    problems = []
    if description.mover is Mover.FUNCTION:
        start = f"`delaylevel function deploy {description.topic}`"
        problems += _function_problems(patient)
    rows = patient.status.mover_rows
    idle = [row for row in rows if not row.consumers]
    if idle and not problems:
        which = "nobody moves it" if len(idle) == len(rows) else f"nobody reads {idle[0].topic}"
        problems.append(Problem(f"{which}: {len(idle)} of {len(rows)} partitions", start))
    names = ", ".join(patient.status.consumers[:3])
    return Outcome.of(*problems, note=names)


def _function_problems(patient: LevelTopicContext) -> list[Problem]:
    from delaylevel.functions import health
    from delaylevel.functions.deployment import function_name

    description = patient.description
    function = function_name(description)
    again = f"`delaylevel function deploy {description.topic}`"
    try:
        found = health.status(
            patient.cluster.connection, patient.admin, description, function, patient.now_ms
        )
    except DelayLevelError as error:
        return [Problem(f"function {function}: {error}", again)]
    down = [str(item.number) for item in found.instances if not item.running]
    if not down:
        return []
    return [
        Problem(
            f"function {function}: {found.problems[0] if found.problems else 'instances are down'}",
            f"`delaylevel function restart {description.topic}`, and `delaylevel function logs`",
        )
    ]


def dispatcher(patient: LevelTopicContext) -> Outcome:
    """With a tracker, every window partition has a dispatcher."""
    description = patient.description
    if description.final_window is not FinalWindow.TRACKER:
        return Outcome.of(note="none needed: the broker holds what is near-due")
    rows = patient.status.rows(Role.WINDOW)
    idle = [row for row in rows if not row.consumers]
    if not idle:
        return Outcome.of(note=", ".join(patient.status.dispatchers[:3]))
    return Outcome.of(
        Problem(
            f"nobody releases what is due in {idle[0].topic}: {len(idle)} of {len(rows)} window "
            "partitions",
            f"`delaylevel dispatch run {description.topic}`",
        )
    )


def lateness(patient: LevelTopicContext) -> Outcome:
    """Hand-offs are behind by less than the lead."""
    behind_ms = patient.status.behind_ms
    lead_ms = patient.description.levels.smallest_lead_ms
    if not patient.status.late or not patient.status.mover_alive:
        # Without a mover that is no news.
        return Outcome.of(note=f"behind by {format_duration(behind_ms)}" if behind_ms else "")
    return Outcome.of(
        Problem(
            f"hand-offs are {format_duration(behind_ms)} behind, more than the lead of "
            f"{format_duration(lead_ms)}: messages arrive late",
            "see what holds the mover up (its log, a slow target), or give it more cores or "
            "instances; `delaylevel plan` says how many",
        )
    )


def lead(patient: LevelTopicContext) -> Outcome:
    """The lead covers a trigger of the mover."""
    trigger_ms, levels = patient.options.trigger_ms, patient.description.levels
    lead_ms = levels.smallest_lead_ms
    if trigger_ms is None or 2 * trigger_ms <= lead_ms:
        return Outcome.of(note=f"{format_duration(lead_ms)}")
    return Outcome.of(
        Problem(
            f"the mover looks every {format_duration(trigger_ms)}, and the lead is "
            f"{format_duration(lead_ms)}: a single batch that takes longer makes messages late",
            f"a trigger of {format_duration(lead_ms // 2)} or less, or a level topic with a longer "
            "lead",
        )
    )


def producer_clocks(patient: LevelTopicContext) -> Outcome:
    """No parked message was published in the future."""
    slack_ms = max(1000, patient.description.levels.smallest_lead_ms // 2)
    rows = [row for row in patient.status.partitions if row.backlog_entries]

    def ahead_ms(row: Any) -> int:
        name = TopicName.parse(row.topic)
        last = patient.admin.last_message_id(name)
        published = None if last is None else patient.admin.entry_publish_time(name, last)
        return 0 if published is None else published - patient.cluster.clock.now_ms()

    worst = max(
        zip(patient.cluster.each(ahead_ms, rows), rows, strict=True),
        default=None,
        key=lambda pair: pair[0],
    )
    if worst is None or worst[0] <= slack_ms:
        return Outcome.of()
    return Outcome.of(
        Problem(
            f"a producer of {worst[1].topic} has a clock that is {format_duration(worst[0])} ahead",
            "set the producers' clocks by NTP (chrony); nothing is lost, but due times that they "
            "count from now are wrong by as much",
        )
    )


def held(patient: LevelTopicContext) -> Outcome:
    """Nothing is held because its target cannot be written."""
    count = patient.status.held_entries
    if not count:
        return Outcome.of()
    return Outcome.of(
        Problem(
            f"{count:,} entries are held: their target could not be written",
            "they follow once it can be; the mover's log says why, and `delaylevel levels "
            "orphans` which are gone",
        )
    )


def dead_letters(patient: LevelTopicContext) -> Outcome:
    """No dead letters."""
    count = patient.status.dead_letter_entries
    if not count:
        return Outcome.of()
    topic = patient.description.topic
    return Outcome.of(
        Problem(
            f"{count:,} entries could not be understood",
            f"`delaylevel dlq list {topic}` says why; then replay or discard them",
        )
    )


def holes(patient: LevelTopicContext) -> Outcome:
    """Subscriptions have few holes: the broker forgets ranges beyond its limit."""
    name = "managedLedgerMaxUnackedRangesToPersist"
    limit = int((patient.cluster.configuration or {}).get(name, _DEFAULT_RANGES))
    partitions = [TopicName.parse(row.topic) for row in patient.status.mover_rows]
    watched: list[tuple[TopicName, tuple[str, ...]]] = [
        (partition, (SUBSCRIPTION,)) for partition in partitions
    ]
    if patient.description.final_window is FinalWindow.BROKER:
        watched += [
            (partition, tuple(stats.subscriptions))
            for found in patient.targets.values()
            for partition, stats in (found or {}).items()
        ]

    def count(item: tuple[TopicName, tuple[str, ...]]) -> list[tuple[int, str]]:
        cursors = patient.cursors(item[0])
        return [
            (
                int(cursors[key].get("totalNonContiguousDeletedMessagesRange", 0)),
                f"{key} of {item[0]}",
            )
            for key in item[1]
            if key in cursors
        ]

    found = [pair for pairs in patient.cluster.each(count, watched) for pair in pairs]
    bad = sorted((pair for pair in found if pair[0] > _HOLES * limit), reverse=True)
    return Outcome.of(
        *(
            Problem(
                f"subscription {which} has {number:,} holes in what is acknowledged; the broker "
                f"keeps {limit:,} over a restart, and delivers the rest again",
                "see which consumer keeps messages for long, or has died with them; a finer level "
                "below leaves less in the broker's hands",
            )
            for number, which in bad
        )
    )


def read_ahead(patient: LevelTopicContext) -> Outcome:
    """Bookies do not read far ahead where due times are spread."""
    if patient.description.final_window is not FinalWindow.BROKER:
        return Outcome.of(note="no random reads: the dispatcher holds what is near-due")
    conf = patient.options.bookie_conf
    if conf is not None:
        size = _setting(conf, _READ_AHEAD, _READ_AHEAD_DEFAULT)
        if size <= _READ_AHEAD_BEST:
            return Outcome.of(note=f"{_READ_AHEAD}={size}")
        return Outcome.of(
            Problem(
                f"{_READ_AHEAD}={size}: bookies read ahead what is delivered much later",
                f"{_READ_AHEAD}={_READ_AHEAD_BEST} in bookkeeper.conf, or --final-window tracker",
            )
        )

    def delayed(partition: TopicName) -> int:
        stats = patient.admin.delayed_counts(partition)
        return max(stats.values(), default=0)

    partitions = [name for found in patient.targets.values() for name in found or ()]
    most = max(patient.cluster.each(delayed, partitions), default=0)
    if most < _SPREAD:
        return Outcome.of(note="few messages wait in the broker's timer")
    return Outcome.of(
        Problem(
            f"{most:,} messages wait in the broker's timer: with due times that are spread, "
            "delivery slows down to some hundreds a second",
            f"{_READ_AHEAD}={_READ_AHEAD_BEST} in bookkeeper.conf (name the file with "
            "--bookie-conf), a finer level below, or --final-window tracker",
        )
    )


def disk(patient: LevelTopicContext) -> Outcome:
    """The disk that the dispatcher spills to has room for the window."""
    folder = patient.options.spill_dir
    if folder is None:
        if patient.description.final_window is not FinalWindow.TRACKER:
            return Outcome.of(note="nothing is spilled: the broker holds what is near-due")
        return Outcome.skip("name the dispatcher's directory with --spill-dir")
    if not folder.is_dir():
        return Outcome.of(
            Problem(f"{folder} is no directory", "make it, or name the dispatcher's own")
        )
    window = sum(row.storage_bytes for row in patient.status.rows(Role.WINDOW))
    free, needed = shutil.disk_usage(folder).free, max(_FREE_BYTES, 2 * window)
    if free >= needed:
        return Outcome.of(note=f"{free / 1e9:,.1f} GB free")
    return Outcome.of(
        Problem(
            f"{folder} has {free / 1e6:,.0f} MB free; the window may need {needed / 1e6:,.0f} MB",
            "free some, or another directory; a finer level below makes the window smaller",
        )
    )


def _setting(conf: Path, name: str, default: int) -> int:
    found = default
    for line in conf.read_text(encoding="utf-8").splitlines():
        key, separator, value = line.strip().partition("=")
        if separator and key.strip() == name and value.strip().isdecimal():
            found = int(value)
    return found
