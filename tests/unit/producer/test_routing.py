"""Tests of the routing of a producer: destinations, and refused options with remedies."""

from __future__ import annotations

import functools
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from delaylevel.errors import (
    DelayTooLongError,
    InvalidDelayError,
    InvalidInputError,
    UnsupportedOptionError,
)
from delaylevel.model.envelope import SchemaRef
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Mover
from delaylevel.producer.checks import Message
from delaylevel.producer.routing import WINDOW, Route, Routing
from delaylevel.testing import ManualClock
from support import fakes

T0 = 1_800_000_000_000
ORDERS = "persistent://public/default/orders"
describe = functools.partial(fakes.describe, 365, final_window=FinalWindow.BROKER)


def route(
    deliver_at: Any = None,
    deliver_after: Any = None,
    properties: dict[str, str] | None = None,
    message_id: Any = None,
    *,
    schema: SchemaRef | None = None,
    description: LevelTopicDescription | None = None,
    **unsupported: Any,
) -> Route:
    routing = Routing(description or describe(), ORDERS, schema, ManualClock(T0))
    moment = {"deliver_at": deliver_at, "deliver_after": deliver_after}
    return routing.route(Message(b"", properties, message_id=message_id, **moment, **unsupported))


TRACKER = describe(final_window=FinalWindow.TRACKER, window_partitions=8)


@pytest.mark.parametrize("mover", list(Mover))
def test_a_near_due_message_goes_into_the_window_with_its_envelope_and_no_timer(
    mover: Mover,
) -> None:
    tracker = replace(TRACKER, mover=mover)
    soon = timedelta(minutes=5)
    routing = Routing(tracker, ORDERS, SchemaRef("AVRO", "abc"), ManualClock(T0))
    own = {"a": "b", "delaylevel.id": "stale"}
    found = routing.route(Message(b"", own, "key", deliver_after=soon, message_id="mine"))
    assert found == Route(
        WINDOW,
        tracker.window_partition("key", "mine"),
        {
            "a": "b",
            "delaylevel.due": str(T0 + 300_000),
            "delaylevel.target": ORDERS,
            "delaylevel.id": "mine",
            "delaylevel.schema": "AVRO:abc",
        },
        None,
    )
    assert found.parked
    family = "persistent://public/default/orders-delay-level"
    assert routing.topic_of(found) == f"{family}-window-partition-{found.partition}"
    later = routing.route(Message(partition_key="key", deliver_after=timedelta(hours=3)))
    assert routing.topic_of(later) == f"{family}-hour-partition-2"


@pytest.mark.parametrize(
    ("arguments", "error", "parts"),
    [
        ({"deliver_at": datetime(2027, 2, 1)}, InvalidDelayError, ["naive"]),
        (
            {"deliver_after": timedelta(days=365, milliseconds=1)},
            DelayTooLongError,
            ["365d1ms", "365d", "maximum_delay", "recirculate"],
        ),
        ({"message_id": "", "deliver_after": timedelta(days=2)}, InvalidInputError, ["1 to 512"]),
        ({"message_id": "x" * 513}, InvalidInputError, ["513"]),
        (
            {"deliver_after": timedelta(days=2), "sequence_id": 7},
            UnsupportedOptionError,
            ["sequence_id=7", "message_id=", "not sent"],
        ),
        (
            {"deliver_after": timedelta(days=2), "replication_clusters": ["a"]},
            UnsupportedOptionError,
            ["replication_clusters=['a']", "business topic", "not sent"],
        ),
        (
            {"deliver_after": timedelta(days=2), "disable_replication": True},
            UnsupportedOptionError,
            ["disable_replication=True", "not sent"],
        ),
    ],
)
def test_invalid_options_are_refused_with_a_remedy(
    arguments: dict[str, Any], error: type[Exception], parts: list[str]
) -> None:
    with pytest.raises(error) as caught:
        route(**arguments)
    for part in parts:
        assert part in str(caught.value)
    assert isinstance(caught.value, InvalidInputError)


def test_options_without_effect_are_accepted_if_nothing_is_parked() -> None:
    some = {"sequence_id": 7, "replication_clusters": ["a"], "disable_replication": True}
    assert set(some) == set(Message().not_parkable)
    assert not route(deliver_after=timedelta(minutes=1), **some).parked
    assert not route(**some).parked
    nothing = dict.fromkeys(some)
    assert route(deliver_after=timedelta(days=2), **nothing).parked
