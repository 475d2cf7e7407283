"""The glossary has one entry for each term, in alphabetical order."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/concepts.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| \*\*(.+?)\*\* \| (.+?) \|(.*)\|$", PAGE, re.MULTILINE)
TERMS = [term.strip("`") for term, _, _ in ROWS]


def test_each_term_has_one_entry_in_alphabetical_order() -> None:
    assert len(TERMS) > 40
    assert sorted(set(TERMS), key=str.lower) == TERMS


def test_the_terms_of_messages_and_topics_are_explained() -> None:
    kept = "park, unit, lead, hand off, nearly due, final window, level, mover, dispatcher, held"
    assert {*kept.split(", "), "dead letter", "level topic", "business topic"} <= set(TERMS)


def test_another_name_is_no_term_of_its_own_with_the_same_meaning() -> None:
    for term, meaning, elsewhere in ROWS:
        assert term.strip("`") not in [word.strip() for word in elsewhere.split(",")], term
        assert meaning[0].isupper(), term
