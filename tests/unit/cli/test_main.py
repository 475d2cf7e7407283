"""Tests of the command line as a whole: help, settings, lazy imports, and exit codes of errors."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from functools import partial
from subprocess import PIPE
from typing import Any

import _pulsar
import click
import pytest
from click.testing import CliRunner

from delaylevel import __version__, errors
from delaylevel.cli.main import cli
from delaylevel.cli.options import Settings, pass_settings
from delaylevel.cluster.connection.settings import Connection, require_reachable
from delaylevel.cluster.failures import client_error
from delaylevel.producer.client_calls import as_client_error
from support import plain_install
from support.python import python


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--nonsense", "No such option"),
        ("broker start --version latest", "full version"),
        ("send orders x --property novalue", "KEY=VALUE"),
        ("pending lst orders", "No such command 'lst'"),
        ("pending --limit x orders", "Invalid value for '--limit'"),  # options before the topic
        ("xyzzy", "No such command 'xyzzy'"),
        ("levels expand orders", "give the new longest delay"),
        ("levels expand orders --then hour:48h:5m", "a lead cannot be changed"),
    ],
)
def test_wrong_usage_has_exit_code_2(arguments: str, words: str) -> None:
    result = CliRunner().invoke(cli, arguments.split())
    assert (result.exit_code, words in result.output) == (2, True), result.output


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (errors.BrokerUnreachableError("no broker at pulsar://h:1"), 3),
        (_pulsar.ConnectError(), 3),
        (_pulsar.Timeout(), 3),
        (client_error("Timeout", "Pulsar error: TimeOut"), 3),
        (_pulsar.ProducerBusy(), 1),
        (as_client_error(errors.LevelTopicError("gone"), _pulsar.Result.TopicNotFound), 1),
        (errors.ConfigError("bad"), 2),
        (errors.InvalidDelayError("bad"), 2),
        (errors.DelayTooLongError("bad", delay_ms=2, maximum_delay_ms=1), 2),
        (errors.TargetNotAllowedError("the level does not list it"), 1),
        (errors.NotFoundError("no topic", status=404), 1),
        (errors.PrerequisiteError("install Java"), 1),
        (errors.MissingExtraError("pip install 'delaylevel[spark]'"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_each_error_has_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: Exception, exit_code: int
) -> None:
    @click.command()
    def failing() -> None:
        raise error

    monkeypatch.setattr(type(cli), "get_command", lambda self, ctx, name: failing)
    result = CliRunner().invoke(cli, ["failing"])
    assert result.exit_code == exit_code
    assert result.stdout == "", "an error goes to stderr only"
    assert result.stderr.startswith("Error: ")
    if isinstance(error, errors.DelayLevelError) and not isinstance(error, errors.ClientError):
        assert str(error) in result.stderr
    assert ("delaylevel broker start" in result.stderr) == (exit_code == 3)


def test_an_option_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"pulsar://127.0.0.1:{server.getsockname()[1]}"

        @click.command()
        @pass_settings
        def show(settings: Settings) -> None:
            connection = settings.reachable()
            click.echo(f"{connection.service_url} {connection.admin_url}")

        monkeypatch.setattr(type(cli), "get_command", lambda self, ctx, name: show)
        monkeypatch.setenv("DELAYLEVEL_ADMIN_URL", "http://environment:1")
        given = ["--service-url", address]
        result = CliRunner().invoke(cli, [*given, "show"])
        assert result.stdout == f"{address} http://environment:1\n", result.output
        result = CliRunner().invoke(cli, [*given, "--admin-url", "http://given:1", "show"])
        assert result.stdout == f"{address} http://given:1\n"


def test_an_unreachable_broker_is_reported_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        url = f"pulsar://127.0.0.1:{port}"
        require_reachable(Connection(service_url=url))
    with pytest.raises(errors.BrokerUnreachableError, match=str(port)):
        require_reachable(Connection(service_url=url))
    with socket.create_server(("127.0.0.1", 0)) as server:
        second = server.getsockname()[1]
        require_reachable(Connection(service_url=f"{url},127.0.0.1:{second}"))


def test_the_clients_log_stays_off_stdout() -> None:
    program = (
        "import click\n"
        "from delaylevel.cli import options, main\n"
        "@click.command()\n"
        "@options.pass_settings\n"
        "def go(settings):\n"
        "    with settings.client() as client:\n"
        "        client.create_producer('x')\n"
        "main.RootGroup.get_command = lambda self, ctx, name: go\n"
        "main.main()\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"pulsar://127.0.0.1:{server.getsockname()[1]}"
        hangs = {**os.environ, "DELAYLEVEL_SERVICE_URL": url}
        hangs["DELAYLEVEL_OPERATION_TIMEOUT_SECONDS"] = "1"
        quiet = python("-c", program, "go", env=hangs)
        assert (quiet.returncode, quiet.stdout) == (3, "")
        assert quiet.stderr.startswith("Error: the broker does not answer")
        loud = python("-c", program, "-v", "go", env=hangs)
        assert (loud.stdout, "Connected to broker" in loud.stderr) == ("", True), loud.stderr
    away = python("-c", program, "go", env={**hangs, "DELAYLEVEL_SERVICE_URL": url})
    assert (away.returncode, f"no broker answers at {url}" in away.stderr) == (3, True)


def test_the_broker_command_loads_neither_spark_nor_numpy_nor_the_client() -> None:
    program = (
        "import sys; from delaylevel.cli.main import cli\n"
        "cli(['broker', 'status'], standalone_mode=False)\n"
        "print(sorted({'pyspark', 'numpy', 'pulsar', 'pyarrow'} & sys.modules.keys()))"
    )
    result = python("-c", program)
    assert result.stdout.splitlines()[-1] == "[]", result.stderr


PRINTING = (
    "import click, sys\n"
    "from delaylevel.cli import main\n"
    "@main.cli.command()\n"
    "def go():\n"
    "    click.echo('\u2192 \u2026 \xe9')\n"
    "    main.note('\u2192')\n"
    "main.RootGroup.get_command = lambda self, ctx, name: go\n"
    "sys.argv = ['delaylevel', 'go']\n"
    "main.main()\n"
)


def test_a_terminal_without_a_character_gets_its_escape() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = python("-c", PRINTING, env=environment, encoding="latin-1", check=True)
    assert (done.stdout, done.stderr) == ("\\u2192 \\u2026 \xe9\n", "\\u2192\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_is_an_error_without_a_traceback() -> None:
    piped: dict[str, Any] = {"capture_output": False, "stdout": PIPE, "stderr": PIPE}
    with open("/dev/full", "wb") as full:
        done = python("-c", PRINTING, **{**piped, "stdout": full})
        assert (done.returncode, done.stderr) == (1, "Error: No space left on device\n")
        # Nothing ends because its log cannot be written.
        done = python("-c", PRINTING, **{**piped, "stderr": full})
        assert (done.returncode, done.stdout) == (0, "\u2192 \u2026 \xe9\n")


@pytest.mark.parametrize("output", [1, 2])
def test_an_output_that_is_closed_fails_nothing(output: int) -> None:
    load = ["--rate", "1", "--max-delay", "30d", "--size", "1KiB"]
    main = ["-m", "delaylevel.cli.main", "plan", *load]
    done = python(*main, preexec_fn=partial(os.close, output))
    other = done.stderr if output == 1 else done.stdout
    assert (done.returncode, len(other) > 50) == (0, True), done.stderr


def walk(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and all commands below it, with their names."""
    yield " ".join(path), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None, name
            yield from walk(child, (*path, name))


def help_of(name: str, width: int = 80) -> str:
    """Return the help text of a command, as shown in a terminal of a width."""
    _, *arguments = name.split()
    result = CliRunner().invoke(cli, [*arguments, "--help"], env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(("name", "command"), walk(cli, ("delaylevel",)))
def test_a_command_has_help_and_an_example_of_its_own(name: str, command: click.Command) -> None:
    assert command.help, "the help is missing"
    assert command.get_short_help_str(), "the short help is missing"
    for option in command.params:
        if isinstance(option, click.Option):
            assert (option.help or "").endswith("."), f"{option.opts} has no help"
    _, _, lines = help_of(name).partition("Examples:\n")
    shown = [line.strip() for line in lines.splitlines() if line.strip()]
    assert any(line.startswith(name) for line in shown), "there is no example of the command itself"
    assert all("delaylevel" in line or line.startswith("#") for line in shown)
    for width in (80, 120):
        assert max(map(len, help_of(name, width).splitlines())) <= width


def test_every_command_has_help_in_an_install_without_extras() -> None:
    commands = [[*name.split()[1:], "--help"] for name, _ in walk(cli, ("delaylevel",))]
    results = plain_install.run(commands)
    assert len(results) == len(commands) > 30
    for command, (code, _, trace) in zip(commands, results, strict=True):
        assert (command, code, trace) == (command, 0, "")


def test_the_version_is_shown() -> None:
    assert CliRunner().invoke(cli, ["--version"]).stdout == f"delaylevel, version {__version__}\n"
