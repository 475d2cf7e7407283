"""Business topics that refuse messages, take them slowly, or are deleted and created again."""

from __future__ import annotations

import contextlib
import random
import time

from delaylevel.dispatcher.service import partition_owners
from delaylevel.errors import BrokerError
from delaylevel.model.clock import SystemClock
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.lifecycle import pause, resume
from torture.scene import Scene, StageError, choose_target

from .fault import Fault, Undo

# Every dispatcher follows a pause within this time.
_PAUSE_S = 5.5


def _over_quota(scene: Scene, target: str, policy: str) -> Undo:
    path = f"{TopicName.parse(target).rest_path}/backlogQuota"
    quota = {"limit": 1, "limitSize": 1, "limitTime": -1, "policy": policy}
    scene.rest.post(path, quota, backlogQuotaType="destination_storage")
    return lambda: scene.rest.delete(path, backlogQuotaType="destination_storage")


def _throttle(scene: Scene, target: str, per_second: int) -> Undo:
    path = f"{TopicName.parse(target).rest_path}/publishRate"
    rate = {"publishThrottlingRateInMsg": per_second, "publishThrottlingRateInByte": -1}
    scene.rest.post(path, rate)
    return lambda: scene.rest.delete(path)


def _exceed_quota(scene: Scene, chosen: random.Random) -> Undo:
    """Put a target over its backlog quota."""
    target = choose_target(scene, chosen)
    policy = chosen.choice(("producer_exception", "producer_request_hold"))
    scene.burst(200, target=target)
    return _over_quota(scene, target, policy)


def _throttle_target(scene: Scene, chosen: random.Random) -> Undo:
    """Let a target take few messages per second."""
    target = choose_target(scene, chosen)
    scene.burst(300, target=target)
    return _throttle(scene, target, chosen.choice((5, 50, 200)))


def _kill_and_refuse(scene: Scene, chosen: random.Random) -> Undo:
    """Kill dispatchers while they publish to a target, which refuses their successors."""
    target = choose_target(scene, chosen, plain=True)
    stage = scene.stage_of(target)
    name = TopicName.parse(target)
    with contextlib.ExitStack() as stack:
        stack.callback(_throttle(scene, target, 50))
        before = sum(scene.admin.messages_in(name).values())
        scene.burst(300, target=target)
        scene.wait(
            lambda: sum(scene.admin.messages_in(name).values()) > before + 120,
            "the first messages of a burst",
            60,
        )
        for dispatcher in stage.dispatchers:
            scene.parts[dispatcher].kill(lambda tree: tree[0] if tree else None)
    lift = _over_quota(scene, target, "producer_exception")

    def taken_over() -> bool:
        pids = [scene.parts[dispatcher].pid for dispatcher in stage.dispatchers]
        owners = partition_owners(scene.admin, stage.level_topic)
        names = [each.owner.name if each.owner else "" for each in owners]
        return all(name.endswith(tuple(f":{pid}" for pid in pids)) for name in names)

    with contextlib.suppress(StageError):
        scene.wait(taken_over, "a takeover", 60)
    return lift


def _terminate(scene: Scene, chosen: random.Random) -> Undo:
    """Terminate a target; later delete it, and create it again after that.

    Producers and consumers of the application leave it before, as docs/operations.md asks for. Our
    own processes do not: they meet the terminated topic, the missing one and the new one.
    """
    target = choose_target(scene, chosen, plain=True)
    name = TopicName.parse(target)
    scene.use(target, sends=False, receives=True)
    scene.admin.terminate(name)
    # What the topic has stored is deleted with it.
    scene.wait(lambda: not scene.backlog(target), "the consumers of a terminated topic", 60)
    scene.use(target, sends=False, receives=False)
    scene.admin.delete(name, force=True)

    def create() -> None:
        scene.create_target(target)
        scene.use(target, sends=True, receives=True)

    return create


def _delete(scene: Scene, chosen: random.Random) -> Undo:
    """Delete a target by force while dispatchers run; create it again later.

    It is paused until it has nothing that the deletion would lose. Messages become due while it is
    away, and have to wait for the new one. It is paused again while the new one gets its
    subscriptions, because a topic that has only some of them loses messages for the others.
    """
    target = choose_target(scene, chosen, plain=True)
    name = TopicName.parse(target)
    level_topic = scene.stage_of(target).level_topic
    scene.use(target, sends=False, receives=True)
    _pause(scene, target)
    scene.wait(lambda: not scene.backlog(target), "the consumers of a paused topic", 60)
    scene.use(target, sends=False, receives=False)
    scene.admin.delete(name, force=True)
    resume(scene.admin, level_topic, target, SystemClock())

    def create() -> None:
        _pause(scene, target)
        scene.create_target(target, earliest=False)
        resume(scene.admin, level_topic, target, SystemClock())
        scene.use(target, sends=True, receives=True)

    return create


def _pause(scene: Scene, target: str) -> None:
    """Pause a target, and wait until nothing comes any more."""
    pause(scene.admin, scene.stage_of(target).level_topic, target, SystemClock())
    paused_s = time.monotonic()
    name = TopicName.parse(target)
    seen: list[tuple[float, int]] = []

    def quiet() -> bool:
        try:
            count = sum(scene.admin.messages_in(name).values())
        except BrokerError:
            count = 0  # it does not exist
        if not seen or seen[0][1] != count:
            seen[:] = [(time.monotonic(), count)]
        now_s = time.monotonic()
        return now_s - paused_s > _PAUSE_S and now_s - seen[0][0] > 1.0

    scene.wait(quiet, "a pause", 60)


FAULTS: tuple[Fault, ...] = (
    Fault("over quota", (1.0, 10.0), _exceed_quota, weight=2.0),
    Fault("throttled", (3.0, 10.0), _throttle_target, weight=2.0),
    Fault("takeover over quota", (3.0, 8.0), _kill_and_refuse, alone=True),
    Fault("terminate, delete, create", (1.0, 8.0), _terminate, weight=1.5, alone=True),
    # Dispatchers follow the end of the pause within five seconds.
    Fault("delete", (8.0, 14.0), _delete, weight=1.5, alone=True),
)
