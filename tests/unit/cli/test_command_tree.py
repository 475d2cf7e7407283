"""Tests of all commands and options: help, examples, documentation, meanings."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from delaylevel.cli.main import SECTIONS, cli

ROOT = Path(__file__).parents[3]
# cli.md is generated from the commands, so a command in it may still be undocumented.
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "cli.md"),
]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)

# Options with two help texts. They set a value in one command and match it in others; and the
# program's own version is that of no server.
TWO_TEXTS = {
    "--key": {"Partition key.", "Partition key to match."},
    "--property": {"Property of the message. Repeatable.", "Property to match. Repeatable."},
    "--id": {
        "ID (delaylevel.id) of the message. It identifies the message together with its topic and "
        "key: of several messages with the same three, the dispatcher delivers one.",
        "Stable ID (delaylevel.id) to match.",
    },
    "--target": {"Further business topic to serve. Repeatable.", "Business topic to match."},
    "--version": {
        "Show the version of this program.",
        "Version of the server; by default that of the instance's last start, or 4.0.8.",
    },
}

# A help text is a noun phrase ("Number of lines to show.") or a verb phrase ("Replace an existing
# file."). It does not start with one of these words.
NOT_A_PHRASE = {
    *("How", "What", "Whether", "Where", "Who", "Which", "When", "The", "A", "An"),
    *("If", "It", "This", "These", "They", "You", "Also", "Only", "Then", "Not"),
    *("By", "For", "From", "In", "Of", "On", "To", "With", "Without", "Is", "Are", "Has", "Can"),
}


def walk(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and all commands below it, including hidden ones, with their names."""
    yield " ".join(path), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None, name
            yield from walk(child, (*path, name))


EVERY = {name.removeprefix("delaylevel").strip(): c for name, c in walk(cli, ("delaylevel",))}


def is_hidden(name: str) -> bool:
    """Return True if the command, or a group that contains it, is hidden."""
    words = name.split()
    return any(EVERY[" ".join(words[:end])].hidden for end in range(1, len(words) + 1))


SHOWN = {name: command for name, command in EVERY.items() if not is_hidden(name)}
HIDDEN = {name: command for name, command in EVERY.items() if is_hidden(name)}
OPTIONS = [
    pytest.param(name, option, id=f"{name} {max(option.opts, key=len)}".strip())
    for name, command in SHOWN.items()
    for option in command.params
    if isinstance(option, click.Option)
]


def help_of(name: str, width: int = 80) -> str:
    """Return the help text of a command, as shown in a terminal of a width."""
    result = CliRunner().invoke(cli, [*name.split(), "--help"], env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_whole_tree_is_walked() -> None:
    assert {"horizon", "pending list", "mover run"} < set(SHOWN)
    assert len(SHOWN) > 30
    assert not HIDDEN


@pytest.mark.parametrize("name", SHOWN)
def test_a_command_has_help_and_an_example_of_its_own(name: str) -> None:
    command = SHOWN[name]
    full = f"delaylevel {name}".strip()
    assert command.help, "the help is missing"
    assert command.get_short_help_str(), "the short help is missing"
    epilog = command.epilog or ""
    assert "Examples:" in epilog, "the examples are missing"
    assert f"  {full}" in epilog, "there is no example of the command itself"
    _, _, lines = help_of(name).partition("Examples:\n")
    shown = [line.strip() for line in lines.splitlines() if line.strip()]
    assert shown
    assert any(line.startswith(full) for line in shown)
    assert all("delaylevel" in line or line.startswith(("#", "--", "|")) for line in shown)
    for width in (80, 120):
        assert max(map(len, help_of(name, width).splitlines())) <= width


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_the_help_of_an_option_is_a_phrase_with_a_full_stop(
    name: str, option: click.Option
) -> None:
    text = option.help or ""
    assert text, "the help is missing"
    assert text[0].isupper(), "the help starts with a lowercase letter"
    assert text.endswith("."), "the help does not end with a full stop"
    assert text.split()[0] not in NOT_A_PHRASE, (
        "the help is neither a noun phrase nor a verb phrase"
    )


def test_an_option_has_one_meaning() -> None:
    texts: dict[str, set[str]] = defaultdict(set)
    for parameter in OPTIONS:
        _, option = parameter.values
        assert isinstance(option, click.Option)
        for spelling in (*option.opts, *option.secondary_opts):
            texts[spelling].add(option.help or "")
    several = {spelling: found for spelling, found in texts.items() if len(found) > 1}
    assert several == TWO_TEXTS


def test_the_help_has_four_sections() -> None:
    shown = help_of("")
    titles = re.findall(r"^(\w[\w ]*):$", shown, re.MULTILINE)
    assert titles == ["Options", "Set up", "Run", "Look", "Try"]
    listed = re.findall(r"^  ([a-z]+)  ", shown.partition("\nSet up:\n")[2], re.MULTILINE)
    assert listed == [
        *("broker", "levels", "plan"),
        *("run", "mover", "dispatcher", "listen", "send"),
        *("pending", "horizon", "top", "doctor", "dlq"),
        "demo",
    ]
    assert listed == [name for names in SECTIONS.values() for name in names]
    assert "..." not in shown.partition("\nSet up:\n")[2], "a command's line is cut off"


@pytest.mark.parametrize("name", [name for name in SHOWN if name])
def test_a_command_is_mentioned_in_the_documentation(name: str) -> None:
    full = f"delaylevel {name}"
    if full in TEXT:
        return
    # `delaylevel levels list|show` mentions both commands.
    *group, last = name.split()
    joined = f"delaylevel {' '.join(group)} ".replace("  ", " ")
    assert group, f"no page mentions {full}"
    mentions = [
        TEXT[at + len(joined) :].split(maxsplit=1)[0].strip("`:,.") for at in _all(TEXT, joined)
    ]
    assert any(last in mention.split("|") for mention in mentions), f"no page mentions {full}"


def _all(text: str, part: str) -> Iterator[int]:
    at = text.find(part)
    while at >= 0:
        yield at
        at = text.find(part, at + 1)
