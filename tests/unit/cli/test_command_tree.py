"""Tests of all commands and options: help and examples."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from delaylevel import __version__
from delaylevel.cli.main import cli
from support import plain_install


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
    _, _, lines = help_of(name).replace("\\\n", "").partition("Examples:\n")
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
