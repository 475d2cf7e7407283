"""Tests of SIGTERM during a batch: the job finishes the batch; a second signal ends it at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from delaylevel.cluster.rest.admin import Admin
from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.position import source_partitions
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from support.world import RealWorld

pytestmark = [
    pytest.mark.broker,
    pytest.mark.spark,
    pytest.mark.timeout(900),
]

PATIENCE_S = 240  # Spark is started three times

BATCH = 60_000
TOTAL = 2 * BATCH
LEVELS = Levels(
    PartitionStrategy(
        partition_by=timedelta(seconds=1),
        maximum_delay=timedelta(seconds=2),
        lead=timedelta(milliseconds=500),
    )
)


def _running(checkpoint: Path) -> int | None:
    """Return the batch that has begun but not ended, if it has rows."""
    begun = {int(path.name) for path in (checkpoint / "offsets").glob("[0-9]*")}
    ended = {int(path.name) for path in (checkpoint / "commits").glob("[0-9]*")}
    # Batch 0 only warms up Spark.
    open_batches = {number for number in begun - ended if number > 0}
    return max(open_batches, default=None)


def test_a_stop_finishes_the_running_batch(
    world: RealWorld,
    parked: Callable[..., dict[str, str]],
    cli_process: Callable[..., Any],
    tmp_path: Path,
) -> None:
    description = world.level_topic(LEVELS)
    target = description.targets[0]
    world.plain_client.subscribe(target, "kept").close()  # the broker deletes it otherwise
    (source,) = (
        item for item in source_partitions(description) if item.topic.endswith("level-partition-0")
    )
    producer = world.plain_client.create_producer(
        source.topic, batching_enabled=True, batching_max_messages=1000, block_if_queue_full=True
    )
    due_ms = int(time.time() * 1000)
    for number in range(TOTAL):
        properties = parked(due_ms, number=str(number))
        producer.send_async(b"x" * 100, None, properties=properties)
    producer.flush()
    producer.close()

    checkpoint = tmp_path / "a checkpoint, with blanks"

    def start(*more: str) -> Any:
        words = ("-v", "mover", "run", description.topic, "--checkpoint", f"file:{checkpoint}")
        options = ("--trigger", "250ms", "--option", f"maxOffsetsPerTrigger={BATCH}")
        return cli_process(*words, *options, *more)

    def delivered() -> list[str]:
        return [message.properties["number"] for message in world.stored(target)]

    # Two signals: the job ends at once. Messages that the batch has already sent come again.
    job = start()
    batch = world.eventually(lambda: _running(checkpoint), "a batch with rows", PATIENCE_S)
    job.send_signal(signal.SIGTERM)
    job.send_signal(signal.SIGINT)
    assert job.wait(PATIENCE_S) == 1, job.log.read_text()
    assert "the next run repeats it" in job.log.read_text()
    assert not (checkpoint / "commits" / str(batch)).exists()
    assert _acknowledged(world.admin, source) == 0
    before = delivered()
    end = world.admin.last_message_id(TopicName.parse(target))

    # One signal: the batch is finished first, and no other begins.
    job = start()
    world.eventually(
        lambda: world.admin.last_message_id(TopicName.parse(target)) != end,
        "the batch's first messages",
        PATIENCE_S,
    )
    job.send_signal(signal.SIGTERM)
    assert job.wait(PATIENCE_S) == 0, job.log.read_text()
    assert (checkpoint / "commits" / str(batch)).exists()
    assert not (checkpoint / "offsets" / str(batch + 1)).exists()
    moved = len(delivered()) - len(before)
    assert BATCH - 1000 < moved < BATCH + 1000
    # The batch is acknowledged on the broker too, up to the entry in which it may have ended.
    last = world.stored(source.topic)[moved - 1]
    assert _acknowledged(world.admin, source) in (last.entry, last.entry + 1)

    # No message of the batch is moved again, and none is left out.
    job = start("--once")
    assert job.wait(PATIENCE_S) == 0, job.log.read_text()
    found = delivered()[len(before) :]
    assert sorted(found, key=int) == [str(number) for number in range(TOTAL)]
    assert f"{TOTAL - moved:,} messages moved." in job.log.read_text()


def _acknowledged(admin: Admin, source: Any) -> int:
    """Return the number of acknowledged entries of a partition."""
    position = admin.mark_delete_position(source.name, SUBSCRIPTION).next_entry
    return max(0, position.entry)
