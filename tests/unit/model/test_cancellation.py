"""Tests of the envelope of cancellations."""

from __future__ import annotations

from delaylevel.model.outcome import PAYLOAD, cancellation
from support.fakes import describe

WANTED = describe(window_partitions=4)


def test_a_cancellation_has_the_properties_of_its_message_and_its_kind() -> None:
    target = WANTED.targets[0]
    assert cancellation(1_800_000_000_000, target, "a").parked_properties({}) == {
        "delaylevel.due": "1800000000000",
        "delaylevel.target": target,
        "delaylevel.id": "a",
        "delaylevel.kind": "cancel",
    }
    assert PAYLOAD == b"cancel"
