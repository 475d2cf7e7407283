"""Tests of the identity under which the dispatcher remembers a message's ID."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delaylevel.dispatcher.record import identity

TARGET = "persistent://public/default/orders"
SOURCE = "public/default/orders-delay-level-hour-partition-3"

NUMBERS = st.one_of(
    st.integers(-2, 1 << 40).map(str),
    st.sampled_from(
        ["0", "1", "01", "-0", "+1", " 1", "1 ", "1\n", "1_0", "10", "\uff11", "\u0661", "-1", ""]
    ),
)
SOURCES = st.sampled_from([SOURCE, "inv", "inv:2024", "", "\n1", "a\n1", "a", ":", "a:", " a"])
IDS = st.one_of(
    st.text(max_size=20),
    st.tuples(SOURCES, NUMBERS, NUMBERS, NUMBERS).map(":".join),
)


def spelled(key: str, number: int) -> tuple[str, int] | None:
    """Return the ID and the attempt from which a compact identity was made; None for a hash."""
    source, _, attempt = key.removeprefix(f"{TARGET}\n").partition("\n")
    if not source:
        return None
    position = f"{number >> 32}:{number >> 10 & ((1 << 22) - 1)}:{(number & 1023) - 1}"
    return f"{source}:{position}", int(attempt or 0)


@given(IDS, st.integers(0, 12))
@example("inv:2024:01:02", 0)
@example(":7:1:2", 1)
@example("a\n1:7:1:2", 0)
def test_a_compact_identity_is_that_of_one_id_only(message_id: str, attempt: int) -> None:
    key, number = identity(message_id, TARGET, "", attempt)
    assert 0 <= number < 1 << 63
    assert spelled(key, number) in (None, (message_id, attempt))


@pytest.mark.parametrize(
    ("message_id", "expected"),
    [
        (f"{SOURCE}:7:1:-1", (f"{TARGET}\n{SOURCE}", 7 << 32 | 1 << 10)),
        (f"{SOURCE}:7:1:1021", (f"{TARGET}\n{SOURCE}", 7 << 32 | 1 << 10 | 1022)),
        ("inv:2024:1:2", (f"{TARGET}\ninv", 2024 << 32 | 1 << 10 | 3)),
        ("mine", (f"{TARGET}\n", 751_336_569_042_138_743)),
        (f"{SOURCE}:2147483648:1:2", (f"{TARGET}\n", 0)),
        (f"{SOURCE}:7:4194304:2", (f"{TARGET}\n", 0)),
        (f"{SOURCE}:7:1:1023", (f"{TARGET}\n", 0)),
    ],
)
def test_the_identities_of_known_ids(message_id: str, expected: tuple[str, int]) -> None:
    key, number = identity(message_id, TARGET, "")
    assert key == expected[0]
    assert not expected[1] or number == expected[1]
