"""Tests of positions: their order, their neighbours, and their text form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.errors import InvalidInputError
from delaylevel.model.position import EARLIEST, Position
from support.seeds import examples

numbers = st.integers(0, 1 << 62)
positions = st.builds(Position, numbers, numbers, st.integers(-1, 1023))


@examples(40)
@given(positions, positions)
def test_positions_have_an_order_neighbours_and_a_text(one: Position, other: Position) -> None:
    as_tuples = (one.ledger, one.entry, one.batch) < (other.ledger, other.entry, other.batch)
    assert (one < other) == as_tuples
    assert EARLIEST < one.entry_start <= one < one.next <= one.next_entry
    assert one.next_entry == Position(one.ledger, one.entry + 1, -1)
    following = Position(one.ledger, one.entry, one.batch + 1)
    assert one.next == (one.next_entry if one.batch < 0 else following)
    assert one.entry_start == Position(one.ledger, one.entry, -1)
    assert Position.parse(str(one)) == one


@pytest.mark.parametrize(
    "text",
    ["", "12", "12:", "a:b", "1:2:3:4", "1:2: 3", "1;2", "1:2\n", "\uff11:2", "1_0:2", "+1:2"],
)
def test_invalid_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"write ledger:entry") as caught:
        Position.parse(text)
    assert repr(text) in str(caught.value)
