"""All pages but the first ones, typed on a real broker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from support.page_reader import Reader, pages_to_walk, reader, walk  # noqa: F401
from support.pages import Block


@pytest.mark.parametrize(("title", "page", "whole"), list(pages_to_walk(of_the_first=False)))
def test_page(
    title: str, page: Sequence[Block], whole: bool, reader: Reader, expected: Any
) -> None:
    walk(reader, expected, title, page, whole)
