"""Tests of names: those that nobody can use are refused before anything is created."""

from __future__ import annotations

import pytest

from delaylevel import topics
from delaylevel.errors import InvalidInputError
from delaylevel.model.level_topic import LONGEST_NAME
from delaylevel.testing import MemoryPulsar
from support.fakes import describe

UNUSABLE = [".", "..", "a\nb", "a\tb", "\x00", "a\x7fb", "a\u0085b", "a\u2028b", "a\udc80b"]
USABLE = [
    "...",
    ".a",
    "a b",
    "a'b",
    'a"b',
    "a$b",
    "100%",
    "größe",
    "日" * 100,
    "a\u00a0b",
    "-",
    "a;b",
]


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_name_that_nobody_can_use_is_refused_with_the_reason(name: str) -> None:
    memory = MemoryPulsar()
    for wanted in (
        describe(targets=("orders", name)),
        describe(topic=f"persistent://public/default/{name}"),
    ):
        with pytest.raises(InvalidInputError, match=r"cannot be used: (it contains|the admin)"):
            topics.create(memory.admin, wanted)
    assert memory.admin.list_partitioned_topics("public/default") == []


@pytest.mark.parametrize("name", USABLE)
def test_other_names_are_usable(name: str) -> None:
    memory = MemoryPulsar()
    wanted = describe(topic=f"_{name}-delay-level", targets=(name,))
    assert topics.create(memory.admin, wanted) == wanted


def test_a_name_without_room_in_messages_is_refused() -> None:
    memory = MemoryPulsar()
    base = len("persistent://public/default/")
    fits = describe(targets=("t" * (LONGEST_NAME - base),))
    assert topics.create(memory.admin, fits) == fits
    for changes in (
        {"targets": ("t" * (LONGEST_NAME - base + 1),)},
        {"topic": "l" * (LONGEST_NAME - base - len("-window-log") + 1)},
    ):
        with pytest.raises(InvalidInputError, match=r"may have 600, .* shorten it"):
            topics.create(memory.admin, describe(**changes))
