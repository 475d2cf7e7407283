"""Every command is found by who reads: help, an example of its own, and a page that mentions it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from delaylevel.cli.main import cli

ROOT = Path(__file__).parents[3]
# cli.md is made from the commands themselves: it proves nothing.
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "cli.md"),
]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, click.Command]]:
    yield " ".join(path), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None, name
            yield from commands(child, (*path, name))


ALL = dict(commands(cli, ("delaylevel",)))


def test_the_whole_tree_is_walked() -> None:
    assert {"delaylevel horizon", "delaylevel pending find", "delaylevel sync spark"} < set(ALL)
    assert len(ALL) > 30


@pytest.mark.parametrize("name", ALL)
def test_a_command_has_help_and_an_example_of_its_own(name: str) -> None:
    command = ALL[name]
    assert command.help, "no help"
    assert command.get_short_help_str(), "no line for the list of commands"
    epilog = command.epilog or ""
    assert "Examples:" in epilog, "no examples"
    assert f"  {name}" in epilog, "no example of this very command"
    for parameter in command.params:
        assert not isinstance(parameter, click.Option) or parameter.help or parameter.hidden, (
            f"{parameter.name} has no help"
        )


@pytest.mark.parametrize("name", [name for name in ALL if name != "delaylevel"])
def test_a_command_is_mentioned_in_the_documentation(name: str) -> None:
    if name in TEXT:
        return
    # `delaylevel levels list|show` and `levels list` count as well.
    *group, last = name.split()[1:]
    joined = f"delaylevel {' '.join(group)} ".replace("  ", " ")
    assert group, f"no page mentions {name}"
    mentions = [
        TEXT[at + len(joined) :].split(maxsplit=1)[0].strip("`:,.") for at in _all(TEXT, joined)
    ]
    assert any(last in mention.split("|") for mention in mentions), f"no page mentions {name}"


def _all(text: str, part: str) -> Iterator[int]:
    at = text.find(part)
    while at >= 0:
        yield at
        at = text.find(part, at + 1)
