"""Tests of the names of retry topics, and of the properties and IDs of copies and dead letters."""

from __future__ import annotations

from types import SimpleNamespace

import pulsar
import pytest

from delaylevel.consumer.message import ReceivedMessage
from delaylevel.consumer.retry import decide
from delaylevel.consumer.retry_publisher import copy_id, letter_properties
from delaylevel.consumer.retry_topics import RetryTopics
from delaylevel.errors import InvalidInputError
from delaylevel.model import envelope as env

ORDERS = "persistent://public/default/orders"


def received(**properties: str) -> ReceivedMessage:
    """Return a retried copy that a consumer received."""
    values = {
        "topic_name": f"{ORDERS}-billing-RETRY",
        "message_id": pulsar.MessageId(-1, 7, 8, -1),
        "properties": {"REAL_TOPIC": ORDERS, "REAL_SUBSCRIPTION": "billing", **properties},
        "publish_timestamp": 5_000,
        "partition_key": "",
    }
    raw = SimpleNamespace(**{name: lambda value=value: value for name, value in values.items()})
    return ReceivedMessage(raw, ORDERS, "billing", 0)


@pytest.mark.parametrize("subscription", ["", "a/b"])
def test_subscriptions_that_cannot_be_a_part_of_a_name_are_refused(subscription: str) -> None:
    with pytest.raises(InvalidInputError, match="cannot have retries"):
        RetryTopics.of("orders", subscription)


def test_long_ids_are_hashed_and_stay_different() -> None:
    ids = set()
    for text in ("x" * 512, "y" * 512):
        for attempt in ("1", "2"):
            ids.add(copy_id(received(ORIGIN_MESSAGE_ID=text, RECONSUMETIMES=attempt)))
    assert len(ids) == 4
    assert all(len(each) <= env.LONGEST_ID for each in ids)


def test_texts_that_are_not_unicode_make_no_property_unreadable() -> None:
    decision = decide(None, 1, ValueError("a \ud800 b\nc" + "x" * 9000))
    properties = letter_properties(
        received(),
        {},
        decision,
        retry_topic="orders-billing-RETRY",
        due_ms=1,
        schema=None,
    )
    assert properties["delaylevel-retry-error"].startswith("ValueError: a \\ud800 b cxx")
    assert len(properties["delaylevel-retry-error"]) == 1000
    assert len(properties["delaylevel-retry-traceback"]) == 8000
