"""A suspended dispatcher whose client still sends: what was cancelled stays away.

The target takes one message per second, so the dispatcher's client has sent messages that the
broker has not read. It sends them again when it goes on, and nobody else uses the name of its
producer then. The broker takes them if no higher sequence ID came.
"""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from delaylevel.model import envelope as env
from delaylevel.model.outcome import PAYLOAD, Outcome
from delaylevel.model.topic_name import TopicName
from support.dispatch_world import EO, DispatchWorld, at, ids, now_ms
from support.world import RealWorld

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]

NAMES = ids("m", 1_500)


@pytest.fixture
def race(world: RealWorld, cli_process: Callable[..., Any]) -> DispatchWorld:
    """A level topic with two window partitions and a slow target."""
    world.deduplicate()
    made = DispatchWorld(world, cli_process, EO, "orders", window_partitions=2)
    made.throttle(made.target, 1)
    return made


def test_what_was_cancelled_is_not_released(race: DispatchWorld, world: RealWorld) -> None:
    first = race.start()
    world.eventually(lambda: race.owners() == {first.pid}, "both partitions")
    # What is due 5 s after the first record is never cancelled.
    due = at(now_ms() + 7_000, NAMES)
    race.publish(race.target, due, b"large" * 800)
    world.eventually(lambda: race.stored(race.target), "the first message")
    first.send_signal(signal.SIGSTOP)
    race.publish(race.target, due, PAYLOAD, **{env.KIND: env.CANCEL})
    second = race.start()
    world.eventually(lambda: race.owners() == {second.pid}, "a takeover")
    race.unthrottle(race.target)
    outcomes: dict[str, set[str]] = defaultdict(set)

    def decided() -> bool:
        for message in world.stored(race.description.outcomes_topic.full):
            outcome = Outcome.read(message.properties)
            outcomes[outcome.id].add(outcome.status.value)
        return outcomes.keys() == due.keys()

    world.eventually(decided, "all outcomes", 120)
    name = TopicName.parse(race.target)
    stats = world.admin.partition_stats
    world.eventually(lambda: not stats(name).publishers, "no producer of the target")
    first.send_signal(signal.SIGCONT)
    world.eventually(lambda: first.pid in race.owners(), "a share of the first one")
    released = race.stored(race.target)
    assert decided()
    assert max(released.values()) == 1
    for name in NAMES:
        assert outcomes[name] == ({"too late"} if name in released else {"cancelled"}), name
