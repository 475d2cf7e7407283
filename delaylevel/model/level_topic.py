"""What a level topic says of itself, and the names of all topics that belong to it."""

from __future__ import annotations

import enum
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from delaylevel.errors import InvalidInputError, LevelTopicError, TargetNotAllowedError

from .strategy import Levels
from .topic_name import TopicName

FORMAT_VERSION = 1
# The one property, on the level topic itself, that holds the description.
DESCRIPTION_PROPERTY = "delaylevel.description"
# On every topic of the family: the level topic that it belongs to.
MEMBER_PROPERTY = "delaylevel.member-of"
# On the level topic from its first moment: what the family is to become. Where the description
# is missing, its creation was not finished.
PLAN_PROPERTY = "delaylevel.plan"
# One property for each target, so that clients that add targets at once lose none of them.
TARGET_PREFIX = "delaylevel.target."
# The durable subscription of every source topic: the mover's place, and what keeps the data.
SUBSCRIPTION = "delaylevel"

LEVEL_SUFFIX = "-delay-level"
HELD_SUFFIX = "-held"
DEAD_LETTER_SUFFIX = "-DLQ"
WINDOW_SUFFIX = "-window"
JOURNAL_SUFFIX = "-window-log"

DEFAULT_HOLD_PAUSE_MS = 30_000
DEFAULT_WINDOW_PARTITIONS = 4
# A dispatcher keeps producers for each of them.
MOST_WINDOW_PARTITIONS = 64


class Mover(str, enum.Enum):
    """Who moves what is near-due."""

    SPARK = "spark"
    FUNCTION = "function"


class FinalWindow(str, enum.Enum):
    """Who holds a message between its last hand-off and its due time."""

    BROKER = "broker"
    TRACKER = "tracker"


class MissingTarget(str, enum.Enum):
    """What becomes of a message whose business topic does not exist when it is handed off."""

    HOLD = "hold"  # it waits in the held topic, and is tried again
    DEAD_LETTER = "dead-letter"  # it goes to the dead-letter topic, with the reason
    DROP = "drop"  # it is counted, and gone


class Role(str, enum.Enum):
    """What a topic of the family is for."""

    LEVEL = "level"
    HELD = "held"
    DEAD_LETTER = "dead-letter"
    WINDOW = "window"
    JOURNAL = "log"  # the stored name is older


@dataclass(frozen=True)
class Member:
    """One topic of a level topic's family.

    Attributes:
        topic: its full name.
        role: what it is for.
        partitions: how many partitions it has (at least 1: all are partitioned topics).
        level: for a level, its index in the list, 0 for the coarsest; otherwise -1.
    """

    topic: TopicName
    role: Role
    partitions: int
    level: int = -1


@dataclass(frozen=True)
class LevelTopicDescription:
    """A level topic, as it describes itself.

    Attributes:
        topic: the full name of the level topic (its coarsest level).
        levels: the list of levels.
        targets: full names of the business topics that may be written through it.
        mover: who moves what is near-due.
        final_window: who holds a message in the end.
        hold_pause_ms: how long a message rests in the held topic before the next try.
        window_partitions: partitions of the window topic and of its release log (``tracker``
            only), 1 to 64. A message keeps its partition by its key: their number never changes.
        former: the lists of levels that it had before it was expanded, oldest first.
        on_missing_target: what becomes of messages whose target does not exist.
    """

    topic: str
    levels: Levels
    targets: tuple[str, ...]
    mover: Mover = Mover.SPARK
    final_window: FinalWindow = FinalWindow.TRACKER
    hold_pause_ms: int = DEFAULT_HOLD_PAUSE_MS
    window_partitions: int = DEFAULT_WINDOW_PARTITIONS
    version: int = field(default=FORMAT_VERSION)
    former: tuple[Levels, ...] = ()
    on_missing_target: MissingTarget = MissingTarget.HOLD

    def __post_init__(self) -> None:
        if self.hold_pause_ms < 1:
            raise InvalidInputError(f"hold_pause_ms is {self.hold_pause_ms}: it must be above 0")
        if not 1 <= self.window_partitions <= MOST_WINDOW_PARTITIONS:
            raise InvalidInputError(
                f"window_partitions is {self.window_partitions}: the window topic has 1 to "
                f"{MOST_WINDOW_PARTITIONS} partitions"
            )
        if not self.targets:
            raise InvalidInputError(f"level topic {self.topic} needs at least one target")
        object.__setattr__(self, "topic", TopicName.parse(self.topic).full)
        names = sorted({TopicName.parse(target).full for target in self.targets})
        object.__setattr__(self, "targets", tuple(names))

    @property
    def name(self) -> TopicName:
        """The level topic's name in its parts."""
        return TopicName.parse(self.topic)

    def level_topic(self, level: int) -> TopicName:
        """Return the topic of a level, by its index."""
        return self.name.with_suffix(self.levels[level].suffix)

    @property
    def held_topic(self) -> TopicName:
        """Where messages wait whose target cannot be written now."""
        return self.name.with_suffix(HELD_SUFFIX)

    @property
    def dead_letter_topic(self) -> TopicName:
        """Where messages go that cannot be understood."""
        return self.name.with_suffix(DEAD_LETTER_SUFFIX)

    @property
    def window_topic(self) -> TopicName:
        """Where messages spend the final window with ``tracker``."""
        return self.name.with_suffix(WINDOW_SUFFIX)

    @property
    def journal_topic(self) -> TopicName:
        """The journal of the dispatchers, with one partition per window partition."""
        return self.name.with_suffix(JOURNAL_SUFFIX)

    def window_partition(self, key: str, message_id: str) -> int:
        """Return the window partition of a message, the same for each of its copies.

        It is the CRC-32 of the key (UTF-8), or of the id where there is no key, modulo the number
        of partitions: what is under way must meet its copies after an upgrade, too.

        Args:
            key: the message's partition key; empty for none.
            message_id: its ``delaylevel.id``.
        """
        return zlib.crc32((key or message_id).encode()) % self.window_partitions

    def members(self) -> Iterator[Member]:
        """Yield every topic of the family: levels coarse to fine, held, dead letters, window, log.

        The window and its log are there with ``tracker`` only.
        """
        for level in self.levels:
            yield Member(self.level_topic(level.index), Role.LEVEL, level.partitions, level.index)
        yield Member(self.held_topic, Role.HELD, 1)
        yield Member(self.dead_letter_topic, Role.DEAD_LETTER, 1)
        if self.final_window is FinalWindow.TRACKER:
            yield Member(self.window_topic, Role.WINDOW, self.window_partitions)
            yield Member(self.journal_topic, Role.JOURNAL, self.window_partitions)

    def accepts(self, levels: Levels) -> bool:
        """Say whether a client may be configured with these levels.

        Those that it had before it was expanded count too: an application that still names the
        shorter maximum starts as before, and goes by the topic's own levels.
        """
        return levels == self.levels or levels in self.former

    def check_target(self, target: str) -> None:
        """Raise TargetNotAllowedError unless the description lists this business topic."""
        if target not in self.targets:
            raise TargetNotAllowedError(
                f"level topic {self.topic} does not carry messages for {target}; it carries them "
                f"for {', '.join(self.targets)}: add the target with `delaylevel levels create`, "
                "or name another level topic"
            )

    def to_json(self) -> str:
        """Return the description as one versioned JSON value."""
        value: dict[str, Any] = {
            "version": self.version,
            **self.levels.to_json(),
            "targets": list(self.targets),
            "mover": self.mover.value,
            "final_window": self.final_window.value,
            "hold_pause_ms": self.hold_pause_ms,
            "window_partitions": self.window_partitions,
        }
        if self.on_missing_target is not MissingTarget.HOLD:
            value["on_missing_target"] = self.on_missing_target.value
        if self.former:
            value["former"] = [levels.to_json() for levels in self.former]
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, topic: str, text: str) -> LevelTopicDescription:
        """Read what :meth:`to_json` wrote, for the level topic of this name.

        Raises:
            LevelTopicError: the text is damaged, or of a later format than this release knows.
        """
        try:
            value = json.loads(text)
            version = value["version"]
            if version != FORMAT_VERSION:
                raise LevelTopicError(
                    f"level topic {topic} is described in format {version}; this release "
                    f"understands format {FORMAT_VERSION}: upgrade delaylevel"
                )
            targets = value["targets"]
            if not (isinstance(targets, list) and all(isinstance(item, str) for item in targets)):
                raise ValueError(f"targets is {targets!r}, not a list of topics")
            return cls(
                topic=topic,
                levels=Levels.from_json(value),
                targets=tuple(targets),
                mover=Mover(value["mover"]),
                final_window=FinalWindow(value["final_window"]),
                hold_pause_ms=int(value["hold_pause_ms"]),
                window_partitions=int(value["window_partitions"]),
                on_missing_target=MissingTarget(value.get("on_missing_target", "hold")),
                former=tuple(Levels.from_json(item) for item in value.get("former", ())),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise LevelTopicError(
                f"the description of level topic {topic} cannot be read: {error!r}"
            ) from error

    def to_properties(self) -> dict[str, str]:
        """Return the properties that describe the level topic; they are added to those it has."""
        targets = {TARGET_PREFIX + target: "1" for target in self.targets}
        return {DESCRIPTION_PROPERTY: self.to_json(), **targets}

    @classmethod
    def from_properties(
        cls, topic: str, properties: Mapping[str, str]
    ) -> LevelTopicDescription | None:
        """Read a level topic's properties; None where they hold no description.

        Raises:
            LevelTopicError: it is damaged, or of a later format than this release knows.
        """
        text = properties.get(DESCRIPTION_PROPERTY)
        if text is None:
            return None
        described = cls.from_json(topic, text)
        added = [key[len(TARGET_PREFIX) :] for key in properties if key.startswith(TARGET_PREFIX)]
        return replace(described, targets=(*described.targets, *added))


def default_level_topic(business_topic: str) -> str:
    """Return the level topic that a business topic has unless another is named."""
    return TopicName.parse(business_topic).with_suffix(LEVEL_SUFFIX).full
