"""The simulation of a load, compared with producer and mover in the in-memory Pulsar."""

from __future__ import annotations

import random
from datetime import timedelta

from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover.local import LocalMover
from delaylevel.simulation.movement import Movement
from delaylevel.simulation.traffic import Resolution, Traffic
from delaylevel.simulation.year import DayRecord
from delaylevel.testing import MemoryPulsar

STRATEGIES = [
    PartitionStrategy(partition_by=timedelta(seconds=12), maximum_delay=timedelta(seconds=48)),
    PartitionStrategy(partition_by=timedelta(seconds=3), maximum_delay=timedelta(seconds=12)),
]
RATE, PUBLISHING_MS, LONGEST_MS, PERIOD_MS, STEP_MS = 20, 60_000, 48_000, 110_000, 200


def test_the_mover_hands_off_as_much_as_simulated() -> None:
    chosen = random.Random(5)
    levels = Levels(STRATEGIES)
    moved = 0
    with MemoryPulsar() as memory:
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=STRATEGIES
        )
        start_ms = memory.clock.now_ms()
        real: list[int] = []
        with LocalMover(memory.client(), memory.admin, producer.description, memory.clock) as mover:
            for now_ms in range(0, PERIOD_MS, STEP_MS):
                for _ in range(RATE * STEP_MS // 1000 if now_ms < PUBLISHING_MS else 0):
                    due_ms = start_ms + now_ms + chosen.randint(1, LONGEST_MS)
                    producer.send_async(b"", None, deliver_at=due_ms)
                moved += mover.run_once().total
                real.append(moved)
                memory.clock.advance(timedelta(milliseconds=STEP_MS))
    record = DayRecord(levels, (0, PERIOD_MS), STEP_MS)
    traffic = Traffic(RATE, LONGEST_MS, LONGEST_MS / 2)
    cohorts = traffic.cohorts(levels, PUBLISHING_MS, (0, PERIOD_MS), Resolution(coarse=240))
    movement = Movement(producer.description, sorted(cohorts), trigger_ms=STEP_MS)
    movement.recorder = record
    movement.run(PERIOD_MS)
    added = [sum(counts) for counts in zip(*(s.values() for s in record.handed), strict=True)]
    simulated, total = [], 0.0
    for count in added:
        total += count
        simulated.append(total)
    worst = max(abs(one - other) for one, other in zip(real, simulated, strict=True))
    # 1,200 delays were drawn at random.
    assert worst < 0.05 * simulated[-1]
