"""Tests of the rules for messages that a target does not take."""

from __future__ import annotations

import pytest

from delaylevel.cluster.failures import TOO_LARGE
from delaylevel.cluster.targets.receivers import NO_TOPIC
from delaylevel.model.envelope import ATTEMPT, Envelope
from delaylevel.model.level_topic import MissingTarget
from delaylevel.model.message import ParkedMessage
from delaylevel.model.retries import RETRY_ID
from delaylevel.mover import hop
from support.fakes import describe

ORDERS = "persistent://public/default/orders"


def set_aside(reason: str, policy: MissingTarget, **properties: str) -> hop.Placed:
    message = ParkedMessage(7, 1, -1, 0, "k", "", 0, properties, b"x")
    envelope = Envelope(1000, ORDERS, "id")
    description = describe(on_missing_target=policy)
    return hop.set_aside(description, message, envelope, reason, 2000)


@pytest.mark.parametrize("policy", MissingTarget)
def test_a_message_of_an_existing_target_is_held(policy: MissingTarget) -> None:
    aside = set_aside("Timeout", policy)
    assert (aside.place.counter, aside.place.counted_by) == ("held", ORDERS)
    assert aside.properties[ATTEMPT] == "1"


def test_a_message_without_a_target_follows_the_policy() -> None:
    found = [set_aside(NO_TOPIC, policy).place.counter for policy in MissingTarget]
    expected = {"hold": "held", "dead-letter": "dead", "drop": "dropped"}
    assert found == [expected[policy.value] for policy in MissingTarget]


def test_a_retry_is_not_dropped_with_its_target() -> None:
    # Its original is acknowledged.
    assert set_aside(NO_TOPIC, MissingTarget.DROP, **{RETRY_ID: "id"}).place.counter == "dead"


@pytest.mark.parametrize("policy", MissingTarget)
def test_a_message_that_is_too_large_is_a_dead_letter(policy: MissingTarget) -> None:
    aside = set_aside(TOO_LARGE, policy)
    assert aside.place.counter == "dead"
    assert "too large for" in aside.place.counted_by
