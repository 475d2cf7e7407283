"""The simulation, compared with producer, mover and dispatcher on a real broker.

The same strategy in units of seconds, some twenty thousand messages in four minutes. The simulation
knows only the load (rate, delays, peaks) and the pace of the mover. The test compares numbers of
messages over time: handed off by each level, and pending in the window.

The pace depends on the machine, so it is measured: a mover that looks less often hands messages off
later, and with units of seconds this decides whether some of them pass another level.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pulsar
import pytest

from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.router import Router
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.simulation.movement import Movement
from delaylevel.simulation.series import pending
from delaylevel.simulation.traffic import Resolution, Traffic
from delaylevel.simulation.year import DayRecord
from world import RealWorld

pytestmark = [pytest.mark.broker, pytest.mark.long, pytest.mark.timeout(600)]

SECOND_MS = 1000
LEVELS = Levels(
    [
        PartitionStrategy(partition_by=timedelta(seconds=24), maximum_delay=timedelta(seconds=96)),
        PartitionStrategy(partition_by=timedelta(seconds=6), maximum_delay=timedelta(seconds=24)),
    ]
)
RATE, PUBLISHING_MS, LONGEST_MS, PERIOD_MS = 150, 140_000, 96_000, 240_000
TRAFFIC = Traffic(
    rate=RATE,
    maximum_ms=LONGEST_MS,
    mean_ms=LONGEST_MS / 2,
    peak_share=0.3,
    peak_every_ms=40_000,
    peak_at_ms=30_000,
)
# A producer starts this long after the processes, ms.
_READY_MS = 8_000
# Time over which a peak is compared: passes of the mover decide about single seconds.
_PEAK_S = 5


def messages(seed: int) -> list[tuple[int, int]]:
    """Return publish and due times, ms, of single messages of the load, drawn at random."""
    chosen = random.Random(seed)
    every, at = TRAFFIC.peak_every_ms, TRAFFIC.peak_at_ms
    found = []
    for number in range(RATE * PUBLISHING_MS // SECOND_MS):
        published_ms = number * SECOND_MS // RATE
        first = (published_ms - at) // every + 1
        last = (published_ms + LONGEST_MS - at) // every
        if chosen.random() < TRAFFIC.peak_share:
            due_ms = at + every * chosen.randint(first, last)
        else:
            due_ms = published_ms + chosen.randint(1, LONGEST_MS)
        found.append((published_ms, due_ms))
    return found


def publish(producer: Any, sent: Sequence[tuple[int, int]], start_ms: int) -> None:
    """Send messages at their times; a payload is the number of its message."""
    for number, (published_ms, due_ms) in enumerate(sent):
        wait_s = (start_ms + published_ms) / 1000 - time.time()
        if wait_s > 0:
            time.sleep(wait_s)
        producer.send_async(b"%d" % number, None, deliver_at=start_ms + due_ms)
    producer.flush()


def hops(
    world: RealWorld, description: LevelTopicDescription, target: str, start_ms: int
) -> dict[int, list[tuple[int, str]]]:
    """Return times and places at which each message was stored, in order, by its number."""
    found: dict[int, list[tuple[int, str]]] = {}
    places = {
        "0": description.level_topic(0).full,
        "1": description.level_topic(1).full,
        "window": description.window_topic.full,
        "target": target,
    }
    for place, topic in places.items():
        for message in world.stored(topic):
            at_ms = message.publish_ms - start_ms
            found.setdefault(int(message.value or b""), []).append((at_ms, place))
    return {number: sorted(stored) for number, stored in found.items()}


def per_second(times_ms: Sequence[int]) -> list[float]:
    """Return the number of events of each second."""
    counts = [0.0] * (PERIOD_MS // SECOND_MS)
    for at_ms in times_ms:
        if 0 <= at_ms < PERIOD_MS:
            counts[at_ms // SECOND_MS] += 1
    return counts


def difference(real: Sequence[float], simulated: Sequence[float]) -> float:
    """Return the largest difference of the sums up to each second, as a part of the whole sum."""
    sums = zip(accumulate(real), accumulate(simulated), strict=True)
    return max(abs(one - other) for one, other in sums) / sum(simulated)


def peak(counts: Sequence[float]) -> float:
    """Return the largest mean of some seconds."""
    return max(sum(counts[at : at + _PEAK_S]) for at in range(len(counts))) / _PEAK_S


def mean_lag_ms(
    description: LevelTopicDescription, stored: dict[int, list[tuple[int, str]]], due_ms: list[int]
) -> float:
    """Return the mean time from readiness to hand-off of messages that left a level, ms."""
    router, lags = Router(description.levels), []
    for number, found in stored.items():
        level: int | None = None
        for (at_ms, place), (next_ms, _) in pairwise(found):
            if place not in ("0", "1"):
                break
            decision = router.decide(due_ms[number], at_ms, level)
            level = int(place)
            if decision.level == level:  # otherwise it was routed some milliseconds earlier
                ready_ms = router.hand_off_ms(level, decision.partition, at_ms)
                lags.append(next_ms - ready_ms)
    return sum(lags) / len(lags)


def test_a_real_run_has_the_flows_of_the_simulation(
    world: RealWorld, cli_process: Callable[..., Any]
) -> None:
    description = world.level_topic(LEVELS, final_window=FinalWindow.TRACKER)
    target = description.targets[0]
    world.plain_client.subscribe(target, "application", pulsar.ConsumerType.Shared)
    cli_process("run", description.topic)
    producer = world.client().create_producer(
        target,
        enable_delay_level_topic=True,
        delay_level_topic=description.topic,
        partition_strategy=LEVELS,
        block_if_queue_full=True,
    )
    sent = messages(22)
    start_ms = int(time.time() * 1000) + _READY_MS
    publish(producer, sent, start_ms)
    left_s = (start_ms + max(due_ms for _, due_ms in sent)) / 1000 - time.time()
    time.sleep(max(0.0, left_s))
    world.eventually(lambda: len(world.stored(target)) >= len(sent), "the last message", seconds=60)

    stored = hops(world, description, target, start_ms)
    assert set(stored) == set(range(len(sent)))
    lag_ms = mean_lag_ms(description, stored, [due_ms for _, due_ms in sent])
    print(f"hand-offs {lag_ms:,.0f} ms late on average")
    assert lag_ms < description.levels.smallest_lead_ms / 2, (
        f"the mover was {lag_ms:,.0f} ms behind on average: this run shows the machine, so repeat "
        "it on a quiet one"
    )

    record = DayRecord(LEVELS, (0, PERIOD_MS), SECOND_MS)
    resolution = Resolution(coarse=LONGEST_MS // 200)
    traffic = sorted(TRAFFIC.cohorts(LEVELS, PUBLISHING_MS, (0, PERIOD_MS), resolution))
    # On average, a message waits for half of the time between two passes.
    movement = Movement(description, traffic, trigger_ms=max(1, round(2 * lag_ms)))
    movement.recorder = record
    movement.run(PERIOD_MS)
    simulated = {
        "handed off by 24s": record.handed[0].values(),
        "handed off by 6s": record.handed[1].values(),
        "into the window": record.arrivals.values(),
        "due": record.released.values(),
        "pending in the window": record.window(),
    }

    left: dict[str, list[int]] = {"0": [], "1": [], "window": []}
    for found in stored.values():
        for (_, place), (next_ms, _) in pairwise(found):
            left[place].append(next_ms)
    into = [at for found in stored.values() for at, place in found if place == "window"]
    arrivals, out = per_second(into), per_second(left["window"])
    real = {
        "handed off by 24s": per_second(left["0"]),
        "handed off by 6s": per_second(left["1"]),
        "into the window": arrivals,
        "due": out,
        "pending in the window": pending(0, arrivals, out),
    }
    rows = {
        name: {
            "real": round(sum(real[name])),
            "simulated": round(sum(simulated[name])),
            "peak real": round(peak(real[name])),
            "peak simulated": round(peak(simulated[name])),
            "difference": round(difference(real[name], simulated[name]), 3),
        }
        for name in simulated
    }
    print(json.dumps(rows, indent=1))
    if folder := os.environ.get("SIMULATED_LOAD_FOLDER"):
        curves = {"real": real, "simulated": simulated, "rows": rows}
        Path(folder, "curves.json").write_text(json.dumps(curves))
    for name, row in rows.items():
        # The messages of the simulation are as many, but were not drawn at random. Pending messages
        # also wait for the dispatcher, which is never late in the simulation.
        apart = 0.1 if name.startswith("pending") else 0.05
        assert row["real"] == pytest.approx(row["simulated"], rel=apart), (name, row)
        assert row["difference"] < apart, (name, row)
        assert row["peak real"] == pytest.approx(row["peak simulated"], rel=0.15), (name, row)
