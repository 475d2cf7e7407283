"""The frame of a command: its settings, its connection, and the examples in its help."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import click

from delaylevel.cluster import logs
from delaylevel.cluster.connection.settings import Connection, require_reachable
from delaylevel.model.level_topic import LevelTopicDescription

if TYPE_CHECKING:
    from delaylevel.cluster.rest.admin import Admin
    from delaylevel.producer.client import DelayLevelClient

#: The format of the log on stderr.
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

# The width of the help in a terminal of 80 columns.
_EXAMPLE_WIDTH = 76

Command = TypeVar("Command", bound=click.Command)


def _divided(line: str) -> str:
    """Return a command line divided before its options, as a shell takes it."""
    if len(line) + 2 <= _EXAMPLE_WIDTH:
        return f"  {line}"
    first, *words = re.split(r" (?=--|\|)", line)
    lines = [f"  {first}"]
    for word in words:
        if len(lines[-1]) + len(word) + 3 <= _EXAMPLE_WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(f"      {word}")
    return " \\\n".join(lines)


def examples(*lines: str) -> Callable[[Command], Command]:
    """Add the ``Examples:`` part of a command's help."""

    def add(command: Command) -> Command:
        command.epilog = "\b\nExamples:\n" + "\n".join(map(_divided, lines))
        return command

    return add


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
