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

#: The format of the log on stderr.
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

# The width of the help in a terminal of 80 columns.
_EXAMPLE_WIDTH = 76

Function = TypeVar("Function", bound=Callable[..., Any])
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
    """The options given before a command runs; ``@pass_connection`` finds them here."""

    flags: dict[str, Any] = field(default_factory=dict)
    verbosity: int = 0

    def connection(self) -> Connection:
        """Load the connection, without contacting anything."""
        return Connection.load(**self.flags)

    def client_logger(self) -> Any:
        """Return a logger for the Pulsar client that keeps off stdout.

        By default the client logs to stdout, into the middle of a command's result. This logger is
        silent, and writes to stderr with ``-v``.
        """
        return logs.for_verbosity(self.verbosity)

    def client(self, connection: Connection) -> contextlib.closing[Any]:
        """Open a ``pulsar.Client`` with that logger for a ``with`` block, if the broker answers."""
        require_reachable(connection)
        return contextlib.closing(connection.open_client(logger=self.client_logger()))

    @contextlib.contextmanager
    def level_topic(
        self, name: str, *, unfinished: bool = False
    ) -> Iterator[tuple[Connection, Admin, LevelTopicDescription]]:
        """Connect to the admin interface and find the level topic that a topic belongs to."""
        from delaylevel.cluster.rest.admin import Admin
        from delaylevel.topics.registry import describe

        connection = self.connection()
        with Admin.from_connection(connection) as admin:
            yield connection, admin, describe(admin, name, search=True, unfinished=unfinished)


# Passes the `Settings` to the command as its first argument.
pass_settings: Callable[[Callable[..., Any]], Callable[..., Any]] = click.make_pass_decorator(
    Settings, ensure=True
)


def settings_of(ctx: click.Context) -> Settings:
    """Return the settings of this invocation."""
    return ctx.find_root().ensure_object(Settings)


def together(*options: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """Return one decorator for several options, in the order of the help."""

    def add(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value is not None:
        settings_of(ctx).flags[str(param.name)] = value


_setting = functools.partial(click.option, expose_value=False, callback=_remember)
_EXISTING = click.Path(exists=True, dir_okay=False)
#: The options that locate the cluster; ``@pass_connection`` reads them. The root command has them,
#: which serves every command (``delaylevel --service-url … send``). A command that also has them
#: accepts them after its own name.
connection_options = together(
    _setting(
        "--service-url",
        metavar="URL",
        help="Service URL of the cluster (pulsar://one:6650,two:6650).",
    ),
    _setting(
        "--admin-url",
        metavar="URL",
        help="Admin URL of the cluster; name several brokers (http://one:8080,two:8080).",
    ),
    _setting("--token-file", type=_EXISTING, help="File that holds the token."),
    _setting("--tls-trust-certs-file", type=_EXISTING, help="Trusted certificates (PEM)."),
    _setting("--tls-certificate-file", type=_EXISTING, help="Client certificate (PEM)."),
    _setting("--tls-private-key-file", type=_EXISTING, help="Private key of the client (PEM)."),
    _setting(
        "--tls-allow-insecure/--no-tls-allow-insecure",
        default=None,
        help="Accept any server certificate.",
    ),
    _setting(
        "--tls-validate-hostname/--no-tls-validate-hostname",
        default=None,
        help="Check the server's host name against its certificate.",
    ),
    _setting("--config", "config_file", type=_EXISTING, help="Configuration file (TOML)."),
)


def pass_connection(function: Callable[..., Any]) -> Callable[..., Any]:
    """Pass the `Connection` of a cluster that answers to the command as its first argument."""

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> Any:
        connection = settings_of(click.get_current_context()).connection()
        require_reachable(connection)
        return function(connection, *args, **kwargs)

    return command
