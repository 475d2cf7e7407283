"""The description of a level topic, its pauses, and the names of its member topics."""

from __future__ import annotations

import enum
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from delaylevel.errors import (
    InvalidInputError,
    LevelTopicError,
    TargetNotAllowedError,
    UpgradeRequiredError,
)

from .formatting import exact_duration, shell
from .strategy import Levels
from .topic_name import TopicName, parse_namespace

#: The name under which a pause of all targets is stored.
ALL = "*"
# The shortest time between two releases of a spread, in ms.
_STEP_MS = 50


class Spread(NamedTuple):
    """The time over which the messages of a pause are released after its end."""

    begin_ms: int  # end of the pause; messages that were due before have waited
    length_ms: int

    @property
    def end_ms(self) -> int:
        """The time at which all of them are released, ms since the epoch."""
        return self.begin_ms + self.length_ms

    def take(self, left: int, last_ms: int, now_ms: int) -> tuple[int, int]:
        """Return how many of ``left`` messages to release now, and the time of this release."""
        if max(now_ms, last_ms) >= self.end_ms:  # the clock may have been set back
            return left, now_ms
        since_ms = max(last_ms, self.begin_ms)
        # The rest of the backlog in the rest of the time: a late release is made up for.
        count = left * max(now_ms - since_ms, 0) // (self.end_ms - since_ms)
        # A little earlier than now: a part of a message counts for the next release.
        return count, since_ms + count * (self.end_ms - since_ms) // left

    def next_ms(self, left: int, last_ms: int) -> int:
        """Return the time of the next release, ms since the epoch."""
        since_ms = max(last_ms, self.begin_ms)
        for_one_ms = -((since_ms - self.end_ms) // left)  # rounded up
        return min(self.end_ms, since_ms + max(for_one_ms, _STEP_MS))


@dataclass(frozen=True)
class Pauses:
    """The present pauses, and the ends of earlier ones, by full name of the target; ``*``: all."""

    paused: tuple[tuple[str, int], ...] = ()  # since when, ms since the epoch
    resumed: tuple[tuple[str, Spread], ...] = ()  # the time over which messages are released

    def last(self, now_ms: int) -> bool:
        """Return True while due messages may wait for a pause to end, or for their turn then."""
        return bool(self.paused) or any(each.end_ms > now_ms for _, each in self.resumed)

    def paused_since_ms(self, target: str) -> int | None:
        """Return the begin of a target's pause, ms since the epoch; None if it is not paused."""
        found = [since for name, since in self.paused if name in (ALL, target)]
        return min(found, default=None)

    def spread(self, target: str, now_ms: int) -> Spread | None:
        """Return the time over which a target's backlog is released; None if it is over."""
        found = [each for name, each in self.resumed if name in (ALL, target)]
        # By a clock that is behind that of the resume, it begins later. One that is far ahead must
        # not keep the backlog for ever.
        found = [each for each in found if abs(now_ms - each.begin_ms) <= each.length_ms]
        return max(found, key=lambda each: each.end_ms, default=None)

    def pause(self, target: str, now_ms: int) -> Pauses:
        """Return the pauses with that of a target, by its full name, or of all (``*``)."""
        paused = {target: now_ms, **dict(self.paused)}
        return Pauses(tuple(sorted(paused.items())), self.resumed)

    def resume(self, target: str, now_ms: int, spread_ms: int = 0) -> Pauses:
        """Return the pauses without that of a target; ``*`` ends all of them."""
        ended = [name for name, _ in self.paused if target in (ALL, name)]
        resumed = {name: each for name, each in self.resumed if each.end_ms > now_ms}
        for name in ended:
            resumed.pop(name, None)
            if spread_ms:
                resumed[name] = Spread(now_ms, spread_ms)
        left = tuple(item for item in self.paused if item[0] not in ended)
        return Pauses(left, tuple(sorted(resumed.items())))

    def to_json(self) -> dict[str, Any]:
        """Return the members of the stored description; none without pauses."""
        value: dict[str, Any] = {}
        if self.paused:
            value["paused"] = dict(self.paused)
        if self.resumed:
            value["resumed"] = {name: list(spread) for name, spread in self.resumed}
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Pauses:
        """Read the members of a stored description."""
        paused, resumed = value.get("paused", {}), value.get("resumed", {})
        return cls(
            tuple(sorted((str(name), int(since)) for name, since in paused.items())),
            tuple(
                sorted(
                    (str(name), Spread(int(begin), int(length)))
                    for name, (begin, length) in resumed.items()
                )
            ),
        )


NO_PAUSES = Pauses()


#: Format of the stored description. Readers refuse every other one.
FORMAT = 1

# The property of the level topic that holds the description.
DESCRIPTION_PROPERTY = "delaylevel.description"
# Its value once a deletion has counted everything. Then the plan is the description.
BEING_DELETED = "deleted"
# On every member topic: the level topic that it belongs to.
MEMBER_PROPERTY = "delaylevel.member-of"
# On the level topic from the start of its creation: the planned description. Until
# DESCRIPTION_PROPERTY exists, the creation is not finished.
PLAN_PROPERTY = "delaylevel.plan"
# The broker merges properties one by one, and has no compare-and-set for the value of one. So
# whatever changes while a level topic is in use has a property of its own, and two clients that
# change different things at the same time lose nothing.
TARGET_PREFIX = "delaylevel.target."
# Settings: they override the member of the same name in the description. The value is JSON; null
# removes a pause.
SETTING_PREFIX = "delaylevel.set."
# The durable subscription of every source topic: it keeps the data and the mover's position.
SUBSCRIPTION = "delaylevel"

# Default names of level topics: ``_orders-delay-level``. With the prefix, no pattern for business
# topics that names their beginning or their end matches one of our topics. Two underscores are
# reserved for topics of Pulsar itself.
LEVEL_PREFIX = "_"
LEVEL_SUFFIX = "-delay-level"
HELD_SUFFIX = "-held"
DEAD_LETTER_SUFFIX = "-DLQ"
WINDOW_SUFFIX = "-window"
JOURNAL_SUFFIX = "-window-log"
OUTCOMES_SUFFIX = "-outcomes"

#: Attributes for live queries that are no properties.
SIZE_ATTRIBUTE, DELAY_ATTRIBUTE = "size", "delay"

# Members of the description with a setting, and those with one for each target.
_SETTINGS = ("on_missing_target", "attribute", "expire_after_ms", "expired")
_BY_TARGET = ("paused", "resumed")

#: Bytes of the broker's limit that producers leave free in each parked message, for everything that
#: may be added to it: our properties at their longest (IDs of 512 characters of 4 bytes, the reason
#: of a dead letter), the copy of a listener, and the client's encoding.
RESERVE = 12 * 1024
#: Longest full name of a target or member topic, in UTF-8 bytes: the reserve has room for several.
LONGEST_NAME = 600

DEFAULT_HOLD_PAUSE_MS = 30_000
DEFAULT_WINDOW_PARTITIONS = 4
# A dispatcher has separate producers for each of them.
MOST_WINDOW_PARTITIONS = 64
MOST_ATTRIBUTE_LENGTH = 200


class Mover(str, enum.Enum):
    """The process that moves near-due messages.

    A service reads up to a bound (`delaylevel run`, or the Spark job); for a Function, the broker
    holds each message until its hand-off.
    """

    SERVICE = "service"
    FUNCTION = "function"


class FinalWindow(str, enum.Enum):
    """The place of a message between its last hand-off and its due time."""

    BROKER = "broker"
    TRACKER = "tracker"


class MissingTarget(str, enum.Enum):
    """The treatment of a message whose business topic does not exist at hand-off."""

    HOLD = "hold"  # put into the held topic and try again later
    DEAD_LETTER = "dead-letter"  # put into the dead-letter topic, with the reason
    DROP = "drop"  # count and discard


class Expired(str, enum.Enum):
    """The treatment of messages that would be released after their expiry."""

    DROP = "drop"  # count and discard
    DEAD_LETTER = "dead-letter"  # put into the dead-letter topic, with the reason


class Role(str, enum.Enum):
    """The role of a member topic."""

    LEVEL = "level"
    HELD = "held"
    DEAD_LETTER = "dead-letter"
    WINDOW = "window"
    JOURNAL = "journal"
    OUTCOMES = "outcomes"


@dataclass(frozen=True)
class Member:
    """One of the topics that form a level topic; all are partitioned."""

    topic: TopicName
    role: Role
    partitions: int
    level: int = -1  # of a level, its index in the list, 0 for the coarsest


@dataclass(frozen=True)
class LevelTopicDescription:
    """The description that a level topic stores in its properties.

    Attributes:
        topic: full name of the level topic (its coarsest level).
        levels: the list of levels.
        targets: full names of the business topics whose messages it carries.
        mover: the process that moves near-due messages.
        final_window: the place of messages before their due time.
        hold_pause_ms: pause of a message in the held topic before the next attempt, ms.
        window_partitions: number of partitions of the window topic and of the journal
            (``tracker`` only), 1 to 64. It never changes: it determines a key's partition.
        former: the lists of levels before each expansion, oldest first.
        on_missing_target: the treatment of messages whose target does not exist.
        attribute: the attribute by which live queries select pending messages: ``size`` (bytes of
            the payload), ``delay`` (ms from the publish time in the window until due), or the
            name of a property with a number.
        expire_after_ms: longest time from due time to release, ms, of messages without an expiry of
            their own; 0 for any time.
        expired: the treatment of messages that would be released later.
        pauses: the targets to which nothing is released now.
        reserve: bytes that producers leave free in each parked message.
    """

    topic: str
    levels: Levels
    targets: tuple[str, ...]
    mover: Mover = Mover.SERVICE
    final_window: FinalWindow = FinalWindow.TRACKER
    hold_pause_ms: int = DEFAULT_HOLD_PAUSE_MS
    window_partitions: int = DEFAULT_WINDOW_PARTITIONS
    former: tuple[Levels, ...] = ()
    on_missing_target: MissingTarget = MissingTarget.HOLD
    attribute: str = SIZE_ATTRIBUTE
    expire_after_ms: int = 0
    expired: Expired = Expired.DROP
    pauses: Pauses = NO_PAUSES
    reserve: int = RESERVE

    def __post_init__(self) -> None:
        if self.hold_pause_ms < 1:
            raise InvalidInputError(f"hold_pause_ms is {self.hold_pause_ms}: it must be above 0")
        if not 1 <= self.window_partitions <= MOST_WINDOW_PARTITIONS:
            raise InvalidInputError(
                f"window_partitions is {self.window_partitions}: the window topic has 1 to "
                f"{MOST_WINDOW_PARTITIONS} partitions"
            )
        if not self.attribute or len(self.attribute) > MOST_ATTRIBUTE_LENGTH:
            raise InvalidInputError(
                f"the attribute {self.attribute[:40]!r} is not valid: name size, delay, or a "
                f"property of at most {MOST_ATTRIBUTE_LENGTH} characters"
            )
        if self.expire_after_ms < 0:
            raise InvalidInputError(f"expire_after_ms is {self.expire_after_ms}: give 0 or more")
        if not self.targets:
            raise InvalidInputError(f"level topic {self.topic} needs at least one target")
        object.__setattr__(self, "topic", TopicName.parse(self.topic).full)
        # In one order: the same level topic is always described by the same text.
        names = sorted({TopicName.parse(target).full for target in self.targets})
        object.__setattr__(self, "targets", tuple(names))

    @cached_property
    def known_targets(self) -> frozenset[str]:
        """The targets, for questions about each message: there may be thousands."""
        return frozenset(self.targets)

    @property
    def cancellable(self) -> bool:
        """True if messages can be cancelled: with ``tracker``, a dispatcher decides about it."""
        return self.final_window is FinalWindow.TRACKER

    @property
    def name(self) -> TopicName:
        """The parsed name of the level topic."""
        return TopicName.parse(self.topic)

    def level_topic(self, level: int) -> TopicName:
        """Return the topic of a level, by its index."""
        return self.name.with_suffix(self.levels[level].suffix)

    @property
    def held_topic(self) -> TopicName:
        """The topic for messages whose target cannot be written now."""
        return self.name.with_suffix(HELD_SUFFIX)

    @property
    def dead_letter_topic(self) -> TopicName:
        """The topic for messages that cannot be understood."""
        return self.name.with_suffix(DEAD_LETTER_SUFFIX)

    @property
    def window_topic(self) -> TopicName:
        """The topic for messages in the final window, with ``tracker``."""
        return self.name.with_suffix(WINDOW_SUFFIX)

    @property
    def journal_topic(self) -> TopicName:
        """The journal of the dispatchers, with one partition per window partition."""
        return self.name.with_suffix(JOURNAL_SUFFIX)

    @property
    def outcomes_topic(self) -> TopicName:
        """The topic for outcomes of cancellations, with ``tracker``."""
        return self.name.with_suffix(OUTCOMES_SUFFIX)

    def window_partition(self, key: str, message_id: str) -> int:
        """Return the window partition of a message, the same for all its copies."""
        return zlib.crc32((key or message_id).encode()) % self.window_partitions  # docs/wire.md

    def members(self) -> Iterator[Member]:
        """Yield every member topic: levels from coarse to fine, held topic, dead-letter topic.

        With ``tracker``, the window topic, the journal and the outcomes topic follow.
        """
        for level in self.levels:
            yield Member(self.level_topic(level.index), Role.LEVEL, level.partitions, level.index)
        yield Member(self.held_topic, Role.HELD, 1)
        yield Member(self.dead_letter_topic, Role.DEAD_LETTER, 1)
        if self.final_window is FinalWindow.TRACKER:
            yield Member(self.window_topic, Role.WINDOW, self.window_partitions)
            yield Member(self.journal_topic, Role.JOURNAL, self.window_partitions)
            yield Member(self.outcomes_topic, Role.OUTCOMES, 1)

    def accepts(self, levels: Levels) -> bool:
        """Return True if a client may be configured with these levels."""
        # An application that still names the shorter maximum, as before an expansion, starts, too.
        return levels == self.levels or levels in self.former

    @property
    def fixed(self) -> tuple[object, ...]:
        """All that never changes, but for the levels: they may become longer."""
        windows = self.window_partitions if self.cancellable else None  # it means nothing then
        return self.mover, self.final_window, self.hold_pause_ms, windows

    def check_target(self, target: str) -> None:
        """Raise TargetNotAllowedError unless the description lists this business topic."""
        if target not in self.known_targets:
            raise TargetNotAllowedError(
                f"level topic {self.topic} does not carry messages for {target}, only for "
                f"{', '.join(self.targets)}: add the target with "
                f"`{self.creation_command(target)}`, or name another level topic"
            )

    def creation_command(self, *targets: str) -> str:
        """Return the command that creates the level topic or what it lacks, with more targets."""
        namespace = self.name.namespace_path
        named = {default_level_topic(each, namespace): each for each in self.targets}
        first = TopicName.parse(named.get(self.topic, self.targets[0]))
        words = [f"delaylevel levels create {shell(first.short)}"]
        words += [f"--target {shell(TopicName.parse(each).short)}" for each in targets]
        if self.topic not in named:
            words.append(f"--level-topic {shell(self.name.short)}")
        elif namespace != first.namespace_path:
            words.append(f"--level-namespace {shell(namespace)}")
        words.append(self.levels.options)
        for name in ("mover", "final_window", "window_partitions"):
            value = getattr(self, name)
            if value != getattr(type(self), name):  # the default
                words.append(f"--{name.replace('_', '-')} {getattr(value, 'value', value)}")
        if self.hold_pause_ms != DEFAULT_HOLD_PAUSE_MS:
            words.append(f"--hold-pause {exact_duration(self.hold_pause_ms)}")
        return " ".join(words)

    def to_json(self) -> str:
        """Return the description as one versioned JSON value."""
        value: dict[str, Any] = {
            "version": FORMAT,
            **self._with_topics(self.levels),
            "topics": self._other_topics(),
            "reserve": self.reserve,
            "targets": list(self.targets),
            "mover": self.mover.value,
            "final_window": self.final_window.value,
            "hold_pause_ms": self.hold_pause_ms,
            "window_partitions": self.window_partitions,
        }
        if self.former:
            value["former"] = [self._with_topics(levels) for levels in self.former]
        for name in _SETTINGS:
            if getattr(self, name) != getattr(type(self), name):  # the default
                value[name] = getattr(self, name)  # the choices are texts, too
        value.update(self.pauses.to_json())
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    def _with_topics(self, levels: Levels) -> dict[str, Any]:
        """Return a list of levels as it is stored: with the topic of each, and its partitions."""
        value = levels.to_json()
        for stored, level in zip(value["levels"], levels, strict=True):
            stored["topic"] = self.name.with_suffix(level.suffix).full
            stored["partitions"] = level.partitions
        return value

    def _other_topics(self) -> dict[str, str]:
        """Return the names of the member topics that are no levels, by their roles."""
        others = (member for member in self.members() if member.role is not Role.LEVEL)
        return {member.role.value: member.topic.full for member in others}

    def _check_topics(self, value: Mapping[str, Any]) -> None:
        """Raise ValueError unless the stored names and partitions are those of this version."""
        own = self._with_topics(self.levels)["levels"]
        stored = [{name: item[name] for name in own[0]} for item in value["levels"]]
        others = self._other_topics()
        if stored != own or {name: value["topics"].get(name) for name in others} != others:
            raise ValueError(f"it names {stored} and {value['topics']}, not {own} and {others}")

    @classmethod
    def from_json(
        cls, topic: str, text: str, properties: Mapping[str, str] = MappingProxyType({})
    ) -> LevelTopicDescription:
        """Parse the text from :meth:`to_json` for the level topic of this name.

        Args:
            properties: the level topic's properties, which may have other settings and targets.

        Raises:
            UpgradeRequiredError: its format is a later one.
            LevelTopicError: the text is damaged.
        """
        try:
            value = json.loads(text)
            _check_format(topic, value["version"])
            value = {**{name: getattr(cls, name) for name in _SETTINGS}, **value}
            _apply_settings(value, properties)
            targets = value["targets"]
            if not (isinstance(targets, list) and all(isinstance(item, str) for item in targets)):
                raise ValueError(f"targets is {targets!r}, not a list of topics")
            added = [
                key[len(TARGET_PREFIX) :] for key in properties if key.startswith(TARGET_PREFIX)
            ]
            found = cls(
                topic=topic,
                levels=Levels.from_json(value),
                targets=(*targets, *added),
                mover=Mover(value["mover"]),
                final_window=FinalWindow(value["final_window"]),
                hold_pause_ms=int(value["hold_pause_ms"]),
                window_partitions=int(value["window_partitions"]),
                on_missing_target=MissingTarget(value["on_missing_target"]),
                former=tuple(Levels.from_json(item) for item in value.get("former", ())),
                attribute=_text(value["attribute"]),
                expire_after_ms=int(value["expire_after_ms"]),
                expired=Expired(value["expired"]),
                pauses=Pauses.from_json(value),
                reserve=int(value["reserve"]),
            )
            # Other readers take the names from here. A copy under another name would mislead them.
            found._check_topics(value)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise LevelTopicError(
                f"the description of level topic {topic} cannot be read: {error!r}"
            ) from error
        return found

    def to_properties(self) -> dict[str, str]:
        """Return the properties to add to the level topic."""
        targets = {TARGET_PREFIX + target: "1" for target in self.targets}
        return {DESCRIPTION_PROPERTY: self.to_json(), **targets}

    def settings_since(self, before: LevelTopicDescription) -> dict[str, str]:
        """Return the properties of the settings that differ from those of another description."""
        old, new = before._settings(), self._settings()
        changed = {name: new.get(name) for name in (*old, *new) if old.get(name) != new.get(name)}
        return {SETTING_PREFIX + name: json.dumps(value) for name, value in changed.items()}

    def _settings(self) -> dict[str, Any]:
        """Return everything that can be changed at any time, but for the targets."""
        pauses = self.pauses.to_json()
        return {
            **{name: getattr(self, name) for name in _SETTINGS},
            **{
                f"{member}.{target}": value
                for member in _BY_TARGET
                for target, value in pauses.get(member, {}).items()
            },
        }

    @classmethod
    def from_properties(
        cls, topic: str, properties: Mapping[str, str]
    ) -> LevelTopicDescription | None:
        """Return the description in a level topic's properties; None if there is none.

        Raises:
            UpgradeRequiredError, LevelTopicError: as for :meth:`from_json`; or it is being deleted.
        """
        text = properties.get(DESCRIPTION_PROPERTY)
        if text == BEING_DELETED:
            raise LevelTopicError(
                f"level topic {topic} is being deleted, or its deletion was not finished: finish "
                f"it with `delaylevel levels delete {shell(topic)}`"
            )
        return None if text is None else cls.from_json(topic, text, properties)


def named_in(
    descriptions: Sequence[LevelTopicDescription], name: str
) -> LevelTopicDescription | None:
    """Return the level topic with a full name, else the first one with this target; else None."""
    named = (each for each in descriptions if name == each.topic)
    return next(named, None) or next((each for each in descriptions if name in each.targets), None)


def _apply_settings(value: dict[str, Any], properties: Mapping[str, str]) -> None:
    """Override members of a parsed description with the settings in properties."""
    for key, text in properties.items():
        if not key.startswith(SETTING_PREFIX):
            continue
        name, setting = key[len(SETTING_PREFIX) :], json.loads(text)
        member, _, target = name.partition(".")
        if name in _SETTINGS:
            value[name] = setting
        elif member not in _BY_TARGET:
            continue  # of a later version
        elif setting is None:
            value.get(member, {}).pop(target, None)
        else:
            value.setdefault(member, {})[target] = setting


def _check_format(topic: str, version: object) -> None:
    """Raise UpgradeRequiredError for a later format, and ValueError for none."""
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(f"version is {version!r}, not the number of a format")
    if version > FORMAT:
        raise UpgradeRequiredError(
            f"level topic {topic} is described in format {version}, and this version of "
            f"delaylevel reads formats up to {FORMAT}: upgrade delaylevel"
        )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


def default_level_topic(business_topic: str, namespace: str | None = None) -> str:
    """Return the default name of a new level topic.

    Args:
        business_topic: the business topic.
        namespace: ``tenant/namespace`` of the level topic; that of the business topic by default.
            In another namespace, the name contains the business topic's tenant and namespace,
            because business topics of several namespaces may have their level topics there.

    Raises:
        InvalidInputError: a name is not valid.
    """
    name = TopicName.parse(business_topic)
    tenant, namespace_name, local = name.tenant, name.namespace, name.local
    if namespace is not None and namespace != name.namespace_path:
        tenant, namespace_name = parse_namespace(namespace)
        local = f"{name.tenant}.{name.namespace}.{local}"
    return TopicName(tenant, namespace_name, f"{LEVEL_PREFIX}{local}{LEVEL_SUFFIX}").full


def default_level_topics(business_topic: str, namespace: str | None = None) -> tuple[str, ...]:
    """Return the names to search for a level topic, in order: the default, and without ``_``."""
    name = TopicName.parse(business_topic)
    current = default_level_topic(business_topic, namespace)
    if namespace not in (None, name.namespace_path):
        return (current,)
    return current, name.with_suffix(LEVEL_SUFFIX).full
