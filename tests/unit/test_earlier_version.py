"""Tests that everything that commit 9205e8a stored has the same meaning and bytes today."""

from __future__ import annotations

from itertools import chain

import pytest

from delaylevel.dispatcher.journal.records import SnapshotChunk, decode, encode
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.record import identity
from delaylevel.model import envelope as env
from delaylevel.model.envelope import Envelope
from delaylevel.model.level_topic import (
    PLAN_PROPERTY,
    LevelTopicDescription,
    Role,
)
from earlier import LEVEL_TOPICS, NAMESPACE, EarlierLevelTopic

every_level_topic = pytest.mark.parametrize("stored", LEVEL_TOPICS.values(), ids=LEVEL_TOPICS)


def described(stored: EarlierLevelTopic) -> LevelTopicDescription:
    found = LevelTopicDescription.from_properties(stored.topic, stored.properties)
    assert found is not None
    return found


@every_level_topic
def test_descriptions_keep_their_bytes(stored: EarlierLevelTopic) -> None:
    for text in (stored.description, stored.properties[PLAN_PROPERTY]):
        assert LevelTopicDescription.from_json(stored.topic, text).to_json() == text
    assert described(stored).version == 1
    assert '"version":1' in stored.description


@every_level_topic
def test_the_member_topics_are_the_same(stored: EarlierLevelTopic) -> None:
    assert list(described(stored).members()) == [each.member for each in stored.members]


@every_level_topic
def test_envelopes_keep_their_bytes_and_have_no_kind(stored: EarlierLevelTopic) -> None:
    description = described(stored)
    assert stored.parked
    for message in stored.parked:
        properties = message.properties
        assert env.KIND not in properties
        envelope = Envelope.read(properties)
        assert envelope.target in description.targets
        again = envelope.parked_properties(env.application_properties(properties))
        assert again == {key: text for key, text in properties.items() if key != env.REASON}


@every_level_topic
def test_messages_with_an_id_stay_in_their_window_partition(stored: EarlierLevelTopic) -> None:
    description = described(stored)
    for window in stored.role(Role.WINDOW):
        for index, partition in enumerate(window.messages):
            for message in partition:
                name = message.properties.get(env.ID, "")
                if name or message.key:
                    assert description.window_partition(message.key, name) == index


def test_a_dead_letter_has_the_same_reason() -> None:
    ((partition,),) = (each.messages for each in LEVEL_TOPICS["orders"].role(Role.DEAD_LETTER))
    (letter,) = partition
    with pytest.raises(env.EnvelopeError) as caught:
        Envelope.read(letter.properties)
    assert caught.value.reason == letter.properties[env.REASON]


def test_the_journal_has_the_same_meaning_and_bytes() -> None:
    (journal,) = LEVEL_TOPICS["orders"].role(Role.JOURNAL)
    opened = 0
    for partition, expected in zip(journal.messages, journal.states, strict=True):
        records = [message.value or b"" for message in partition]
        assert [encode(decode(record)) for record in records] == records
        assert any(isinstance(decode(record), SnapshotChunk) for record in records)
        state = JournalState.read(records)
        assert state.low_watermark == expected["low_watermark"]
        assert sorted(state.released) == expected["released"]
        assert state.next_number == expected["next_number"]
        assert state.sequences == expected["sequences"]
        assert sorted(state.memory.keys()) == expected["id_keys"]
        for count, numbers in enumerate(expected["open_intents_after_each"], 1):
            assert sorted(JournalState.read(records[:count]).open_intents) == numbers
            opened += bool(numbers)
    assert opened > 10


def test_released_messages_are_recognised_by_their_ids() -> None:
    (journal,) = LEVEL_TOPICS["orders"].role(Role.JOURNAL)
    states = [
        JournalState.read([message.value or b"" for message in partition])
        for partition in journal.messages
    ]
    target = f"persistent://{NAMESPACE}/orders"
    for name in ("released", "moved and released", "released later"):
        key, number = identity(f"order 7 / é / {name}", target, 0)
        assert any(state.memory.is_duplicate(number, key) for state in states)
    key, number = identity("order 7 / é / in days", target, 0)
    assert not any(state.memory.is_duplicate(number, key) for state in states)
    for key in set(chain.from_iterable(state.memory.keys() for state in states)):
        topic, source = key.split("\n")
        if source:
            assert identity(f"{source}:1:2:3", topic, 0)[0] == key
