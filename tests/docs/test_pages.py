"""Rules for the blocks of all pages, and for the steps that go before them."""

from __future__ import annotations

import re

import pytest

from support.page_reader import KINDS, NOT_RUN, OPTION, PAGES, bare
from support.page_steps import BEFORE
from support.pages import FENCE, ROOT


def test_only_listed_blocks_are_not_run() -> None:
    left_out = {name: b.reason for name, found in PAGES.items() for b in found if b.reason}
    assert left_out == NOT_RUN
    assert sum(bool(b.reason) for found in PAGES.values() for b in found) == len(NOT_RUN)


@pytest.mark.parametrize("name", PAGES)
def test_every_block_has_a_known_kind_and_known_options(name: str) -> None:
    for block in PAGES[name]:
        assert block.kind in KINDS, f"{name}:{block.line}"
        assert all(map(OPTION.fullmatch, block.options.split())), f"{name}:{block.line}"
    # No code hides in an indented block.
    assert not re.findall(r"\n\n    \S.*", FENCE.sub("", (ROOT / name).read_text(encoding="utf-8")))


def test_steps_are_done_before_existing_commands() -> None:
    typed: dict[str, set[str]] = {}
    for name, found in PAGES.items():
        for block in found:
            if block.runs and block.kind != "python":
                lines = {bare(line) for line, _ in block.commands}
                typed.setdefault(name, set()).update(lines)
    for title, steps in BEFORE.items():
        assert set(steps) - {""} <= typed[title], title
