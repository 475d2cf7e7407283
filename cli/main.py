"""The ``delaylevel`` command: its groups, imported on first use, and what errors become."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import click

from delaylevel import __version__
from delaylevel.errors import (
    BrokerError,
    BrokerUnreachableError,
    DelayLevelError,
    InvalidInputError,
)

from .options import connection_options, examples, settings_of

# A module is imported when its command is asked for, so that `delaylevel broker` never loads Spark.
COMMANDS: Mapping[str, str] = {
    "broker": "delaylevel.cli.broker:broker",
    "levels": "delaylevel.cli.levels:levels",
    "send": "delaylevel.cli.send:send",
    "sync": "delaylevel.cli.sync:sync",
    "dispatch": "delaylevel.cli.dispatch:dispatch",
    "function": "delaylevel.cli.function:function",
    "doctor": "delaylevel.cli.doctor:doctor",
    "plan": "delaylevel.cli.plan:plan",
    "dlq": "delaylevel.cli.dlq:dlq",
    "horizon": "delaylevel.cli.horizon:horizon",
    "pending": "delaylevel.cli.pending:pending",
    "top": "delaylevel.cli.top:top",
    "demo": "delaylevel.cli.demo:demo",
}

_UNREACHABLE_HINT = (
    "Is the cluster up, and are --service-url and --admin-url right? "
    "`delaylevel broker start` starts a private broker on this machine."
)
# Of the Pulsar client; compared by name, so that nothing is imported to handle an error.
_UNREACHABLE_CLIENT_ERRORS = ("ConnectError", "Timeout", "NotConnected", "ServiceUnitNotReady")


class Failed(click.ClickException):
    """What was asked for could not be done."""

    exit_code = 1


class WrongInput(click.ClickException):
    """What the command was given cannot be used."""

    exit_code = 2


class NotReached(click.ClickException):
    """The broker does not answer."""

    exit_code = 3

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}\n{_UNREACHABLE_HINT}")


def translate(error: BaseException) -> click.ClickException | None:
    """What an exception becomes on the command line, or None where it is a bug of ours.

    Exit codes: 1 failed, 2 the input is wrong, 3 the broker is not reached.
    """
    text = str(error) or type(error).__name__
    if isinstance(error, BrokerUnreachableError):
        return NotReached(text)
    if isinstance(error, InvalidInputError) and not isinstance(error, BrokerError):
        return WrongInput(text)
    if isinstance(error, DelayLevelError):
        return Failed(text)
    pulsar_error = getattr(sys.modules.get("_pulsar"), "PulsarException", ())
    if isinstance(error, pulsar_error):
        name = type(error).__name__
        if name in _UNREACHABLE_CLIENT_ERRORS:
            return NotReached(
                f"the broker does not answer, or refuses the token; the Pulsar client only says "
                f"{name}"
            )
        return Failed(f"the Pulsar client reports {name}: {text}")
    return None


class RootGroup(click.Group):
    """Commands that are imported on first use; the one place where errors become exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands whose module exists."""
        return [name for name, target in COMMANDS.items() if _exists(target)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module."""
        target = COMMANDS.get(cmd_name)
        if target is None or not _exists(target):
            return None
        module, _, attribute = target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{target} is not a click command")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what it raises on purpose ends as a message and an exit code."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            failure = translate(error)
            if failure is None or settings_of(ctx).verbosity > 1:
                raise
            raise failure from error


def _exists(target: str) -> bool:
    return importlib.util.find_spec(target.partition(":")[0]) is not None


@click.group(
    cls=RootGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=examples(
        "delaylevel broker start",
        "delaylevel --service-url pulsar://broker.example:6650 levels list",
        "delaylevel demo",
    ),
)
@connection_options
@click.option("-v", "--verbose", count=True, help="Log to stderr; twice for more, and tracebacks.")
@click.version_option(__version__, "--version", prog_name="delaylevel")
@click.pass_context
def cli(ctx: click.Context, verbose: int) -> None:
    """Long-delayed messages through Apache Pulsar.

    A setting is taken from its option, or else from the environment (DELAYLEVEL_SERVICE_URL,
    DELAYLEVEL_ADMIN_URL, DELAYLEVEL_TOKEN, ...), or else from the configuration file, or else from
    the embedded broker that runs on this machine.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 broker not reached.
    """
    settings_of(ctx).verbosity = verbose
    if os.environ.get("NO_COLOR"):
        ctx.color = False
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    logging.basicConfig(
        stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def main() -> None:
    """The entry point of the ``delaylevel`` program."""
    cli(prog_name="delaylevel")


if __name__ == "__main__":
    main()
