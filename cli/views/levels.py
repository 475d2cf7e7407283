"""Level topics and their partitions as rows, and notes about those that nobody delivers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import BrokerError, BrokerUnreachableError
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import ALL, FinalWindow, LevelTopicDescription, Role
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.hosts import missing_hosts, summary
from delaylevel.topics.registry import FoundLevelTopic
from delaylevel.topics.status import LevelTopicStatus, PartitionStatus, status
from delaylevel.topics.targets import unsubscribed

from .output import emit_one, note
from .tables import Column
from .terminal import wrapped


def undelivered(admin: TopicAdmin, at: LevelTopicStatus, name: str = "") -> list[str]:
    """Return a line for each mover and dispatcher that the status shows to be missing."""
    described = at.description
    if not name:
        targets = described.targets
        name = TopicName.parse(targets[0] if len(targets) == 1 else described.topic).short
    try:
        return summary(missing_hosts(admin, at, name), name)
    except BrokerError:  # the role may not read the traces of a mover
        return []


def note_undelivered(admin: TopicAdmin, described: LevelTopicDescription, topic: str) -> None:
    """Print the missing mover and dispatcher on stderr; nothing if that cannot be found out."""
    roles = (Role.LEVEL, Role.WINDOW)
    try:
        at = status(admin, described, SystemClock().now_ms(), roles=roles)
    except BrokerError:
        return  # the result does not depend on it
    for line in undelivered(admin, at, topic):
        note(f"Note: {line}.")


def note_unsubscribed(admin: TopicAdmin, topic: TopicName) -> None:
    """Print on stderr that the broker may delete a business topic, if that can be found out."""
    try:
        found = unsubscribed(admin, topic)
    except BrokerError:
        return
    if found is not None:
        note(f"Note: {found}.")


# In a narrow terminal, what is set gives way to what happens.
DESCRIPTION = (
    Column("topic", "topic", head="LEVEL TOPIC"),
    Column("strategy", rank=3),
    Column("targets", "topic", rank=4),
    Column("partitions", "number", rank=7),
    Column("mover", rank=8),
    Column("final_window", rank=9),
    Column("window_partitions", "number"),
    Column("hold_pause_ms", "duration"),
    Column("on_missing_target"),
    Column("attribute"),
    Column("expire_after_ms", "duration"),
    Column("expired"),
    Column("paused", "topic", rank=5),
)
STATE = (
    Column("backlog_entries", "number", head="PARKED"),
    Column("next_hand_off_ms", "time", rank=2),
    Column("behind_ms", "duration"),
    Column("mover_alive", head="CONSUMED", rank=6),
)
#: A list has the settings that tell level topics apart.
LIST = (
    *(column for column in DESCRIPTION if column.rank or column.key == "topic"),
    *STATE,
    Column("problems", "count"),
)
DESCRIBE = (
    *DESCRIPTION,
    *STATE,
    Column("held_entries", "number", head="HELD"),
    Column("dead_letter_entries", "number", head="DEAD LETTERS"),
    Column("window_entries", "number", head="WINDOW TOPIC"),
    Column("log_entries", "number", head="JOURNAL"),
    Column("outcome_entries", "number", head="OUTCOMES"),
    Column("consumers"),
    Column("dispatchers"),
    Column("problems"),
)
PARTITIONS = (
    Column("level_name", head="LEVEL"),
    Column("partition", "number"),
    Column("backlog_entries", "number", head="BACKLOG"),
    Column("oldest_publish_ms", "time", rank=3),
    Column("oldest_hand_off_ms", "time"),
    Column("behind_ms", "duration"),
    Column("consumers", head="CONSUMED BY", rank=1),
)
LIST_LEGEND = "PARKED: entries in the levels; a batch is one."
LEGEND = (
    "PARKED, HELD, DEAD LETTERS, BACKLOG: entries; a batch is one. WINDOW TOPIC, JOURNAL: all "
    "entries that are kept, released ones included."
)


def emit_description(described: LevelTopicDescription, output: str) -> None:
    """Print the description of a level topic."""
    emit_one(description_view(described), DESCRIPTION, output)


def description_view(description: LevelTopicDescription) -> dict[str, Any]:
    """Return the description of a level topic as one row."""
    return {
        "topic": description.topic,
        "strategy": str(description.levels),
        **description.levels.to_json(),
        "targets": list(description.targets),
        "partitions": description.levels.partitions,
        "mover": description.mover.value,
        "final_window": description.final_window.value,
        "window_partitions": description.window_partitions
        if description.final_window is FinalWindow.TRACKER
        else None,
        "hold_pause_ms": description.hold_pause_ms,
        "attribute": description.attribute,
        "on_missing_target": description.on_missing_target.value,
        "expire_after_ms": description.expire_after_ms or None,
        "expired": description.expired.value,
        "paused": ["all" if name == ALL else name for name, _ in description.pauses.paused],
    }


def list_view(admin: TopicAdmin, found: FoundLevelTopic, now_ms: int) -> dict[str, Any]:
    """Return a level topic as one row; one whose state cannot be read does not hide the others."""
    problem = found.problem
    if found.description is not None:
        try:
            return status_view(admin, status(admin, found.description, now_ms))
        except BrokerError as error:
            if isinstance(error, BrokerUnreachableError) and not error.address:
                raise  # no broker answers
            problem = f"its state cannot be read: {error}"
    return {"topic": found.topic, "problem": problem, "problems": [problem]}


def problem_lines(rows: Sequence[dict[str, Any]], width: int | None) -> str:
    """Return the problems below the table of a list: a paragraph for each level topic."""
    lines = []
    for row in rows:
        if row["problems"]:
            lines += ["", TopicName.parse(row["topic"]).short]
            lines += [wrapped(line, width, "  ", "    ") for line in some(row["problems"])]
    return "\n".join(lines)


def status_view(admin: TopicAdmin, at: LevelTopicStatus) -> dict[str, Any]:
    """Return the state of a whole level topic as one row."""
    problems = [*at.problems, *(each.says for each in at.foreign), *undelivered(admin, at)]
    return {
        **description_view(at.description),
        "now_ms": at.now_ms,
        "backlog_entries": at.entries(Role.LEVEL),
        "next_hand_off_ms": at.next_hand_off_ms,
        "behind_ms": at.behind_ms or None,
        "mover_alive": at.mover_alive,
        "held_entries": at.entries(Role.HELD),
        "dead_letter_entries": at.entries(Role.DEAD_LETTER),
        "window_entries": at.tracked_entries(Role.WINDOW),
        "log_entries": at.tracked_entries(Role.JOURNAL),
        "outcome_entries": at.tracked_entries(Role.OUTCOMES),
        "dispatchers": list(at.consumers(Role.WINDOW)),
        "consumers": list(at.consumers(Role.LEVEL)),
        "problem": f"{len(problems)}: {problems[0]}" if problems else None,
        "problems": problems,
    }


def partition_view(row: PartitionStatus, now_ms: int) -> dict[str, Any]:
    """Return a partition as one row."""
    return {
        "level": row.level,
        "level_name": row.level_name,
        "role": row.role.value,
        "partition": row.partition,
        "backlog_entries": row.backlog_entries,
        "oldest_publish_ms": row.oldest_publish_ms,
        "oldest_hand_off_ms": row.oldest_hand_off_ms,
        "behind_ms": row.behind_ms(now_ms) or None,
        "storage_bytes": row.storage_bytes,
        "consumers": list(row.consumers),
        "topic": row.topic,
    }


def some(lines: Sequence[str], most: int = 5) -> list[str]:
    """Return the first lines, and the number of further ones."""
    if len(lines) <= most:
        return list(lines)
    return [*lines[:most], f"and {len(lines) - most} more"]
