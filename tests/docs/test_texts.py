"""The rules of clusters are complete."""

from __future__ import annotations

import re
from pathlib import Path

from delaylevel.cluster.rules import OURS, RULES

ROOT = Path(__file__).parents[2]
OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")


def test_the_table_has_the_rules_of_the_code() -> None:
    _, _, rest = OPERATIONS.partition("| rule | what we need |")
    table = rest.split("\n\n")[0].splitlines()[2:]
    assert [line.split("|")[1].strip() for line in table] == [rule.name for rule in RULES]


def test_the_page_names_every_policy_of_our_topics() -> None:
    (row,) = re.findall(r"\| topic policies \|.*", OPERATIONS)
    assert row.count("`set-") == sum(value is not None for value in vars(OURS).values()) + 1
