"""Rules for the blocks of all pages."""

from __future__ import annotations

import re

import pytest

from support.pages import FENCE, KINDS, OPTION, PAGES, ROOT


@pytest.mark.parametrize("name", PAGES)
def test_every_block_has_a_known_kind_and_known_options(name: str) -> None:
    for block in PAGES[name]:
        assert block.kind in KINDS, f"{name}:{block.line}"
        assert all(map(OPTION.fullmatch, block.options.split())), f"{name}:{block.line}"
    # No code hides in an indented block.
    assert not re.findall(r"\n\n    \S.*", FENCE.sub("", (ROOT / name).read_text(encoding="utf-8")))
