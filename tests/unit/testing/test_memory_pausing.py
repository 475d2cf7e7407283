"""Tests of pauses and expiry in the in-memory Pulsar, by its manual clock."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from pulsar import ConsumerType

from delaylevel.errors import DelayLevelError, InvalidDelayError
from delaylevel.model.level_topic import Expired
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.topics.lifecycle import change_settings, pause, resume

NOON_MS = int(datetime(2026, 3, 1, 12, tzinfo=timezone.utc).timestamp() * 1000)
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


class Bench:
    """A business topic with a consumer, and a producer of delayed messages."""

    def __init__(self, final_window: str = "tracker") -> None:
        self.clock = ManualClock(NOON_MS)
        self.memory = MemoryPulsar(self.clock)
        client = self.memory.client()
        self.consumer = client.subscribe("orders", "app", consumer_type=ConsumerType.Shared)
        self.producer = client.create_producer(
            "orders", enable_delay_level_topic=True, final_window=final_window
        )
        self.topic = self.producer.description.topic

    def send(self, body: bytes, after: timedelta, **options: Any) -> None:
        self.producer.send(body, deliver_after=after, **options)

    def bodies(self) -> list[bytes]:
        return [message.data for message in self.memory.delivered("orders")]


def test_a_pause_and_its_end() -> None:
    bench = Bench()
    for minute in range(6):
        bench.send(b"%d" % minute, HOUR + minute * MINUTE)
    pause(bench.memory.admin, bench.topic, None, bench.clock)
    assert bench.memory.advance(timedelta(days=30)).due == 0
    assert len(bench.memory.pending("orders")) == 6
    bench.send(b"later", 3 * MINUTE)
    resume(bench.memory.admin, bench.topic, None, bench.clock, spread_ms=6 * 60_000)
    counts = []
    for _ in range(6):
        bench.memory.advance(MINUTE)
        counts.append(len(bench.bodies()))
    assert bench.bodies()[3:5] in ([b"later", b"3"], [b"3", b"later"], [b"2", b"later"])
    assert counts == sorted(counts)
    assert counts[-1] == 7
    assert all(abs(count - (minute + (minute > 2))) <= 1 for minute, count in enumerate(counts, 1))
    assert [body for body in bench.bodies() if body != b"later"] == [b"%d" % n for n in range(6)]


def test_the_brokers_own_delivery_cannot_be_paused() -> None:
    bench = Bench("broker")
    with pytest.raises(DelayLevelError, match="the broker itself delivers its messages"):
        pause(bench.memory.admin, bench.topic, None, bench.clock)


@pytest.mark.parametrize("final_window", ["tracker", "broker"])
@pytest.mark.parametrize("policy", Expired)
def test_messages_expire(final_window: str, policy: Expired) -> None:
    bench = Bench(final_window)
    change_settings(bench.memory.admin, bench.topic, expire_after_ms=10 * 60_000, expired=policy)
    bench.send(b"by default", 50 * HOUR)
    bench.send(b"its own", 50 * HOUR, expires_after=MINUTE)
    bench.send(b"kept", 50 * HOUR, expires_at=NOON_MS + 30 * 24 * 3_600_000)
    bench.clock.advance(51 * HOUR)  # no mover and no dispatcher runs
    report = bench.memory.advance(MINUTE)
    assert bench.bodies() == [b"kept"]
    assert report.due == 1
    assert report.expired.total() == 2
    assert report.dead.total() == 0
    letters = bench.memory.delivered(bench.producer.description.dead_letter_topic.partition(0).full)
    wanted = {b"by default", b"its own"} if policy is Expired.DEAD_LETTER else set()
    assert {letter.data for letter in letters} == wanted


@pytest.mark.parametrize(
    "options",
    [
        {"expires_after": timedelta(0), "deliver_after": HOUR},
        {"expires_at": NOON_MS + 1, "deliver_after": HOUR},
        {"expires_after": HOUR},
        {"expires_after": HOUR, "expires_at": NOON_MS + 9_000_000, "deliver_after": HOUR},
        {"expires_after": MINUTE, "deliver_at": NOON_MS - 3_600_000},
    ],
)
def test_an_expiry_without_sense_is_refused(options: dict[str, Any]) -> None:
    bench = Bench()
    with pytest.raises(InvalidDelayError, match=r"not sent|give one of them"):
        bench.producer.send(b"-", **options)
