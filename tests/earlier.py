"""Level topics and messages that commit 9205e8a stored, as ``tools.earlier_version`` recorded them.

The code of that commit knows neither kinds nor features. What it wrote must stay usable.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from delaylevel.model.level_topic import DESCRIPTION_PROPERTY, Member, Role
from delaylevel.model.message import ParkedMessage
from delaylevel.model.topic_name import TopicName

_FILE = Path(__file__).parent / "data" / "9205e8a.json"


@dataclass(frozen=True)
class EarlierMember:
    """A member topic with everything that it stored.

    Attributes:
        properties: the properties of the partitioned topic.
        messages: for each partition, its unacknowledged messages; all of them for a journal.
        states: for each partition of a journal, the state that the earlier version read from it.
    """

    member: Member
    properties: dict[str, str]
    messages: tuple[tuple[ParkedMessage, ...], ...]
    states: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class EarlierLevelTopic:
    """A level topic as it was stored."""

    topic: str
    members: tuple[EarlierMember, ...]

    @cached_property
    def properties(self) -> dict[str, str]:
        """The properties of the level topic."""
        return self.role(Role.LEVEL)[0].properties

    @property
    def description(self) -> str:
        """The stored description."""
        return self.properties[DESCRIPTION_PROPERTY]

    def role(self, *roles: Role) -> list[EarlierMember]:
        """Return the members with one of some roles."""
        return [each for each in self.members if each.member.role in roles]

    @property
    def parked(self) -> list[ParkedMessage]:
        """The messages that were not delivered."""
        return [
            message
            for each in self.role(Role.LEVEL, Role.HELD, Role.WINDOW)
            for partition in each.messages
            for message in partition
        ]


def _message(stored: dict[str, Any]) -> ParkedMessage:
    ledger, entry, batch = stored["position"]
    value = None if stored["value"] is None else base64.b64decode(stored["value"])
    return ParkedMessage(
        ledger,
        entry,
        batch,
        0,
        stored["key"],
        stored["ordering_key"],
        stored["event_ms"],
        stored["properties"],
        value,
    )


def _member(stored: dict[str, Any], level: int) -> EarlierMember:
    role = Role(stored["role"])
    return EarlierMember(
        Member(
            TopicName.parse(stored["topic"]),
            role,
            stored["partitions"],
            level if role is Role.LEVEL else -1,
        ),
        stored["properties"],
        tuple(tuple(map(_message, partition)) for partition in stored["messages"]),
        tuple(stored.get("states", ())),
    )


_recorded = json.loads(_FILE.read_text(encoding="utf-8"))

#: The namespace of all topics; its name is in the stored messages.
NAMESPACE: str = _recorded["namespace"]

#: The level topics, by the name of the business topic that gave them theirs.
LEVEL_TOPICS = {
    stored["level_topic"].rpartition("/")[2].removesuffix("-delay-level"): EarlierLevelTopic(
        stored["level_topic"],
        tuple(_member(each, level) for level, each in enumerate(stored["members"])),
    )
    for stored in _recorded["level_topics"]
}
