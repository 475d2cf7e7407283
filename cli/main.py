"""The ``delaylevel`` command: lazy imports, and the exit codes of errors."""

from __future__ import annotations

import importlib
import io
import logging
import os
import sys
from typing import Any

import click

from delaylevel import __version__
from delaylevel.cli.views.output import note
from delaylevel.errors import (
    BrokerError,
    BrokerUnreachableError,
    ClientError,
    DelayLevelError,
    InvalidInputError,
    MessageTooLargeError,
)

from .options import LOG_FORMAT, Settings, examples

# Each has a module of the same name, which is imported on first use, so that `delaylevel broker`
# never loads Spark.
_COMMANDS = ["broker", "levels", "plan", "run", "mover", "dispatcher", "send"]
_COMMANDS += ["pending", "horizon", "doctor", "dlq", "demo"]

# Exceptions of the Pulsar client, compared by name so that handling an error imports nothing.
_UNREACHABLE_CLIENT_ERRORS = ("ConnectError", "Timeout", "NotConnected", "ServiceUnitNotReady")

_NOT_REACHED = (
    "\nIs the cluster running, and are --service-url and --admin-url correct? `delaylevel broker "
    "start` starts a private broker on this machine."
)


class WrongInput(click.ClickException):
    """Error for input that cannot be used."""

    exit_code = 2


class NotReached(click.ClickException):
    """Error for a broker that does not answer."""

    exit_code = 3


def translate(error: BaseException) -> click.ClickException | None:
    """Return the command line's error for an exception, or None for a bug in this program."""
    text = str(error) or type(error).__name__
    if isinstance(error, BrokerUnreachableError):
        return NotReached(text + _NOT_REACHED)
    # A ClientError itself has only the name of the client's error, which is looked at below.
    if isinstance(error, DelayLevelError) and type(error) is not ClientError:
        wrong = isinstance(error, InvalidInputError)
        # What the broker refuses, or cannot store, is no wrong usage.
        other = isinstance(error, (BrokerError, MessageTooLargeError))
        return (WrongInput if wrong and not other else click.ClickException)(text)
    pulsar_error = getattr(sys.modules.get("pulsar"), "PulsarException", ClientError)
    if isinstance(error, (ClientError, pulsar_error)):
        name = getattr(error, "name", type(error).__name__)
        if name in _UNREACHABLE_CLIENT_ERRORS:
            text = "the broker does not answer, or it refuses the token; the Pulsar client reports"
            return NotReached(f"{text} only {name}{_NOT_REACHED}")
        return click.ClickException(f"the Pulsar client reports {name}: {text}")
    return None


class RootGroup(click.Group):
    """The root command: lazy imports, and errors turned into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order of the help."""
        return _COMMANDS

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command and return the command."""
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"delaylevel.cli.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command and turn its errors into messages and exit codes."""
        try:
            return super().invoke(ctx)
        except click.ClickException:
            raise
        except Exception as error:
            failure = translate(error)
            if failure is None or ctx.ensure_object(Settings).verbosity > 1:
                raise
            raise failure from error


_EXISTING = click.Path(exists=True, dir_okay=False)


@examples(
    "delaylevel broker start",
    "delaylevel --service-url pulsar://broker.example:6650 levels list",
    "delaylevel demo",
)
@click.group(
    cls=RootGroup,
    # Commands inherit these settings.
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.option(
    "--service-url", metavar="URL", help="Service URL of the cluster (pulsar://one:6650,two:6650)."
)
@click.option(
    "--admin-url",
    metavar="URL",
    help="Admin URL of the cluster; name several brokers (http://one:8080,two:8080).",
)
@click.option("--token-file", type=_EXISTING, help="File that holds the token.")
@click.option("--tls-trust-certs-file", type=_EXISTING, help="Trusted certificates (PEM).")
@click.option("--tls-certificate-file", type=_EXISTING, help="Client certificate (PEM).")
@click.option("--tls-private-key-file", type=_EXISTING, help="Private key of the client (PEM).")
@click.option(
    "--tls-allow-insecure/--no-tls-allow-insecure",
    default=None,
    help="Accept any server certificate.",
)
@click.option(
    "--tls-validate-hostname/--no-tls-validate-hostname",
    default=None,
    help="Check the server's host name against its certificate.",
)
@click.option("--config", "config_file", type=_EXISTING, help="Configuration file (TOML).")
@click.option(
    "-v",
    "--verbose",
    count=True,
    show_default=False,
    help="Log level on stderr: -v info, -vv debug and tracebacks.",
)
@click.version_option(
    __version__, "--version", prog_name="delaylevel", help="Show the version of this program."
)
@click.pass_context
def cli(ctx: click.Context, /, verbose: int, **connection: Any) -> None:
    """Send long-delayed messages through Apache Pulsar.

    A setting comes from its option, then from the environment (DELAYLEVEL_SERVICE_URL,
    DELAYLEVEL_ADMIN_URL, DELAYLEVEL_TOKEN, ...), then from the configuration file. Without any
    address, the private broker that runs on this machine is used.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 broker not reached.
    """
    given = {name: value for name, value in connection.items() if value is not None}
    ctx.obj = Settings(given, verbose)
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    logging.basicConfig(format=LOG_FORMAT, level=level)


def main() -> None:
    """Run the ``delaylevel`` program."""
    # Python has no stream for an output that is closed; another file would get its number.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal or pipe that is not UTF-8 gets escapes for the characters that it lacks.
            stream.reconfigure(errors="backslashreplace")
    code: Any = 0
    try:
        cli(prog_name="delaylevel")
    except SystemExit as ended:
        code = ended.code
    except OSError as error:  # a full disk, for example; click ends quietly if a pipe is closed
        logging.getLogger("delaylevel.cli").debug("the command failed", exc_info=True)
        where = f": {error.filename}" if error.filename else ""
        note(f"Error: {error.strerror or error}{where}")
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the command has told it, or it is a log, whose loss ends nothing
            # What is left in the buffer would fail again when the interpreter ends.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
    sys.exit(code)


if __name__ == "__main__":
    main()
