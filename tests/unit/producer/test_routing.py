"""Tests of the routing of a producer: destinations, and refused options with remedies."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pulsar
import pytest

from delaylevel.errors import (
    DelayTooLongError,
    InvalidDelayError,
    InvalidInputError,
    UnsupportedOptionError,
)
from delaylevel.model.envelope import SchemaRef
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Mover
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.producer.routing import BUSINESS, NOT_PARKABLE, WINDOW, Route, Routing
from delaylevel.producer.setup import (
    check_producer_options,
    level_producer_settings,
    window_producer_settings,
)
from delaylevel.testing import ManualClock
from support import fakes

T0 = 1_800_000_000_000
DAY = 86_400_000
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
    return routing.route(deliver_at, deliver_after, properties, message_id, **unsupported)


TRACKER = describe(final_window=FinalWindow.TRACKER, window_partitions=8)


@pytest.mark.parametrize("mover", list(Mover))
def test_a_near_due_message_goes_into_the_window_with_its_envelope_and_no_timer(
    mover: Mover,
) -> None:
    tracker = replace(TRACKER, mover=mover)
    soon = timedelta(minutes=5)
    routing = Routing(tracker, ORDERS, SchemaRef("AVRO", "abc"), ManualClock(T0))
    found = routing.route(None, soon, {"a": "b", "delaylevel.id": "stale"}, "mine", "key")
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
    later = routing.route(None, timedelta(hours=3), None, None, "key")
    assert routing.topic_of(later) == f"{family}-hour-partition-2"


def test_copies_of_one_id_go_into_one_window_partition() -> None:
    soon = timedelta(minutes=5)
    for message_id in ("a", "b", "c"):
        wanted = TRACKER.window_partition("", message_id)
        for _ in range(3):
            found = route(deliver_after=soon, message_id=message_id, description=TRACKER)
            assert found.partition == wanted


def test_without_key_and_id_a_batch_fills_before_the_next_window_partition() -> None:
    routing = Routing(TRACKER, ORDERS, None, ManualClock(T0))
    soon = timedelta(minutes=5)
    found = [routing.route(None, soon, None, None).partition for _ in range(16_000)]
    runs = [(key, len(list(group))) for key, group in itertools.groupby(found)]
    assert [count for _, count in runs] == [1000] * 16
    first = runs[0][0]
    assert [key for key, _ in runs] == [(first + number) % 8 for number in range(16)]


def test_with_a_tracker_due_messages_go_directly_to_the_target() -> None:
    for arguments in ({}, {"deliver_after": timedelta(0)}, {"deliver_at": T0 - 5}):
        found = route(description=TRACKER, **arguments)
        assert (found.level, found.deliver_at_ms) == (BUSINESS, None)
        assert not found.parked


@pytest.mark.parametrize("name", NOT_PARKABLE)
def test_options_that_the_window_cannot_keep_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=name):
        route(deliver_after=timedelta(minutes=5), description=TRACKER, **{name: [1]})


def test_the_window_is_batched_even_if_the_levels_are_not() -> None:
    levels, _ = level_producer_settings(
        {"batching_max_messages": 5000}, replace(TRACKER, mover=Mover.FUNCTION)
    )
    assert not levels["batching_enabled"]
    window = window_producer_settings(levels)
    assert window == {**levels, "batching_enabled": True}
    assert window["batching_max_messages"] == 1024


OURS = {"delaylevel.id": "old", "delaylevel.due": "1", "delaylevel.anything": "x"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, Route(-1, -1, None, None)),
        ({"deliver_at": 0}, Route(-1, -1, None, None)),
        ({"properties": {"a": "b"}}, Route(-1, -1, {"a": "b"}, None)),
        ({"properties": {"a": "b", **OURS}}, Route(-1, -1, {"a": "b"}, None)),
        (
            {"properties": OURS, "message_id": "m1"},
            Route(-1, -1, {"delaylevel.id": "m1", "delaylevel.target": ORDERS}, None),
        ),
        # Already due: sent at once with the due time, which lateness is measured against.
        (
            {"deliver_at": T0 - 5, "properties": {"a": "b", **OURS}},
            Route(-1, -1, {"a": "b", "delaylevel.due": str(T0 - 5)}, None),
        ),
        # Below the finest unit: delayed by the broker itself.
        (
            {"deliver_after": timedelta(minutes=59), "message_id": "m1"},
            Route(
                -1,
                -1,
                {
                    "delaylevel.due": str(T0 + 59 * 60_000),
                    "delaylevel.target": ORDERS,
                    "delaylevel.id": "m1",
                },
                T0 + 59 * 60_000,
            ),
        ),
        (
            {"deliver_after": timedelta(hours=5), "properties": {"a": "b", **OURS}},
            Route(
                1,
                4,
                {
                    "a": "b",
                    "delaylevel.due": str(T0 + 5 * 3_600_000),
                    "delaylevel.target": ORDERS,
                },
                None,
            ),
        ),
        (
            {"deliver_at": T0 + 365 * DAY, "message_id": "m1", "schema": SchemaRef("AVRO", "0f")},
            Route(
                0,
                363,
                {
                    "delaylevel.due": str(T0 + 365 * DAY),
                    "delaylevel.target": ORDERS,
                    "delaylevel.id": "m1",
                    "delaylevel.schema": "AVRO:0f",
                },
                None,
            ),
        ),
    ],
)
def test_messages_have_the_expected_route(arguments: dict[str, Any], expected: Route) -> None:
    given = arguments.get("properties")
    before = dict(given) if given else given
    assert route(**arguments) == expected
    assert expected.parked == (expected.level >= 0)
    assert given == before


@pytest.mark.parametrize(
    ("delay", "level", "broker_delay_ms"),
    [
        (timedelta(days=3, hours=7), 0, 3 * DAY - 600_000),
        (timedelta(hours=5, minutes=7), 1, 5 * 3_600_000 - 300_000),
    ],
)
def test_with_a_function_the_broker_delays_the_message(
    delay: timedelta, level: int, broker_delay_ms: int
) -> None:
    found = route(deliver_after=delay, description=describe(mover=Mover.FUNCTION))
    assert found.level == level
    assert found.deliver_at_ms == T0 + broker_delay_ms


@pytest.mark.parametrize(
    ("arguments", "error", "parts"),
    [
        (
            {"deliver_at": T0 + DAY, "deliver_after": timedelta(days=1)},
            InvalidDelayError,
            ["both given"],
        ),
        ({"deliver_at": (T0 + DAY) // 1000}, InvalidDelayError, ["multiply seconds by 1000"]),
        ({"deliver_at": datetime(2027, 2, 1)}, InvalidDelayError, ["naive"]),
        ({"deliver_after": timedelta(seconds=-1)}, InvalidDelayError, ["negative"]),
        ({"deliver_after": 3}, InvalidDelayError, ["timedelta"]),
        (
            {"deliver_after": timedelta(days=365, milliseconds=1)},
            DelayTooLongError,
            ["365d1ms", "365d", "maximum_delay", "recirculate"],
        ),
        ({"deliver_at": T0 + 400 * DAY}, DelayTooLongError, ["400d"]),
        ({"message_id": "", "deliver_after": timedelta(days=2)}, InvalidInputError, ["1 to 512"]),
        ({"message_id": 7, "deliver_after": timedelta(1)}, InvalidInputError, ["not int"]),
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
    assert set(some) == set(NOT_PARKABLE)
    assert not route(deliver_after=timedelta(minutes=1), **some).parked
    assert not route(**some).parked
    nothing = dict.fromkeys(NOT_PARKABLE)
    assert route(deliver_after=timedelta(days=2), **nothing).parked


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"encryption_key": "k"}, ["encryption_key", "decrypt"]),
        ({"crypto_key_reader": object()}, ["crypto_key_reader", "decrypt"]),
        ({"chunking_enabled": True}, ["chunking_enabled", "below the broker's limit"]),
        ({"message_router": print}, ["message_router", "partition_key"]),
        (
            {"access_mode": pulsar.ProducerAccessMode.Exclusive},
            ["access_mode", "lock out the mover", "use Shared"],
        ),
        ({"access_mode": pulsar.ProducerAccessMode.WaitForExclusive}, ["use Shared"]),
    ],
)
def test_unsupported_producer_options_are_refused(
    options: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(UnsupportedOptionError) as caught:
        check_producer_options(options)
    for part in parts:
        assert part in str(caught.value)


def test_other_producer_options_are_accepted() -> None:
    check_producer_options({})
    check_producer_options(
        {
            "access_mode": pulsar.ProducerAccessMode.Shared,
            "chunking_enabled": False,
            "encryption_key": None,
            "batching_enabled": True,
        }
    )


@pytest.mark.parametrize("timeout_ms", [0, -1])
def test_an_unlimited_send_timeout_is_refused(timeout_ms: int) -> None:
    with pytest.raises(UnsupportedOptionError) as caught:
        level_producer_settings({"send_timeout_millis": timeout_ms}, describe())
    for part in (f"send_timeout_millis={timeout_ms}", "too late", "at most the lead (5m)"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("timeout_ms", "warned"), [(1, False), (300_000, False), (300_001, True), (3_600_000, True)]
)
def test_a_send_timeout_above_the_shortest_lead_gives_a_warning(
    timeout_ms: int, warned: bool
) -> None:
    settings, warning = level_producer_settings({"send_timeout_millis": timeout_ms}, describe())
    assert settings["send_timeout_millis"] == timeout_ms
    assert (warning is not None) == warned
    if warning:
        assert f"send_timeout_millis={timeout_ms}" in warning
        assert "(5m)" in warning


@pytest.mark.parametrize(("unit_s", "timeout_ms"), [(2, 5000), (60, 15_000), (3600, 30_000)])
def test_the_default_send_timeout_depends_on_the_lead(unit_s: int, timeout_ms: int) -> None:
    unit = timedelta(seconds=unit_s)
    levels = Levels(PartitionStrategy(partition_by=unit, maximum_delay=unit * 5))
    settings, warning = level_producer_settings({}, describe(levels=levels))
    assert settings["send_timeout_millis"] == timeout_ms
    assert warning is None


def test_level_producers_keep_some_settings_and_limit_batches() -> None:
    options = {
        "compression_type": pulsar.CompressionType.ZSTD,
        "max_pending_messages": 7,
        "block_if_queue_full": True,
        "batching_max_publish_delay_ms": 3,
        "batching_max_allowed_size_in_bytes": 9,
        "properties": {"a": "b"},
        "batching_max_messages": 5000,
        "producer_name": "mine",
        "initial_sequence_id": 3,
        "batching_enabled": False,
    }
    settings, _ = level_producer_settings(options, describe())
    kept = {name: options[name] for name in list(options)[:6]}
    assert settings == {
        **kept,
        "initial_sequence_id": 1,
        "batching_enabled": False,
        "batching_max_messages": 1024,
        "send_timeout_millis": 30_000,
    }
    settings, _ = level_producer_settings({"batching_max_messages": 10}, describe())
    assert settings["batching_max_messages"] == 10
    # Messages that the broker delays are never batched.
    settings, _ = level_producer_settings({}, describe(mover=Mover.FUNCTION))
    assert settings["batching_enabled"] is False


@pytest.mark.parametrize("mover", list(Mover))
@pytest.mark.parametrize("given", [None, True, False])
def test_batches_are_the_default_and_can_be_turned_off(mover: Mover, given: bool | None) -> None:
    options = {} if given is None else {"batching_enabled": given}
    settings, _ = level_producer_settings(options, describe(mover=mover))
    # Messages that the broker delays are never batched.
    assert settings["batching_enabled"] is (mover is Mover.SERVICE and given is not False)
    window = window_producer_settings(settings, options)
    assert window == {**settings, "batching_enabled": given is not False}
