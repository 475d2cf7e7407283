"""Command lines in the documentation and in the help name only existing commands and options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from delaylevel.cli.main import cli
from support.loading import load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?:sh|console)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(delaylevel [a-z][^`…]*)`", re.DOTALL)


def _lines() -> list[object]:
    found: dict[tuple[str, str], None] = {}
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    texts["help"] = load("tools/make_reference.py").commands_page()
    for page, text in texts.items():
        for block in BLOCK.findall(text):
            joined = block.replace("\\\n", " ")
            for line in joined.splitlines():
                line = line.removeprefix("$ ").strip()
                if line.startswith("delaylevel "):
                    found[page, line] = None
        prose = BLOCK.sub("", text)
        for line in INLINE.findall(prose):
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
    options = {"-h", "--help", *_options(cli)}
    taken: click.Parameter | None = None
    for word in _words(line):
        if taken is not None:  # the value of the previous option
            taken = None
        elif word.startswith("-") and word != "-":
            name, _, value = word.partition("=")
            if re.fullmatch(r"-v+", word):
                name = "-v"
            assert name in options, f"{line}: no option {name}"
            found = [p for p in command.params if name in _spellings(p)]
            if found and isinstance(found[0], click.Option) and not value:
                takes_none = found[0].is_flag or found[0].count
                taken = None if takes_none else found[0]
        elif isinstance(command, click.Group):
            child = command.get_command(click.Context(command), word)
            if child is None and command.name == "pending":
                child = command.commands["list"]  # the command meant by `pending TOPIC`
            assert child is not None, f"{line}: no command {word}"
            command = child
            options = {"-h", "--help", *_options(command)}
    return True


def _options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in _spellings(parameter)}


def _spellings(parameter: click.Parameter) -> tuple[str, ...]:
    """Return all spellings of an option."""
    return (*parameter.opts, *parameter.secondary_opts)


@pytest.mark.parametrize("line", ["delaylevel levels make x", "delaylevel doctor --fast"])
def test_a_wrong_command_line_is_detected(line: str) -> None:
    with pytest.raises(AssertionError, match=r"no (command|option)"):
        _check(line)
