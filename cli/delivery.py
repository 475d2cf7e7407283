"""Notes about level topics whose messages nobody delivers, below the results of commands."""

from __future__ import annotations

from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import BrokerError
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.hosts import missing_hosts, summary
from delaylevel.topics.stats import read_stats
from delaylevel.topics.status import LevelTopicStatus
from delaylevel.topics.targets import unsubscribed

from .output import note


def short_name(described: LevelTopicDescription) -> str:
    """Return the name for a level topic in commands: its business topic if it has only one."""
    targets = described.targets
    return TopicName.parse(targets[0] if len(targets) == 1 else described.topic).short


def undelivered(admin: TopicAdmin, at: LevelTopicStatus) -> list[str]:
    """Return a line for each mover and dispatcher that the status shows to be missing.

    None if the role may not read the traces of a mover.
    """
    name = short_name(at.description)
    rows = (*at.partitions, *at.others)
    try:
        return summary(missing_hosts(admin, at.description, rows, name, at.now_ms), name)
    except BrokerError:
        return []


def note_undelivered(admin: TopicAdmin, described: LevelTopicDescription, topic: str) -> None:
    """Print the missing mover and dispatcher on stderr; nothing if that cannot be found out.

    Args:
        topic: the topic as the user named it.
    """
    roles = (Role.LEVEL, Role.WINDOW)
    try:
        found = read_stats(admin, described, as_described=True, roles=roles).partitions
        missing = missing_hosts(admin, described, found, topic, SystemClock().now_ms())
    except BrokerError:
        return  # the result does not depend on it
    for line in summary(missing, topic):
        note(f"Note: {line}.")


def note_unsubscribed(admin: TopicAdmin, topic: TopicName) -> None:
    """Print on stderr that the broker may delete a business topic, if that can be found out."""
    try:
        found = unsubscribed(admin, topic)
    except BrokerError:
        return
    if found is not None:
        note(f"Note: {found}.")
