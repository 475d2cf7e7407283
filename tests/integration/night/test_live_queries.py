"""The same pending messages, asked live from running dispatchers and read from the topics."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb")
pytest.importorskip("prometheus_client")

import pulsar

from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.dispatcher.status import DispatchCollector
from delaylevel.inspection import Inspector, Selection, Window
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.prometheus import serve
from support.background import Serving
from support.world import RealWorld

LEVELS = Levels(
    [PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))]
)
COUNT = 300


@pytest.fixture
def run(world: RealWorld, tmp_path: Path) -> Iterator[Callable[..., tuple[Dispatcher, int]]]:
    """``run(description)``: start a dispatcher with its HTTP service; return the port."""
    with ExitStack() as stack:

        def start(description: LevelTopicDescription) -> tuple[Dispatcher, int]:
            settings = DispatchSettings(tmp_path / description.name.local, memory_bytes=4 << 20)
            dispatcher = Dispatcher(world.plain_client, world.admin, [description.topic], settings)
            port = stack.enter_context(serve(DispatchCollector(dispatcher), 0))
            stack.enter_context(Serving(dispatcher))
            return dispatcher, port

        yield start


@pytest.fixture
def filled(world: RealWorld) -> LevelTopicDescription:
    """A level topic with messages in its level and its window, some without a number."""
    description = world.level_topic(
        LEVELS, final_window=FinalWindow.TRACKER, window_partitions=3, attribute="amount"
    )
    chosen = random.Random(5)
    now = SystemClock().now_ms()
    outcomes: dict[Any, Any] = {}
    with world.client().create_producer(
        description.targets[0], enable_delay_level_topic=True
    ) as producer:
        for number in range(COUNT):
            producer.send_async(
                b"x" * chosen.randrange(2_000),
                outcomes.setdefault,
                deliver_at=now + 60_000 + chosen.randrange(3 * 3_600_000),
                partition_key=f"k{number % 7}" if number % 2 else None,
                properties={"amount": str(number / 4) if number % 5 else "unknown"},
            )
    assert list(outcomes) == [pulsar.Result.Ok]
    return description


def check(world: RealWorld, topic: str, due: Window, answered: int) -> list[Any]:
    """Compare both ways for some selections; return the rows of the range."""
    live = Inspector(world.plain_client, world.admin, topic)
    read = Inspector(world.plain_client, world.admin, topic, live=False)
    assert live.live is not None
    assert len(live.live.ask("counts").owners) == answered
    assert live.live.refusals == {}
    rows = list(live.rows(Selection(due)))
    assert rows == list(read.rows(Selection(due)))
    chosen = Selection(due, where="size > 1000", key="k3")
    assert list(live.rows(chosen)) == list(read.rows(chosen))
    for attribute in ("amount", "size"):
        found, other = (look.average(attribute, Selection(due)) for look in (live, read))
        assert (found.messages, found.counted) == (other.messages, other.counted)
        assert found.messages == len(rows)
        assert found.mean == (None if other.mean is None else pytest.approx(other.mean))
        assert (found.least, found.most) == (other.least, other.most)
    assert list(live.rows(Selection(due), limit=20)) == list(read.rows(Selection(due), limit=20))
    return rows


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
    monkeypatch.setattr(
        "delaylevel.dispatcher.fetcher.PartitionReader.receive",
        lambda _, timeout_ms: time.sleep(0.05),
    )
    now = SystemClock().now_ms()
    due = Window(now, now + 3_600_000)
    before = len(check(world, filled.topic, due, 3))
    with world.client().create_producer(
        filled.targets[0], enable_delay_level_topic=True
    ) as producer:
        for number in range(30):
            producer.send(b"late", deliver_at=now + 1_800_000 + number)
    assert len(check(world, filled.topic, due, 3)) == before + 30


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
