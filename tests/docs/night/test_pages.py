"""All pages, typed on a real broker."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from support.page_reader import PAGES, Reader, bare, reader  # noqa: F401
from support.page_steps import BEFORE
from support.pages import Block, missing

TYPED = {title: [each for each in page if each.runs] for title, page in PAGES.items()}


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("title", "page"), [pytest.param(*each, id=each[0]) for each in TYPED.items() if each[1]]
)
def test_page(title: str, page: Sequence[Block], reader: Reader) -> None:
    """Type everything on a page, and compare what it shows."""
    before = BEFORE.get(title, {})
    reader.do(*before.get("", ()))
    for block in page:
        if "stopped" in block.options:
            reader.stop()
        if block.kind == "python":
            reader.python(block.code, "background" in block.options)
            continue
        exits = re.search(r"exits-(\d)", block.options)
        for line, shown in block.commands:
            reader.do(*before.get(bare(line), ()))
            output = reader.type(line, int(exits[1]) if exits else 0)
            # Columns may be wider.
            absent = missing(map(reader.translated, shown), output.splitlines())
            assert not absent, f"nothing like {absent[0]!r} in\n{output}"
    reader.stop()
