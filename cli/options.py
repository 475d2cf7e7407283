"""What commands share: settings, options, and the examples in their help."""

from __future__ import annotations

import contextlib
import enum
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from delaylevel.cli.views.output import progress
from delaylevel.cluster import logs
from delaylevel.cluster.connection.settings import Connection, require_reachable
from delaylevel.model.clock import duration_ms, instant_ms
from delaylevel.model.delivery import Delivery
from delaylevel.model.formatting import parse_duration, parse_iso
from delaylevel.model.level_topic import (
    Expired,
    FinalWindow,
    LevelTopicDescription,
    MissingTarget,
)
from delaylevel.model.strategy import PartitionBy
from delaylevel.model.topic_name import parse_namespace

if TYPE_CHECKING:
    from delaylevel.cluster.rest.admin import Admin
    from delaylevel.inspection import Inspector
    from delaylevel.producer.client import DelayLevelClient

Command = TypeVar("Command", bound=click.Command)
Function = TypeVar("Function", bound=Callable[..., Any])

#: The format of the log on stderr.
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

# Smaller numbers (before March 1973) are more likely seconds that were given by mistake.
_SMALLEST_EPOCH_MS = 100_000_000_000


def examples(*lines: str) -> Callable[[Command], Command]:
    """Add the ``Examples:`` part of a command's help."""

    def add(command: Command) -> Command:
        command.epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
        return command

    return add


class Group(click.Group):
    """A group of commands, whose help has the first example of each."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        found = (self.commands[name].epilog or "" for name in self.list_commands(ctx))
        self.epilog = "\n  delaylevel".join(
            ("\b\nExamples:", *(text.split("\n  delaylevel")[1] for text in found))
        )
        super().format_epilog(ctx, formatter)


@dataclass
class Settings:
    """The options given before a command runs; ``@pass_settings`` finds them here."""

    flags: dict[str, Any] = field(default_factory=dict)
    verbosity: int = 0

    @functools.cached_property
    def connection(self) -> Connection:
        """The connection, without contacting anything."""
        return Connection.load(**self.flags)

    def reachable(self) -> Connection:
        """Return the connection if the cluster answers."""
        require_reachable(self.connection)
        return self.connection

    def client_logger(self) -> Any:
        """Return a logger for the Pulsar client, which logs to stdout by default."""
        return logs.for_verbosity(self.verbosity)

    def open_client(self) -> Any:
        """Open a ``pulsar.Client`` with that logger."""
        return self.connection.open_client(logger=self.client_logger())

    def client(self) -> contextlib.closing[Any]:
        """Open a ``pulsar.Client`` for a ``with`` block, if the broker answers."""
        self.reachable()
        return contextlib.closing(self.open_client())

    def producer_client(self) -> DelayLevelClient:
        """Open a client for producers, if the broker answers."""
        from delaylevel.producer.client import DelayLevelClient

        return DelayLevelClient.from_connection(self.reachable(), logger=self.client_logger())

    def inspector(self, topic: str, **chosen: Any) -> Inspector:
        """Open an `Inspector`, which shows its progress, if the broker answers."""
        from delaylevel.inspection import Inspector

        chosen |= {"client_options": {"logger": self.client_logger()}, "tell": progress()}
        return Inspector.connect(self.reachable(), topic, **chosen)

    def admin(self) -> Admin:
        """Connect to the admin interface, for a ``with`` block."""
        from delaylevel.cluster.rest.admin import Admin

        return Admin.from_connection(self.connection)

    @contextlib.contextmanager
    def level_topic(
        self, name: str, *, unfinished: bool = False
    ) -> Iterator[tuple[Admin, LevelTopicDescription]]:
        """Connect to the admin interface and find the level topic that a topic belongs to."""
        from delaylevel.topics.registry import describe

        with self.admin() as admin:
            yield admin, describe(admin, name, search=True, unfinished=unfinished)


# Passes the `Settings` to the command as its first argument.
pass_settings: Callable[[Callable[..., Any]], Callable[..., Any]] = click.make_pass_decorator(
    Settings, ensure=True
)


def parse_unit(text: str) -> PartitionBy | timedelta:
    """Parse a unit: a name (``day``) or a duration (``2s``)."""
    named = PartitionBy.__members__.get(text.strip().upper())
    if named is not None:
        return named
    try:
        return parse_duration(text)
    except ValueError:
        names = ", ".join(name.lower() for name in PartitionBy.__members__)
        raise ValueError(f"{text!r} is no unit: write {names}, or a duration such as 2s") from None


def parse_time_ms(text: str, now_ms: int) -> int:
    """Parse a time: ISO-8601 with a zone, epoch milliseconds, or relative such as ``+2h``."""
    stripped = text.strip()
    if stripped == "now":
        return now_ms
    if stripped[:1] in ("+", "-"):
        offset_ms = duration_ms(parse_duration(stripped[1:]))
        return now_ms + (offset_ms if stripped[0] == "+" else -offset_ms)
    if stripped.isdecimal():
        if int(stripped) < _SMALLEST_EPOCH_MS:
            raise ValueError(
                f"{text!r} is too small for milliseconds since 1970: are these seconds?"
            )
        return int(stripped)
    try:
        moment = parse_iso(stripped)
    except ValueError:
        raise ValueError(
            f"{text!r} is no time: write 2030-01-31T12:00:00Z, epoch milliseconds, or +2h"
        ) from None
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone: add Z or an offset such as +02:00")
    return instant_ms(moment)


def parse_pair(text: str) -> tuple[str, str]:
    """Parse KEY=VALUE."""
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        raise ValueError(f"{text!r} is not KEY=VALUE")
    return name, value


class Parsed(click.ParamType):  # type: ignore[type-arg] # generic from click 8.5 on
    """A value that a function parses."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a text. Other values are defaults, which need no parsing."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class OneOf(click.Choice):  # type: ignore[type-arg] # generic from click 8.2 on
    """A member of an enumeration of strings, written as its value."""

    def __init__(self, members: type[enum.Enum]) -> None:
        super().__init__([member.value for member in members])
        self._members = members

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the member with a value."""
        return self._members(super().convert(value, param, ctx))


DURATION = Parsed("duration", parse_duration)
DURATION_MS = Parsed("duration", lambda text: duration_ms(parse_duration(text)))
NAMESPACE = Parsed("namespace", lambda text: "/".join(parse_namespace(text)))
UNIT = Parsed("unit", parse_unit)
TIME = Parsed("time", lambda text: parse_time_ms(text, time.time_ns() // 1_000_000))


def together(*options: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """Return one decorator for several options, in the order of the help."""

    def add(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


pairs = functools.partial(
    click.option,
    type=Parsed("key=value", parse_pair),
    multiple=True,
    metavar="KEY=VALUE",
    callback=lambda _, __, found: dict(found),
)
output = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "jsonl"]),
    default="table",
    help="Format of the result.",
)


def topic_command(
    group: click.Group, *lines: str, name: str | None = None, prints: bool = True
) -> Callable[[Callable[..., Any]], click.Command]:
    """Return the decorator of a command for TOPIC with examples; with ``-o`` if it has a result."""

    def add(function: Callable[..., Any]) -> click.Command:
        function = click.argument("topic")(pass_settings(function))
        command = group.command(name)(output(function) if prints else function)
        # click lists decorators from the outermost one on, but -o is the last option of every help.
        command.params.sort(key=lambda param: param.name == "output")
        return examples(*lines)(command)

    return add


delivery = click.option(
    "--delivery",
    type=OneOf(Delivery),
    default=Delivery.AT_LEAST_ONCE.value,
    help="Delivery guarantee; effectively-once needs deduplication by the broker.",
)
trigger = click.option(
    "--trigger",
    "trigger_ms",
    type=DURATION_MS,
    help="Interval between the mover's batches; by default a fifth of the shortest lead, up to 5s.",
)
everything = click.option(
    "--all", "everything", is_flag=True, help="Include everything instead of a selection."
)
final_window = click.option(
    "--final-window",
    type=OneOf(FinalWindow),
    default=FinalWindow.TRACKER.value,
    help="Component that holds messages between their last hand-off and their due time.",
)
target = click.option("--target", metavar="TOPIC", help="The only business topic; all by default.")
level_topic = click.option(
    "--level-topic", metavar="NAME", help="Name of the level topic; by default _TOPIC-delay-level."
)
level_namespace = click.option(
    "--level-namespace",
    metavar="TENANT/NAMESPACE",
    help="Namespace of the level topic; that of the business topic by default.",
)
# The following need further attributes, such as a default.
max_delay = functools.partial(
    click.option,
    "--max-delay",
    "maximum_delay",
    type=DURATION,
    help="Longest delay.",
)
at = functools.partial(click.option, "--at", type=TIME, help="Due time: ISO-8601, epoch ms or +2h.")
count = functools.partial(
    click.option,
    "--count",
    type=click.IntRange(min=0),
    help="Number of selected messages, as a confirmation.",
)
attribute = functools.partial(
    click.option,
    "--attribute",
    metavar="ATTRIBUTE",
    help="Attribute of pending messages for live queries: size, delay, or a numeric property.",
)
on_missing_target = functools.partial(
    click.option,
    "--on-missing-target",
    type=OneOf(MissingTarget),
    help="Action for messages whose business topic does not exist.",
)
expire_after = functools.partial(
    click.option,
    "--expire-after",
    "expire_after_ms",
    type=DURATION_MS,
    help="Longest time from due time to release of messages without their own expiry; 0s for any.",
)
expired = functools.partial(
    click.option,
    "--expired",
    type=OneOf(Expired),
    help="Action for messages that would be released after their expiry.",
)
keep_target = click.option(
    "--keep-target",
    is_flag=True,
    help="Publish to the business topic even while it has no subscription; create and keep it.",
)


#: The options of a dispatcher; ``dispatch_settings`` takes their values.
dispatching = together(
    delivery,
    click.option(
        "--memory",
        type=click.IntRange(min=8),
        default=256,
        metavar="MIB",
        help="Memory for pending payloads of each level topic; the rest is spilled to disk.",
    ),
    click.option(
        "--remember",
        type=click.IntRange(min=2),
        default=2_000_000,
        metavar="IDS",
        help="Number of IDs to remember for each target and source partition, to drop copies.",
    ),
    click.option(
        "--spill-dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder of the dispatcher's spill files.",
    ),
    click.option(
        "--processes",
        type=click.IntRange(0, 64),
        envvar="DELAYLEVEL_PROCESSES",
        metavar="NUMBER",
        default=1,
        help="Number of dispatcher processes that share the window partitions; 0 for one for each "
        "usable core.",
    ),
)
metrics = together(
    click.option(
        "--metrics-port",
        type=click.IntRange(0, 65535),
        metavar="PORT",
        help="Port for metrics, probes and the status page; 0 for any free port.",
    ),
    click.option(
        "--metrics-address",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="Address of the interface that serves them.",
    ),
)
namespace = click.argument("namespace", default="public/default", type=NAMESPACE)
namespace_option = functools.partial(
    click.option,
    "--namespace",
    metavar="TENANT/NAMESPACE",
    type=NAMESPACE,
    help="Namespace whose level topics are meant if no TOPIC is given.",
)
