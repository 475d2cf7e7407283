"""Options that several commands share, and the settings that they fill."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urlsplit

import click

from delaylevel.cluster import client_log
from delaylevel.cluster.connection import Connection
from delaylevel.errors import BrokerUnreachableError, InvalidInputError
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import FinalWindow, MissingTarget, Mover

from .output import FORMATS
from .values import DURATION, TIME

P = ParamSpec("P")
R = TypeVar("R")
Function = TypeVar("Function", bound=Callable[..., Any])


class RenamedOption(click.Option):
    """An option that still accepts its former spellings, which no help shows.

    Args:
        former: the former spellings, with their dashes.
    """

    def __init__(self, *args: Any, former: Sequence[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.former = tuple(former)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Register all spellings. Usage, help and errors read ``opts``, which has the new ones."""
        shown = self.opts
        self.opts = [*shown, *self.former]
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = shown


@dataclass
class Settings:
    """The options given before a command runs; ``@pass_connection`` finds them here."""

    flags: dict[str, Any] = field(default_factory=dict)
    verbosity: int = 0

    def connection(self) -> Connection:
        """Load the connection, without contacting anything.

        Raises:
            ConfigError: a flag, environment variable or file cannot be used.
        """
        return Connection.load(**self.flags)

    def client_kwargs(self, connection: Connection) -> dict[str, Any]:
        """Return ``connection.client_kwargs()`` with a logger that keeps off stdout.

        By default the client logs to stdout, into the middle of a command's result. Here it is
        silent, and writes to stderr with ``-v``.
        """
        return {**connection.client_kwargs(), "logger": client_log.for_verbosity(self.verbosity)}

    def open_client(self, connection: Connection) -> Any:
        """Return a new ``pulsar.Client`` with that logger; the caller closes it."""
        return connection.open_client(logger=client_log.for_verbosity(self.verbosity))


def settings_of(ctx: click.Context) -> Settings:
    """Return the settings of this invocation."""
    return ctx.find_root().ensure_object(Settings)


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    if value is not None and param.name is not None:
        settings_of(ctx).flags[param.name] = value
    return value


def connection_options(function: Function) -> Function:
    """Add the options that locate the cluster; ``@pass_connection`` reads them.

    The root command has them, which serves every command (``delaylevel --service-url … send``).
    A command that also has them accepts them after its own name.
    """
    existing = click.Path(exists=True, dir_okay=False)
    options = [
        click.option(
            "--service-url", metavar="URL", help="Service URL of the cluster (pulsar://)."
        ),
        click.option("--admin-url", metavar="URL", help="Admin URL of the cluster (http://)."),
        click.option("--token-file", type=existing, help="File that holds the token."),
        click.option("--tls-trust-certs-file", type=existing, help="Trusted certificates (PEM)."),
        click.option("--tls-certificate-file", type=existing, help="Client certificate (PEM)."),
        click.option(
            "--tls-private-key-file", type=existing, help="Private key of the client (PEM)."
        ),
        click.option(
            "--tls-allow-insecure/--no-tls-allow-insecure",
            default=None,
            help="Accept any server certificate.",
        ),
        click.option(
            "--tls-validate-hostname/--no-tls-validate-hostname",
            default=None,
            help="Check the server's host name against its certificate.",
        ),
        click.option("--config", "config_file", type=existing, help="Configuration file (TOML)."),
    ]
    for option in reversed(options):
        function = _quietly(option)(function)
    return function


def _quietly(option: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Return an option that fills the settings instead of an argument of the command."""

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
    """Pass the `Settings` to the command as its first argument."""

    @functools.wraps(function)
    def command(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(settings_of(click.get_current_context()), *args, **kwargs)

    return command


def pass_connection(function: Callable[Concatenate[Connection, P], R]) -> Callable[P, R]:
    """Pass the `Connection` of a cluster that answers to the command as its first argument."""

    @functools.wraps(function)
    def command(*args: P.args, **kwargs: P.kwargs) -> R:
        connection = settings_of(click.get_current_context()).connection()
        require_reachable(connection)
        return function(connection, *args, **kwargs)

    return command


def require_reachable(connection: Connection, timeout_seconds: float = 5.0) -> None:
    """Connect to the service address, so that an absent broker is reported at once.

    The Pulsar client would try again until its operation timeout.

    Raises:
        BrokerUnreachableError: none of the hosts accepts a connection.
    """
    secure = connection.service_url.startswith("pulsar+ssl")
    hosts = connection.service_url.partition("://")[2].split("/")[0].split(",")
    reason = "the address names no host"
    for host in hosts:
        try:
            parts = urlsplit(f"//{host.strip()}")
            port = parts.port or (6651 if secure else 6650)
            with socket.create_connection((parts.hostname or "", port), timeout_seconds):
                return
        except ValueError:
            reason = "the address is not HOST:PORT"
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
        help="Format of the result.",
    )(function)


def metrics_options(function: Function) -> Function:
    """Add ``--metrics-port`` and ``--metrics-address``."""
    port = click.option(
        "--metrics-port",
        type=click.IntRange(0, 65535),
        metavar="PORT",
        help="Port that serves metrics to Prometheus; 0 for any free port.",
    )
    address = click.option(
        "--metrics-address",
        default="127.0.0.1",
        show_default=True,
        metavar="ADDRESS",
        help="Address of the interface that serves metrics.",
    )
    return port(address(function))


delivery_option = click.option(
    "--delivery",
    type=click.Choice([item.value for item in Delivery]),
    default=Delivery.AT_LEAST_ONCE.value,
    show_default=True,
    help="Delivery guarantee; effectively-once needs the broker's deduplication.",
)
trigger_option = click.option(
    "--trigger",
    type=DURATION,
    help="Interval between the mover's batches; by default a fifth of the shortest lead.",
)
spill_dir_option = click.option(
    "--spill-dir",
    type=click.Path(file_okay=False, path_type=Path),
    cls=RenamedOption,
    former=["--directory"],
    help="Folder of the dispatcher's spill files.",
)
mover_option = click.option(
    "--mover",
    type=click.Choice([mover.value for mover in Mover]),
    default=Mover.SPARK.value,
    show_default=True,
    help="Kind of mover that hands off near-due messages.",
)
final_window_option = click.option(
    "--final-window",
    type=click.Choice([window.value for window in FinalWindow]),
    default=FinalWindow.TRACKER.value,
    show_default=True,
    help="Keeper of messages between their last hand-off and their due time.",
)


level_topic_option = click.option(
    "--level-topic", metavar="NAME", help="Name of the level topic; by default TOPIC-delay-level."
)


def _check_namespace(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if len(value.split("/")) != 2 or not all(value.split("/")):
        raise InvalidInputError(f"{value!r} is not a namespace: write tenant/namespace")
    return value


namespace_argument = click.argument(
    "namespace", default="public/default", callback=_check_namespace
)


def max_delay_option(**attributes: Any) -> Callable[[Function], Function]:
    """Return ``--max-delay``, passed as ``maximum``, with attributes such as its default."""
    return click.option(
        "--max-delay",
        "maximum",
        type=DURATION,
        cls=RenamedOption,
        former=["--max"],
        help="Longest delay.",
        **attributes,
    )


def at_option(*former: str) -> Callable[[Function], Function]:
    """Return ``--at``, passed as ``due_ms``, which also accepts former spellings."""
    return click.option(
        "--at",
        "due_ms",
        type=TIME,
        cls=RenamedOption,
        former=former,
        help="Due time: ISO-8601, epoch ms or +2h.",
    )


def on_missing_target_option(**attributes: Any) -> Callable[[Function], Function]:
    """Return ``--on-missing-target`` with attributes such as its default."""
    return click.option(
        "--on-missing-target",
        type=click.Choice([policy.value for policy in MissingTarget]),
        help="Action for messages whose business topic does not exist.",
        **attributes,
    )


def log_options(function: Function) -> Function:
    """Add ``-n/--lines`` and ``-f/--follow``."""
    lines = click.option(
        "-n",
        "--lines",
        type=click.IntRange(min=0),
        default=100,
        show_default=True,
        help="Number of lines to show.",
    )
    follow = click.option("-f", "--follow", is_flag=True, help="Print new lines until Ctrl-C.")
    return lines(follow(function))


def examples(*lines: str) -> str:
    """Return the ``Examples:`` part of a command's help, for its ``epilog``."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
