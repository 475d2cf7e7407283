"""A broker that dies, topics that it unloads, and locks that somebody else gets."""

from __future__ import annotations

import contextlib
import random
import time

import pulsar

from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.topic_name import TopicName
from support.world import quiet_client
from torture.scene import Scene

from .fault import Fault, Undo

# Longest time in which a rival tries to be faster than the owner.
_RIVAL_S = 5.0


def _kill(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Kill the broker; start it again after a while."""
    undo.callback(scene.start_broker)
    scene.broker.kill()


def _restart(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Stop the broker by SIGTERM; start it again."""
    undo.callback(scene.start_broker)
    scene.broker.stop()


def _unload(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Let the broker close topics of ours, or targets, and open them again."""
    found = [name for stage in scene.settings.stages for name in scene.member_partitions(stage)]
    found += [TopicName.parse(target) for target in scene.control.targets]
    for name in chosen.sample(found, chosen.choice((1, 1, 3, len(found)))):
        scene.admin.unload(name)


def _take_lock(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Take the lock of a partition from its owner while the topic is unloaded, and give it back.

    The owner's exclusive consumer connects again by itself later, as if nothing had happened.
    """
    stage = chosen.choice(scene.settings.stages)
    description = scene.description(stage)
    name = description.window_topic.partition(chosen.randrange(description.window_partitions))
    client = undo.enter_context(contextlib.closing(quiet_client(scene.broker.connection)))
    deadline = time.monotonic() + _RIVAL_S
    while time.monotonic() < deadline:
        scene.admin.unload(name)
        with contextlib.suppress(pulsar.PulsarException):
            client.subscribe(name.full, SUBSCRIPTION, consumer_name="rival", receiver_queue_size=0)
            return


FAULTS: tuple[Fault, ...] = (
    Fault("kill broker", (0.0, 4.0), _kill, alone=True),
    Fault("restart broker", (0.0, 4.0), _restart, weight=0.5, alone=True),
    Fault("unload", (0.0, 0.0), _unload, weight=3.0),
    Fault("lost lock", (0.1, 4.0), _take_lock, weight=3.0),
)
