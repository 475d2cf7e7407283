"""Command lines in the documentation and in the help name only existing commands and options."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from delaylevel.cli.main import cli
from support.loading import load
from support.pages import ROOT, blocks_of

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs" / "alerts.yml"]
INLINE = re.compile(r"`(delaylevel [a-z][^`…]*)`", re.DOTALL)


def _lines() -> list[object]:
    found: dict[tuple[str, str], None] = {}
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    texts["help"] = load("tools/make_reference.py").commands_page()
    for page, text in texts.items():
        for block in (each for each in blocks_of(text) if each.kind in ("sh", "console")):
            for line in block.code.replace("\\\n", " ").splitlines():
                line = line.removeprefix("$ ").strip()
                if line.startswith("delaylevel "):
                    found[page, line] = None
        for line in INLINE.findall(text):
            found[page, " ".join(line.split())] = None
    return [pytest.param(line, id=f"{page}: {line}") for page, line in found]


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("|&;<>"):
            break
        words.append(word)
    return words[1:]


def test_command_lines_are_found() -> None:
    assert len(_lines()) > 100


@pytest.mark.parametrize("line", _lines())
def test_the_program_has_this_command(line: str) -> None:
    if re.search(r"[a-z]\|[a-z]", line):
        # `delaylevel levels drain|delete` names two commands.
        *before, last = line.split("|")
        first, _, one = before[0].rpartition(" ")
        names = [one, *before[1:], last.split()[0]]
        assert [_check(f"{first} {name}") for name in names]
        return
    _check(line)


def _check(line: str) -> bool:
    command: click.Command = cli
    words = _words(line)
    while True:
        try:
            _, words, _ = command.make_parser(click.Context(command)).parse_args(words)
        except click.BadOptionUsage:  # a text that names an option without its value
            return True
        except click.UsageError as error:
            raise AssertionError(f"{line}: {error.format_message()}") from error
        if not isinstance(command, click.Group) or not words:
            return True
        name, *words = words
        child = command.get_command(click.Context(command), name)
        if child is None and command.name == "pending":
            child, words = command.commands["list"], [name, *words]  # meant by `pending TOPIC`
        assert child is not None, f"{line}: no command {name}"
        command = child


@pytest.mark.parametrize("line", ["delaylevel levels make x", "delaylevel doctor --fast"])
def test_a_wrong_command_line_is_detected(line: str) -> None:
    with pytest.raises(AssertionError, match=r"(no command|No such option)"):
        _check(line)
