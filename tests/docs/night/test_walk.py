"""A test of the first pages, typed in a terminal with no more than what they install."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.walk import LIMIT_S, PAGES, WAYS, walk


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
def test_a_new_user_gets_delayed_messages_within_three_minutes(way: str, tmp_path: Path) -> None:
    done = walk(way, tmp_path)
    assert {step.page for step in done.steps} == set(PAGES)
    assert done.seconds < LIMIT_S, done.report()
    for program in ("python remind.py", "python first.py"):
        (output,) = ("\n".join(step.output) for step in done.steps if step.line == program)
        printed = re.findall(r"^ ?(\d+\.\d) s  (.+)$", output, re.MULTILINE)
        seconds = {words: float(passed) for passed, words in printed}
        assert printed[0][1] == "at once"
        assert seconds["in twelve seconds"] >= 11.9, "early"
        assert seconds.get("in three seconds", 3.0) >= 2.9, "early"
