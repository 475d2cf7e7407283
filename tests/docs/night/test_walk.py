"""The walk of a new user in a fresh environment, on an idle machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.walk import WAYS, Walk

LIMIT_S = 180.0


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
def test_a_new_user_gets_delayed_messages_within_three_minutes(way: str, tmp_path: Path) -> None:
    walk = Walk(tmp_path)
    walk.go(way)
    for program in ("python remind.py", "python first.py"):
        assert walk.arrivals(program)[0][1] == "at once"
    assert walk.seconds < LIMIT_S
