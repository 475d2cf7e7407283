"""Tests of the names of retry topics, and of the properties and IDs of copies and dead letters."""

from __future__ import annotations

from types import SimpleNamespace

import pulsar
import pytest

from delaylevel.consumer.message import ReceivedMessage
from delaylevel.consumer.retry import Failure, decide
from delaylevel.consumer.retry_publisher import (
    copy_id,
    copy_properties,
    letter_id,
    letter_properties,
)
from delaylevel.consumer.retry_topics import RetryTopics
from delaylevel.errors import InvalidInputError
from delaylevel.model import envelope as env
from delaylevel.model import retries

ORDERS = "persistent://public/default/orders"
FAILED = Failure(ValueError("no money"), "ValueError: no money", "Traceback …")


def received(
    properties: dict[str, str] | None = None, subscription: str = "billing"
) -> ReceivedMessage:
    """Return a message that a consumer received: a retried copy, if it has properties."""
    own = {"REAL_TOPIC": ORDERS, "REAL_SUBSCRIPTION": subscription}
    values = {
        "topic_name": f"{ORDERS}-{subscription}-RETRY" if properties else ORDERS,
        "message_id": pulsar.MessageId(-1, 7, 8, -1),
        "properties": {**own, **properties} if properties else {},
        "publish_timestamp": 5_000,
        "partition_key": "",
    }
    raw = SimpleNamespace(**{name: lambda value=value: value for name, value in values.items()})
    return ReceivedMessage(raw, ORDERS, subscription, 0)


def letter(message: ReceivedMessage) -> dict[str, str]:
    return letter_properties(
        message,
        message.all_properties,
        FAILED,
        retry_topic="persistent://public/default/orders-billing-RETRY",
        due_ms=1_700_000_000_000,
        schema=None,
        compression=None,
    )


@pytest.mark.parametrize("subscription", ["", "a/b"])
def test_subscriptions_that_cannot_be_a_part_of_a_name_are_refused(subscription: str) -> None:
    with pytest.raises(InvalidInputError, match="cannot have retries"):
        RetryTopics.of("orders", subscription)


def test_each_attempt_has_its_own_id_and_a_repeated_one_the_same() -> None:
    message = received({"ORIGIN_MESSAGE_ID": "m", "RECONSUMETIMES": "2"})
    assert copy_id(message) == copy_id(message) == "m#billing#3"
    later = received({"ORIGIN_MESSAGE_ID": "m", "RECONSUMETIMES": "3"})
    assert copy_id(later) == "m#billing#4"
    replayed = received({"ORIGIN_MESSAGE_ID": "m", "delaylevel-retry-round": "1"})
    assert copy_id(replayed) == "m#billing#1.1"
    assert (letter_id(message), letter_id(replayed)) == ("m#billing#dead.1", "m#billing#dead.2")
    assert copy_id(received({"ORIGIN_MESSAGE_ID": "m"}, "b#1")) == "m#b%231#1"


def test_long_ids_are_hashed_and_stay_different() -> None:
    ids = set()
    for text in ("x" * 512, "y" * 512):
        for attempt in ("1", "2"):
            properties = {"ORIGIN_MESSAGE_ID": text, "RECONSUMETIMES": attempt}
            ids.add(copy_id(received(properties)))
    assert len(ids) == 4
    assert all(len(each) <= env.LONGEST_ID for each in ids)


@pytest.mark.parametrize("other", ["REAL_TOPIC", "REAL_SUBSCRIPTION"])
def test_a_copy_that_was_forwarded_to_another_topic_is_a_new_message(other: str) -> None:
    properties = {"RECONSUMETIMES": "3", "delaylevel-retry-id": "m", "ORIGIN_MESSAGE_ID": "x"}
    rounds = {"delaylevel-retry-round": "2", "delaylevel-retry-published": "5", "mine": "1"}
    message = received({**properties, **rounds, other: "other"})
    assert (message.attempt, message.id) == (1, message.position_id)
    assert message.first_published_ms == message.publish_ms
    copied = copy_properties(message, "")
    assert copied == {
        "mine": "1",
        "RECONSUMETIMES": "1",
        "REAL_TOPIC": ORDERS,
        "REAL_SUBSCRIPTION": "billing",
        "ORIGIN_MESSAGE_ID": message.position_id,
        "delaylevel-retry-id": message.id,
        "delaylevel-retry-published": str(message.publish_ms),
    }
    assert copy_id(message) == f"{message.id}#billing#1"


def test_the_attempts_of_a_replayed_dead_letter_are_counted_from_the_first() -> None:
    properties = letter(received({"mine": "1", "RECONSUMETIMES": "4"}))
    assert properties[env.REASON] == "attempt 5 failed: ValueError: no money"
    assert properties["delaylevel-retry-traceback"] == "Traceback …"
    assert "RECONSUMETIMES" not in properties
    again = retries.replayed_properties(properties, other_target=False)
    kept = {"delaylevel-retry-id", "delaylevel-retry-published", "delaylevel-retry-round"}
    assert {name for name in again if name.startswith(retries.RETRY_PREFIX)} == kept
    elsewhere = env.application_properties(retries.replayed_properties(properties, True))
    assert elsewhere == {"mine": "1"}


def test_texts_that_are_not_unicode_make_no_property_unreadable() -> None:
    decision = decide(None, 1, ValueError("a \ud800 b\nc" + "x" * 9000))
    properties = letter_properties(
        received(),
        {},
        decision.failure,
        retry_topic="orders-billing-RETRY",
        due_ms=1,
        schema=None,
        compression="LZ4",
    )
    assert properties["delaylevel-retry-error"].startswith("ValueError: a \\ud800 b cxx")
    assert len(properties["delaylevel-retry-error"]) == 1000
    assert len(properties["delaylevel-retry-traceback"]) == 8000
    assert properties[env.COMPRESSION] == "LZ4"
