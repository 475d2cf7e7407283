"""Tests of routing: options that are refused, a fast path, and descriptions that are read again.

Routes are in the vectors of the wire format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from threading import Thread
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from delaylevel.errors import (
    DelayLevelError,
    DelayTooLongError,
    InvalidDelayError,
    InvalidInputError,
    UnsupportedOptionError,
    UpgradeRequiredError,
)
from delaylevel.model.due_time import LATEST_DUE_MS
from delaylevel.model.envelope import SchemaRef
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Mover
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.producer import level_topic_cache
from delaylevel.producer.checks import Message
from delaylevel.producer.level_topic_cache import LevelTopicCache
from delaylevel.producer.routing import BUSINESS, WINDOW, Route, Routing
from delaylevel.testing import ManualClock
from delaylevel.topics import lifecycle
from support.fakes import describe

T0 = 1_800_000_000_000
HOUR, DAY = 3_600_000, 86_400_000
BOUNDS = sorted(
    {at + off for at in (0, 1000, HOUR, 23 * HOUR, DAY, 29 * DAY, 30 * DAY) for off in (-1, 0, 1)}
)


def routing(overflow: str, **changes: Any) -> Routing:
    levels = Levels(
        [
            PartitionStrategy(maximum_delay=timedelta(days=30), overflow=overflow),
            PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(days=1)),
        ]
    )
    description = LevelTopicDescription("orders-delay-level", levels, ("orders",), **changes)
    return Routing(description, description.targets[0], None, ManualClock(T0))


delays = st.one_of(st.sampled_from(BOUNDS), st.integers(-DAY, 400 * DAY))
moments = st.one_of(
    delays.map(lambda ms: {"deliver_at": T0 + ms}),
    delays.map(lambda ms: {"deliver_at": datetime.fromtimestamp((T0 + ms) / 1000, timezone.utc)}),
    delays.map(lambda ms: {"deliver_after": timedelta(milliseconds=ms)}),
    st.tuples(delays, st.integers(-999, 999)).map(
        lambda both: {"deliver_after": timedelta(milliseconds=both[0], microseconds=both[1])}
    ),
    st.sampled_from(
        [{}, {"deliver_at": 0}, {"deliver_at": T0 // 1000}, {"deliver_at": True},
         {"deliver_at": -1}, {"deliver_at": T0 * 1000}, {"deliver_at": "soon"},
         {"deliver_at": datetime(2030, 1, 1)}, {"deliver_at": T0, "deliver_after": timedelta(1)}]
    ),
)  # fmt: skip
names = st.sampled_from(["tenant", "delaylevel.id", "delaylevel.due", "", "x"])
properties = st.one_of(st.none(), st.dictionaries(names, st.text(max_size=5)))


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the type and text of the error that it raises."""
    try:
        return call()
    except DelayLevelError as error:
        return type(error), str(error)


@given(
    moment=moments,
    own=properties,
    message_id=st.sampled_from([None, "order-7", "", "x" * 513]),
    key=st.sampled_from([None, "k"]),
    overflow=st.sampled_from(["reject", "recirculate"]),
    window=st.sampled_from(list(FinalWindow)),
    mover=st.sampled_from(list(Mover)),
    schema=st.sampled_from([None, SchemaRef("AVRO", "0123456789abcdef")]),
    compression=st.sampled_from([None, "LZ4"]),
)
def test_the_fast_path_gives_the_same_route_or_none(
    moment: dict[str, Any],
    own: dict[str, str] | None,
    message_id: str | None,
    key: str | None,
    overflow: str,
    window: FinalWindow,
    mover: Mover,
    schema: SchemaRef | None,
    compression: str | None,
) -> None:
    described = routing(overflow, final_window=window, mover=mover).description
    routes = Routing(described, described.targets[0], schema, ManualClock(T0), compression)
    arguments = (moment.get("deliver_at"), moment.get("deliver_after"), own, message_id, key)
    message = Message(b"", own, key, message_id=message_id, **moment)
    before = None if own is None else dict(own)
    placed = outcome(lambda: routes.route(message))
    found = outcome(lambda: routes.route_fast(*arguments))
    if not isinstance(placed, Route):
        assert found in (None, placed)
        return
    assert own == before  # the dict of the application is unchanged
    usual = not any(name.startswith("delaylevel.") for name in own or ())
    if placed.level != BUSINESS:
        assert placed.properties is not None
        assert placed.properties.get("delaylevel.compression") == compression
    if mover is Mover.SERVICE and placed.level != BUSINESS and usual:
        assert placed.properties is not None
        longest = (
            int(placed.properties["delaylevel.due"]) - T0 > 30 * DAY
        )  # such a delay recirculates
        assert longest or found is not None
    if found is None:
        return
    level, partition, written = found
    assert (level, written, None) == (placed.level, placed.properties, placed.deliver_at_ms)
    # Without a key and an ID, any window partition is valid.
    assume(level != WINDOW or key or message_id)
    assert partition == placed.partition


def test_a_due_time_beyond_the_year_9999_is_left_to_the_general_path() -> None:
    routes = routing("reject")
    clock = ManualClock(LATEST_DUE_MS - DAY)
    late = Routing(routes.description, routes.description.targets[0], None, clock)
    for moment in ((None, timedelta(days=2)), (LATEST_DUE_MS + DAY, None)):
        assert late.route_fast(*moment, None, None, None) is None
        with pytest.raises(InvalidDelayError, match="9999"):
            late.route(Message(deliver_at=moment[0], deliver_after=moment[1]))


# -- refused

PARKED = {"deliver_after": timedelta(days=2)}
UNPARKABLE = {"sequence_id": 7, "replication_clusters": ["a"], "disable_replication": True}


def route(**arguments: Any) -> Route:
    return routing("reject", final_window=FinalWindow.BROKER).route(Message(b"", **arguments))


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"deliver_at": datetime(2027, 2, 1)}, InvalidDelayError, "naive"),
        (
            {"deliver_after": timedelta(days=30, milliseconds=1)},
            DelayTooLongError,
            "30d1ms.*30d.*maximum_delay.*recirculate.*not sent",
        ),
        ({"message_id": "", **PARKED}, InvalidInputError, "1 to 512"),
        ({"message_id": "x" * 513}, InvalidInputError, "a text of 1 to 512"),
        ({"message_id": 7}, InvalidInputError, "a text of 1 to 512.*not 7"),
        (
            {**PARKED, "sequence_id": 7},
            UnsupportedOptionError,
            "sequence_id=7.*message_id=.*not sent",
        ),
        (
            {**PARKED, "replication_clusters": ["a"]},
            UnsupportedOptionError,
            r"replication_clusters=\['a'\].*business topic.*not sent",
        ),
        (
            {**PARKED, "disable_replication": True},
            UnsupportedOptionError,
            "disable_replication=True.*not sent",
        ),
    ],
)
def test_invalid_options_are_refused_with_a_remedy(
    arguments: dict[str, Any], error: type[InvalidInputError], said: str
) -> None:
    with pytest.raises(error, match=said):
        route(**arguments)


def test_options_without_effect_are_accepted_if_nothing_is_parked() -> None:
    assert set(UNPARKABLE) == set(Message().not_parkable)
    assert not route(**UNPARKABLE, deliver_after=timedelta(minutes=1)).parked
    assert not route(**UNPARKABLE).parked
    assert route(**PARKED, **dict.fromkeys(UNPARKABLE)).parked


WEEK = PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=timedelta(days=7))
KNOWN = describe(7, levels=Levels(WEEK))


class Looks:
    """A cache of a level topic, and when it looked at the broker."""

    def __init__(self, described: Callable[[], LevelTopicDescription]) -> None:
        self.now_s = 0.0
        self.at: list[float] = []
        self._described = described
        clock = ManualClock(1_800_000_000_000)
        self.cache = LevelTopicCache(
            lambda found: Routing(found, found.targets[0], None, clock),
            KNOWN,
            self._look,
            lambda: self.now_s,
        )

    def _look(self) -> LevelTopicDescription:
        self.at.append(self.now_s)
        return self._described()

    def route(self, now_s: float, days: int) -> int:
        self.now_s = now_s
        message = Message(deliver_after=timedelta(days=days))
        return self.cache.routed(lambda routing: routing.route(message)).partition


def test_refusals_query_the_broker_at_most_once_a_second() -> None:
    known = KNOWN
    looks = Looks(lambda: known)
    for _ in range(3):
        with pytest.raises(DelayTooLongError):
            looks.route(2.0, 8)
    longer = lifecycle.longer_levels(KNOWN.levels, timedelta(days=9))
    known = replace(KNOWN, levels=longer, former=(KNOWN.levels,))
    with pytest.raises(DelayTooLongError):
        looks.route(2.9, 8)
    assert looks.route(3.1, 8) == 7
    assert looks.at == [2.0, 3.1]
    # Another level topic of the same name is not an expansion.
    hours = PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(hours=9))
    known = replace(KNOWN, levels=Levels(hours))
    looks.now_s = 5.0
    assert not looks.cache.refresh()
    assert looks.cache.routing.description.levels == longer


def test_ctrl_c_at_the_begin_of_a_look_lets_later_ones_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    looks = Looks(lambda: KNOWN)
    with monkeypatch.context() as patch:
        patch.setattr(level_topic_cache.threading, "Thread", interrupted)
        with pytest.raises(KeyboardInterrupt):
            looks.route(61.0, 2)
    late = Thread(target=looks.cache.refresh, daemon=True)
    late.start()
    late.join(5)
    assert not late.is_alive()
    assert looks.at == [61.0]


def test_a_running_producer_continues_when_the_level_topic_needs_a_later_version(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every version understands ordinary messages; the producer refuses at its next start."""

    def described() -> LevelTopicDescription:
        raise UpgradeRequiredError("it is described in format 9")

    looks = Looks(described)
    looks.cache.check_exists()
    looks.now_s = 2.0
    assert not looks.cache.refresh()
    assert "format 9" in caplog.text
    assert looks.route(2.0, 2) == 1
