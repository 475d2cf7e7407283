"""A test of the table in docs/operations.md against the rules of the code."""

from __future__ import annotations

import re
from pathlib import Path

from delaylevel.cluster.rules import OURS, RULES

PAGE = (Path(__file__).parents[2] / "docs/operations.md").read_text()


def test_the_table_has_the_rules_of_the_code() -> None:
    _, _, rest = PAGE.partition("| rule | what we need |")
    table = rest.split("\n\n")[0].splitlines()[2:]
    assert [line.split("|")[1].strip() for line in table] == [rule.name for rule in RULES]


def test_the_page_names_every_policy_of_our_topics() -> None:
    (row,) = re.findall(r"\| topic policies \|.*", PAGE)
    assert row.count("`set-") == sum(value is not None for value in vars(OURS).values()) + 1
