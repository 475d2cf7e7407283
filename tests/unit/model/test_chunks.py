"""Tests of dead letters in chunks: every message can be cut, and its chunks joined."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.model.chunks import ChunkJoiner, ChunkRef, Letter, split
from delaylevel.model.envelope import CHUNK, REASON
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import Position

T0 = 1_800_000_000_000
texts = st.text(max_size=8)
messages = st.builds(
    ParkedMessage,
    *(st.just(number) for number in (7, 1, -1, T0)),
    key=texts,
    ordering_key=texts,
    event_ms=st.integers(0, T0),
    properties=st.dictionaries(texts, texts, max_size=4),
    value=st.none() | st.binary(max_size=100),
)


def message(value: bytes | None = b"body", **properties: str) -> ParkedMessage:
    return ParkedMessage(7, 1, -1, T0, "k", "o", 5, {"color": "red", **properties}, value)


def stored(chunks: Any, entry: int = 1) -> list[ParkedMessage]:
    """Return messages as a reader of the dead-letter topic gets them, one entry each."""
    return [
        ParkedMessage(
            8, number, -1, T0 + number, chunk.key, chunk.ordering_key, chunk.event_ms,
            chunk.properties, chunk.value,
        )
        for number, chunk in enumerate(chunks, entry)
    ]  # fmt: skip


def joined(found: list[ParkedMessage]) -> list[Letter]:
    joiner = ChunkJoiner()
    letters = [letter for item in found if (letter := joiner.add(item)) is not None]
    return [*letters, *joiner.incomplete()]


def content(item: ParkedMessage) -> tuple[Any, ...]:
    return item[4:]


@given(st.lists(messages, min_size=1, max_size=3, unique_by=repr), st.integers(1, 60), st.randoms())
def test_chunks_in_any_order_and_number_are_the_messages_again(
    given_messages: list[ParkedMessage], chunk_bytes: int, chance: random.Random
) -> None:
    parts = []
    for item in given_messages:
        cut = split(item, item.properties, chunk_bytes)
        assert all(len(part.value or b"") <= chunk_bytes for part in cut)
        parts += cut + chance.sample(cut, chance.randrange(len(cut) + 1))
    chance.shuffle(parts)
    found = stored(parts)
    letters = joined(found)
    assert not any(letter.damage for letter in letters)
    wanted = sorted(map(repr, map(content, given_messages)))
    assert sorted(repr(content(letter.message)) for letter in letters) == wanted
    positions = [position for letter in letters for position in letter.positions]
    assert sorted(positions) == [item.position for item in found]


def test_a_message_that_is_no_chunk_is_a_letter_of_its_own() -> None:
    for text in ("", "x", "0:1", "a" * 32 + ":2:2", "a" * 32 + ":-1:2", "A" * 32 + ":0:1"):
        item = message(**{CHUNK: text})
        assert ChunkRef.read(item) is None
        assert joined([item]) == [Letter(item, [item.position], T0)]


def test_a_letter_takes_the_place_of_its_first_chunk() -> None:
    found = stored(split(message(), {REASON: "r" * 900}, 400))
    assert [item.properties[REASON] for item in found] == ["r" * 500] * len(found)
    (letter,) = joined([found[1], found[0], *found[2:]])
    assert letter.message.position == Position(8, 1)
    assert (letter.message.publish_ms, letter.latest_ms) == (T0 + 1, T0 + len(found))
    assert letter.message.properties == {REASON: "r" * 900}


def test_missing_chunks_are_reported_with_the_ones_that_are_there() -> None:
    found = stored(split(message(), {}, 50))
    whole = message()
    letters = joined([whole, *found[1:]])
    assert letters[0].message == whole
    assert letters[1].damage.startswith(f"incomplete: {len(found) - 1} of {len(found)} chunks")
    assert letters[1].positions == [item.position for item in found[1:]]
    assert letters[1].latest_ms == found[-1].publish_ms


def test_a_second_attempt_completes_the_first() -> None:
    cut = split(message(), {}, 50)
    (letter,) = joined([*stored(cut[:2]), *stored(cut, entry=10)])
    assert (letter.damage, content(letter.message)) == ("", ("k", "o", 5, {}, b"body"))
    assert len(letter.positions) == len(cut) + 2


@pytest.mark.parametrize("damage", [b"other", None])
def test_chunks_with_another_content_are_reported(damage: bytes | None) -> None:
    found = stored(split(message(), {}, 50))
    (letter,) = joined([found[0]._replace(value=damage), *found[1:]])
    assert "is not the digest" in letter.damage
    assert len(letter.positions) == len(found)


def test_chunks_without_a_header_are_reported() -> None:
    for value in (b"", b"\0\0\0\2{}", b"\0\0\0\4true", b"\0\0\0\1\xff"):
        digest = hashlib.blake2b(value, digest_size=16).hexdigest()
        (letter,) = joined([message(value, **{CHUNK: f"{digest}:0:1"})])
        assert "no readable header" in letter.damage
