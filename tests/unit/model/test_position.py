"""Tests of positions: their order, their neighbours, and their text form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.errors import InvalidInputError
from delaylevel.model.position import EARLIEST, Position, stable_id
from support.seeds import examples

quick = examples(40)
numbers = st.integers(0, 1 << 62)
positions = st.builds(Position, numbers, numbers, st.integers(-1, 1023))


@quick
@given(positions, positions)
def test_positions_are_ordered_by_ledger_then_entry_then_batch(
    one: Position, other: Position
) -> None:
    as_tuples = (one.ledger, one.entry, one.batch) < (other.ledger, other.entry, other.batch)
    assert (one < other) == as_tuples
    assert one > EARLIEST


@quick
@given(positions)
def test_a_position_has_a_next_entry_and_a_start(position: Position) -> None:
    assert position.entry_start <= position < position.next <= position.next_entry
    assert position.entry_start.batch == position.next_entry.batch == -1
    if position.batch < 0:
        assert position.next == position.next_entry
    else:
        assert position.next.entry == position.entry
        assert position.next.batch == position.batch + 1


@quick
@given(positions)
def test_the_text_form_can_be_parsed(position: Position) -> None:
    assert Position.parse(str(position)) == position


def test_valid_text_is_parsed() -> None:
    assert Position.parse("12:7") == Position(12, 7, -1)
    assert str(Position(12, 7, 3)) == "12:7:3"
    assert Position.parse("-1:-1") == EARLIEST


@pytest.mark.parametrize(
    "text",
    ["", "12", "12:", "a:b", "1:2:3:4", "1:2: 3", "1;2", "1:2\n", "\uff11:2", "1_0:2", "+1:2"],
)
def test_invalid_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"write ledger:entry") as caught:
        Position.parse(text)
    assert repr(text) in str(caught.value)


def test_the_stable_id_names_the_position() -> None:
    topic = "persistent://shop/eu/orders-delay-level-partition-4"
    assert stable_id(topic, Position(12, 7, 3)) == "shop/eu/orders-delay-level-partition-4:12:7:3"
    assert stable_id(topic, Position(12, 7)) != stable_id(topic, Position(12, 7, 0))
