"""The same pending messages, asked live from running dispatchers and read from the topics."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytest

pytest.importorskip("duckdb")
pytest.importorskip("prometheus_client")


from delaylevel.dispatcher import Dispatcher
from delaylevel.dispatcher.status import DispatchReporter
from delaylevel.inspection import Inspector
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.prometheus import serve
from support.world import RealWorld

LEVELS = Levels(
    [PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))]
)
COUNT = 300
HOUR = 3_600_000


@pytest.fixture
def run(world: RealWorld) -> Iterator[Callable[..., tuple[Dispatcher, int]]]:
    """``run(description)``: start a dispatcher with its HTTP service; return the port."""
    with ExitStack() as stack:

        def start(description: LevelTopicDescription) -> tuple[Dispatcher, int]:
            dispatcher = world.serving(description).dispatcher
            return dispatcher, stack.enter_context(serve(DispatchReporter(dispatcher), 0))

        yield start


@pytest.fixture
def filled(world: RealWorld) -> LevelTopicDescription:
    """A level topic with messages in its level and its window, some without a number."""
    description = world.level_topic(
        LEVELS, final_window=FinalWindow.TRACKER, window_partitions=3, attribute="amount"
    )
    chosen = random.Random(5)
    now = SystemClock().now_ms()
    (orders,) = description.targets
    with world.client().create_producer(orders, enable_delay_level_topic=True) as producer:
        for number in range(COUNT):
            producer.send_async(
                b"x" * chosen.randrange(2_000),
                None,
                deliver_at=now + 60_000 + chosen.randrange(3 * HOUR),
                partition_key=f"k{number % 7}" if number % 2 else None,
                properties={"amount": str(number / 4) if number % 5 else "unknown"},
            )
    return description


def test_dispatchers_are_asked_and_an_answer_of_another_process_does_not_count(
    world: RealWorld,
    filled: LevelTopicDescription,
    run: Callable[..., tuple[Dispatcher, int]],
) -> None:
    """Let a dispatcher announce another's address, as 127.0.0.1 of another machine would be."""

    def look(**options: bool) -> Inspector:
        return Inspector(world.plain_client, world.admin, filled.topic, **options)

    first, _ = run(filled)
    world.eventually(
        lambda: len(found := first.stats()) == 3 and all(x.caught_up for x in found.values()),
        "owners of all partitions",
    )
    asked, read = look(), look(live=False)
    assert list(asked.rows()) == list(read.rows())
    assert asked.live is not None
    assert (len(asked.live.ask("counts")), asked.live.refusals) == (3, {})

    _, port = run(world.level_topic(LEVELS, ("others",), final_window=FinalWindow.TRACKER))
    second, _ = run(filled)
    second.advertise(f"http://127.0.0.1:{port}")
    world.eventually(second.stats, "a share of the second one")
    assert list(asked.rows()) == list(read.rows())
    assert asked.live.refusals
