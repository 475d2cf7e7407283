"""All pages typed on a real broker, the first ones because of their slow commands."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from support.page_reader import Reader, pages_to_walk, reader, walk  # noqa: F401
from support.pages import Block


@pytest.mark.parametrize(("title", "page"), list(pages_to_walk(by_night=True)))
def test_page(title: str, page: Sequence[Block], reader: Reader) -> None:
    walk(reader, title, page, by_night=True)
