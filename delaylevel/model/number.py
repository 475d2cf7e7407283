"""Numbers in the properties of messages."""

from __future__ import annotations

import math
import re

#: A decimal number. Other spellings (1_000, 0x10, inf, 1,5, spaces) are no numbers.
NUMBER_PATTERN = "[+-]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]+)?"
_fits = re.compile(NUMBER_PATTERN).fullmatch


def number(text: str | None) -> float:
    """Return the finite decimal number that a text spells, or NaN."""
    if text is None or not _fits(text):
        return math.nan
    value = float(text)
    return value if math.isfinite(value) else math.nan
