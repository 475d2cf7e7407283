"""A test of the table in docs/production.md against the rules of the code."""

from __future__ import annotations

from pathlib import Path

from delaylevel.cluster.rules import RULES, Rule

PAGE = Path(__file__).parents[2] / "docs/production.md"
HEAD = "| rule | policy of a namespace |"


def row(rule: Rule) -> str:
    setting = f"`{rule.setting}`" if rule.setting else "-"
    creation = "lifts it" if rule.lifted else "refuses it"
    cells = [rule.name, f"`{rule.policy}`", setting, rule.ours, rule.targets or "-", creation]
    return f"| {' | '.join(cells)} |"


def test_the_table_has_the_rules_of_the_code() -> None:
    _, _, rest = PAGE.read_text().partition(HEAD)
    table = rest.split("\n\n")[0].splitlines()[2:]
    assert table == [row(rule) for rule in RULES]
