"""The same pending messages, asked live from running dispatchers and read from the topics."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("duckdb")
pytest.importorskip("prometheus_client")


from delaylevel.dispatcher import Dispatcher
from delaylevel.dispatcher.status import DispatchReporter
from delaylevel.inspection import Inspector, Selection, Window
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Role
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


def subscriptions(world: RealWorld, description: LevelTopicDescription) -> dict[Any, Any]:
    """Return the backlog and the consumers of every durable subscription."""
    return {
        (member.topic, index, name): (one.backlog_entries, [each.name for each in one.consumers])
        for member in description.members()
        if member.role in (Role.LEVEL, Role.WINDOW)
        for index, stats in world.admin.partitioned_stats(member.topic).items()
        for name, one in stats.subscriptions.items()
        if one.durable
    }


def test_what_a_dispatcher_has_not_read_yet_is_read_from_the_topic(
    world: RealWorld,
    filled: LevelTopicDescription,
    run: Callable[..., tuple[Dispatcher, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Let the fetchers pass on nothing more, and store further messages."""
    dispatcher, _ = run(filled)
    world.eventually(
        lambda: len(found := dispatcher.stats()) == 3 and all(x.caught_up for x in found.values()),
        "owners of all partitions",
    )
    receive = "delaylevel.dispatcher.fetcher.PartitionReader.receive"
    monkeypatch.setattr(receive, lambda _, timeout_ms: time.sleep(0.05))
    now = SystemClock().now_ms()
    due = Window(now, now + HOUR)

    def count() -> int:
        """Compare both ways for some selections; return the number of rows of the range."""
        live, read = (
            Inspector(world.plain_client, world.admin, filled.topic, live=live)
            for live in (True, False)
        )
        assert live.live is not None
        assert len(live.live.ask("counts")) == 3
        assert live.live.refusals == {}
        for chosen in (Selection(due), Selection(due, where="size > 1000", key="k3")):
            assert list(live.rows(chosen)) == list(read.rows(chosen))
            assert list(live.rows(chosen, limit=20)) == list(read.rows(chosen, limit=20))
        for attribute in ("amount", "size"):
            found, other = (look.average(attribute, Selection(due)) for look in (live, read))
            assert (found.messages, found.counted) == (other.messages, other.counted)
            assert found.mean == pytest.approx(other.mean)
            assert (found.least, found.most) == (other.least, other.most)
        return found.messages

    fronts = subscriptions(world, filled)
    before = count()
    assert subscriptions(world, filled) == fronts, "a query moved, locked or left one"
    (orders,) = filled.targets
    with world.client().create_producer(orders, enable_delay_level_topic=True) as producer:
        for number in range(30):
            producer.send(b"late", deliver_at=now + HOUR // 2 + number)
    assert count() == before + 30


def test_an_answer_of_another_process_does_not_count(
    world: RealWorld,
    filled: LevelTopicDescription,
    run: Callable[..., tuple[Dispatcher, int]],
) -> None:
    """Let another dispatcher answer at the announced address, as 127.0.0.1 of another machine."""
    other = world.level_topic(LEVELS, ("others",), final_window=FinalWindow.TRACKER)
    _, port = run(other)
    dispatcher, _ = run(filled)
    dispatcher.advertise(f"http://127.0.0.1:{port}")
    world.eventually(lambda: len(dispatcher.stats()) == 3, "owners of all partitions")
    look = Inspector(world.plain_client, world.admin, filled.topic)
    assert len(list(look.rows())) == COUNT
    assert look.live is not None
    assert look.live.refusals
