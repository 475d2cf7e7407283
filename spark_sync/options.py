"""Options of the Spark source and sink, and settings of the job."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from pydantic.alias_generators import to_camel

from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import ConfigError, DelayLevelError
from delaylevel.model.clock import instant_ms
from delaylevel.model.formatting import parse_iso
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.scan import ALWAYS, DEFAULT_SLACK_MS, Window


@dataclass(frozen=True)
class SyncSettings:
    """The settings of a sync job.

    Attributes:
        level_topics: the level topics to serve, each by its own name or by its business topic's.
        checkpoint: the folder of the query's checkpoint: a path, or a URI of any file system that
            Hadoop knows.
        once: True to move the messages that are ready now and end; False to run until stopped.
        trigger_ms: the interval between two batches, in ms; by default a fifth of the shortest
            lead, between 0.2 and 5 s.
        master: Spark's master.
        options: further options of the source, e.g. ``failOnDataLoss``.
        spark_conf: further Spark settings.
        metrics_port: the port that serves metrics for Prometheus; 0 for any free port, None for
            no metrics.
        metrics_address: the address of the interface that serves the metrics.
    """

    level_topics: tuple[str, ...]
    checkpoint: str
    once: bool = False
    trigger_ms: int | None = None
    master: str = "local[2]"
    options: Mapping[str, str] = field(default_factory=dict)
    spark_conf: Mapping[str, str] = field(default_factory=dict)
    metrics_port: int | None = None
    metrics_address: str = "127.0.0.1"


#: The name of the source and the sink in ``format(...)``.
FORMAT = "delaylevel"
# Connection settings that a query's plan may contain, by their options. A token may not: each
# process reads it from a file or from its environment.
_CONNECTION = {to_camel(name): name for name in Connection.model_fields if name != "token"}
# What a batch read skips is an option. A filter that Spark pushes down could not say it: Spark 4.2
# and 4.3 keep one plan of a Python data source for all uses of a DataFrame, and it would remove
# rows from the other uses. The last two are the job's: the folder through which its program and
# the source's process communicate, and whether the source forwards what it reads.
_READING = (
    *("levelTopics", "maxOffsetsPerTrigger", "failOnDataLoss"),
    *("dueFrom", "dueBefore", "dueSlackMs", "cancellations"),
    *("controlDir", "forwardInSource"),
)
# Options that Spark adds to the user's.
_SPARKS_OWN = ("path", "checkpointlocation", "queryname")


@dataclass(frozen=True)
class SyncOptions:
    """Parsed options of the source."""

    connection: tuple[tuple[str, str], ...]
    level_topics: tuple[str, ...]
    max_offsets_per_trigger: int | None = None  # messages in a batch, over all partitions
    fail_on_data_loss: bool = True
    forward: bool = False  # the source forwards, and yields reports
    due: Window = ALWAYS  # if it is bounded, rows without a due time are left out
    slack_ms: int = DEFAULT_SLACK_MS
    cancellations: bool = False  # read them instead of messages
    control_dir: str = ""  # the folder of `tell`

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SyncOptions:
        """Parse the options of ``.option(…)``; names are not case-sensitive."""
        given = _known_options(options, (*_CONNECTION, *_READING))
        parts = (part.strip() for part in given.get("levelTopics", "").split(","))
        topics = [_COMMA.sub(_decoded, part) for part in parts if part]
        if not topics:
            raise ConfigError(
                "option levelTopics is missing: name one level topic or several, with commas"
            )
        try:
            level_topics = tuple(sorted({TopicName.parse(topic).full for topic in topics}))
        except DelayLevelError as error:
            raise ConfigError(f"option levelTopics: {error}") from error
        return cls(
            connection=_connection(given),
            level_topics=level_topics,
            max_offsets_per_trigger=_number(given, "maxOffsetsPerTrigger", 1, None),
            fail_on_data_loss=_boolean(given, "failOnDataLoss", True),
            forward=_boolean(given, "forwardInSource"),
            due=Window(_time_ms(given, "dueFrom"), _time_ms(given, "dueBefore")),
            slack_ms=_number(given, "dueSlackMs", 0, DEFAULT_SLACK_MS),
            cancellations=_boolean(given, "cancellations"),
            control_dir=given.get("controlDir", ""),
        )

    @property
    def selects(self) -> bool:
        """True if they have options of a batch read."""
        return replace(self, due=ALWAYS, slack_ms=DEFAULT_SLACK_MS, cancellations=False) != self


@dataclass(frozen=True)
class WriteOptions:
    """Parsed options of the batch sink."""

    connection: tuple[tuple[str, str], ...]
    target: str  # the business topic of rows that name none; empty for none
    level_topic: str | None  # None for the business topic's own

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> WriteOptions:
        """Parse the options of ``.option(…)``; names are not case-sensitive."""
        given = _known_options(options, (*_CONNECTION, "target", "levelTopic"))
        return cls(_connection(given), given.get("target", ""), given.get("levelTopic"))


def _known_options(options: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the options in the spelling of these names."""
    spelling = {name.lower(): name for name in names}
    given = {name: value for name, value in options.items() if name.lower() not in _SPARKS_OWN}
    for name in given:
        if name.lower() not in spelling:
            known = ", ".join(sorted(spelling.values()))
            raise ConfigError(f"unknown option {name!r}; there are {known}")
    return {spelling[name.lower()]: value for name, value in given.items()}


def _connection(given: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((_CONNECTION[name], given[name]) for name in given if name in _CONNECTION))


def connection_options(connection: Connection) -> dict[str, str]:
    """Return a connection as options of the source and the sink, without its token."""
    found: dict[str, str] = {}
    for option, name in _CONNECTION.items():
        value = getattr(connection, name)
        if value is not None:
            found[option] = str(value).lower() if isinstance(value, bool) else str(value)
    return found


# The option lists names with commas, so %2C is a comma within a name, %252C is %2C, and so on.
_COMMA = re.compile("%((?:25)*)2C")


def topics_option(level_topics: Iterable[str]) -> str:
    """Return the names of level topics as an option."""
    return ",".join(_COMMA.sub(r"%25\g<1>2C", name).replace(",", "%2C") for name in level_topics)


def _decoded(found: re.Match[str]) -> str:
    return f"%{found[1][2:]}2C" if found[1] else ","


def _boolean(given: Mapping[str, str], name: str, default: bool = False) -> bool:
    text = given.get(name, str(default)).strip().lower()
    if text not in ("true", "false"):
        raise ConfigError(f"option {name} is {text!r}: it is true or false")
    return text == "true"


_Default = TypeVar("_Default")


def _number(given: Mapping[str, str], name: str, least: int, default: _Default) -> int | _Default:
    text = given.get(name)
    if text is None:
        return default
    if not (text.strip().isdecimal() and int(text) >= least):
        raise ConfigError(f"option {name} is {text!r}: it is a whole number, at least {least}")
    return int(text)


def _time_ms(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    try:
        return instant_ms(parse_iso(text))  # rounded up: due times are whole ms
    except ValueError:
        raise ConfigError(
            f"option {name} is {text!r}: write a time with its zone, 2030-01-31T08:00:00+00:00"
        ) from None


#: Signals through the folder ``controlDir``: the job's program requests that no further batch
#: begins, and the source, which Spark runs in another process on its machine, confirms that all
#: batches are acknowledged and that the partition lock is released.
STOP, STOPPED = "stop", "stopped"


def tell(folder: str, signal: str) -> None:
    """Give a signal."""
    # Cleaners of temporary files remove a folder that nobody has used for days.
    Path(folder).mkdir(mode=0o700, exist_ok=True)
    Path(folder, signal).touch()


def is_told(folder: str, signal: str) -> bool:
    """Return whether a signal was given; an empty folder name means that nobody can."""
    return bool(folder) and Path(folder, signal).exists()
