"""Options that many commands share, and the types of what is given to them."""

from __future__ import annotations

import functools
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urlsplit

import click

from delaylevel.cluster import client_log as _clientlog
from delaylevel.cluster.connection import Connection
from delaylevel.errors import BrokerUnreachableError
from delaylevel.model.strategy import PartitionBy

from .output import FORMATS

P = ParamSpec("P")
R = TypeVar("R")
Function = TypeVar("Function", bound=Callable[..., Any])

_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)(ms|s|m|h|d|w))")
_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
# Epoch milliseconds below this (1973) are taken for seconds by mistake.
_SMALLEST_EPOCH_MS = 100_000_000_000


@dataclass
class Settings:
    """What the options say before a command runs; found by ``@pass_connection``."""

    flags: dict[str, Any] = field(default_factory=dict)
    verbosity: int = 0

    def connection(self) -> Connection:
        """Load the connection; nothing is contacted.

        Raises:
            ConfigError: a flag, environment variable or file that cannot be used.
        """
        return Connection.load(**self.flags)

    def client_kwargs(self, connection: Connection) -> dict[str, Any]:
        """``connection.client_kwargs()``, with the client's own log kept off stdout.

        The client logs to stdout by itself, into the middle of what a command prints. Here it is
        silent, and with ``-v`` it writes to stderr.
        """
        import pulsar

        level = pulsar.LoggerLevel.Debug if self.verbosity > 1 else pulsar.LoggerLevel.Info
        logger = _clientlog.to_stderr(level) if self.verbosity else _clientlog.silent()
        return {**connection.client_kwargs(), "logger": logger}


def settings_of(ctx: click.Context) -> Settings:
    """The settings of this run of the command line."""
    return ctx.find_root().ensure_object(Settings)


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    if value is not None and param.name is not None:
        settings_of(ctx).flags[param.name] = value
    return value


def connection_options(function: Function) -> Function:
    """Add the options that say where the cluster is; read them with ``@pass_connection``.

    The root command has them, so every command does already (``delaylevel --service-url … send``);
    a command that has them too accepts them after its name.
    """
    existing = click.Path(exists=True, dir_okay=False)
    options = [
        click.option("--service-url", metavar="URL", help="The cluster's pulsar:// address."),
        click.option("--admin-url", metavar="URL", help="The cluster's http:// admin address."),
        click.option("--token-file", type=existing, help="A file that holds the token."),
        click.option("--tls-trust-certs-file", type=existing, help="Certificates to trust (PEM)."),
        click.option("--tls-certificate-file", type=existing, help="Own certificate (PEM)."),
        click.option("--tls-private-key-file", type=existing, help="Own private key (PEM)."),
        click.option(
            "--tls-allow-insecure/--no-tls-allow-insecure",
            default=None,
            help="Accept any certificate.",
        ),
        click.option(
            "--tls-validate-hostname/--no-tls-validate-hostname",
            default=None,
            help="Compare the certificate's name with the host's.",
        ),
        click.option("--config", "config_file", type=existing, help="A configuration file (TOML)."),
    ]
    for option in reversed(options):
        function = _quietly(option)(function)
    return function


def _quietly(option: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """The same option, remembered in the settings and not passed to the command."""

    def decorate(function: Function) -> Function:
        function = option(function)
        attached = (
            function.params if isinstance(function, click.Command) else function.__click_params__  # type: ignore[attr-defined]
        )
        attached[-1].callback = _remember
        attached[-1].expose_value = False
        return function

    return decorate


def pass_settings(function: Callable[Concatenate[Settings, P], R]) -> Callable[P, R]:
    """Give the command the `Settings` as its first argument."""

    @functools.wraps(function)
    def command(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(settings_of(click.get_current_context()), *args, **kwargs)

    return command


def pass_connection(function: Callable[Concatenate[Connection, P], R]) -> Callable[P, R]:
    """Give the command a `Connection` to a cluster that answers, as its first argument."""

    @functools.wraps(function)
    def command(*args: P.args, **kwargs: P.kwargs) -> R:
        connection = settings_of(click.get_current_context()).connection()
        require_reachable(connection)
        return function(connection, *args, **kwargs)

    return command


def require_reachable(connection: Connection, timeout_seconds: float = 5.0) -> None:
    """Knock at the service address, so that a broker that is away is said at once.

    Raises:
        BrokerUnreachableError: none of the hosts accepts a connection; the text says what to try.
    """
    secure = connection.service_url.startswith("pulsar+ssl")
    hosts = connection.service_url.partition("://")[2].split("/")[0].split(",")
    reason = "no host is named"
    for host in hosts:
        try:
            parts = urlsplit(f"//{host.strip()}")
            port = parts.port or (6651 if secure else 6650)
            with socket.create_connection((parts.hostname or "", port), timeout_seconds):
                return
        except ValueError:
            reason = "it is no host and port"
        except OSError as error:
            reason = error.strerror or str(error)
    raise BrokerUnreachableError(f"no broker answers at {connection.service_url}: {reason}")


def output_option(function: Function) -> Function:
    """Add ``-o table|wide|json|jsonl``, passed as ``output``."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(FORMATS),
        default="table",
        show_default=True,
        help="How the result is printed.",
    )(function)


def examples(*lines: str) -> str:
    """The ``Examples:`` part of a command's help, for its ``epilog``."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def parse_duration(text: str) -> timedelta:
    """A duration such as ``90s``, ``15m``, ``2h``, ``1h30m``, ``250ms`` or ``3d``.

    Raises:
        ValueError: it is none of these.
    """
    compact = text.strip().lower()
    parts = _DURATION.findall(compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        raise ValueError(f"{text!r} is no duration: write 90s, 15m, 2h, 1h30m or 3d")
    try:
        return timedelta(milliseconds=sum(float(n) * _UNITS_MS[unit] for n, unit in parts))
    except OverflowError:
        raise ValueError(f"{text!r} is longer than any calendar") from None


def parse_unit(text: str) -> PartitionBy | timedelta:
    """A unit by name (``day``) or as a duration (``2s``).

    Raises:
        ValueError: it is neither.
    """
    named = PartitionBy.__members__.get(text.strip().upper())
    if named is not None:
        return named
    try:
        return parse_duration(text)
    except ValueError:
        names = ", ".join(name.lower() for name in PartitionBy.__members__)
        raise ValueError(f"{text!r} is no unit: write {names}, or a duration such as 2s") from None


def parse_time_ms(text: str, now_ms: int) -> int:
    """A time as ISO-8601 with its zone, epoch milliseconds, or relative to now such as ``+2h``.

    Parameters:
        text: what was given.
        now_ms: the present, in ms since the epoch.

    Returns:
        Milliseconds since the epoch.

    Raises:
        ValueError: it is none of these, or has no zone.
    """
    stripped = text.strip()
    if stripped == "now":
        return now_ms
    if stripped[:1] in ("+", "-"):
        offset_ms = round(parse_duration(stripped[1:]) / timedelta(milliseconds=1))
        return now_ms + (offset_ms if stripped[0] == "+" else -offset_ms)
    if stripped.isdecimal():
        if int(stripped) < _SMALLEST_EPOCH_MS:
            raise ValueError(
                f"{text!r} is too small for milliseconds since 1970: are these seconds?"
            )
        return int(stripped)
    iso = stripped[:-1] + "+00:00" if stripped[-1:] in ("Z", "z") else stripped
    try:
        moment = datetime.fromisoformat(iso)
    except ValueError:
        raise ValueError(
            f"{text!r} is no time: write 2030-01-31T12:00:00Z, epoch milliseconds, or +2h"
        ) from None
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone: add Z or an offset such as +02:00")
    return (moment - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(milliseconds=1)


class TimeParam(click.ParamType):  # type: ignore[type-arg] # generic from click 8.5 on
    """A point in time; the command gets milliseconds since the epoch."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse what was given, relative to the clock of this machine."""
        if isinstance(value, int):
            return value
        try:
            return parse_time_ms(str(value), time.time_ns() // 1_000_000)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class DurationParam(click.ParamType):  # type: ignore[type-arg] # generic from click 8.5 on
    """A duration; the command gets a `timedelta`."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        """Parse what was given."""
        if isinstance(value, timedelta):
            return value
        try:
            return parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


TIME = TimeParam()
DURATION = DurationParam()
