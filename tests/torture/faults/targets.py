"""Business topics that refuse messages, take them slowly, or are deleted and created again."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from delaylevel.dispatcher.service import partition_owners
from delaylevel.errors import BrokerError
from delaylevel.model.clock import SystemClock
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.lifecycle import pause, resume
from torture.scene import Scene, StageError
from torture.stage import KEEP

from .fault import Fault, Undo

# Every dispatcher follows a pause within this time.
_PAUSE_S = 5.5


def choose_target(scene: Scene, chosen: random.Random, plain: bool = False) -> str:
    """Return a random target; with ``plain``, one without partitions."""
    found = [
        target
        for target, state in scene.control.targets.items()
        if state.sends and not (plain and _is_partitioned(scene, target))
    ]
    return chosen.choice(sorted(found))


def _is_partitioned(scene: Scene, target: str) -> bool:
    return bool(scene.admin.partitioned_metadata(TopicName.parse(target)).partitions)


def _over_quota(scene: Scene, target: str, policy: str, undo: Undo) -> None:
    path = f"{TopicName.parse(target).rest_path}/backlogQuota"
    quota = {"limit": 1, "limitSize": 1, "limitTime": -1, "policy": policy}
    undo.callback(scene.rest.delete, path, backlogQuotaType="destination_storage")
    scene.rest.post(path, quota, backlogQuotaType="destination_storage")


def _throttle(scene: Scene, target: str, per_second: int, undo: Undo) -> None:
    path = f"{TopicName.parse(target).rest_path}/publishRate"
    rate = {"publishThrottlingRateInMsg": per_second, "publishThrottlingRateInByte": -1}
    undo.callback(scene.rest.delete, path)
    scene.rest.post(path, rate)


def _exceed_quota(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Put a target over its backlog quota."""
    target = choose_target(scene, chosen)
    policy = chosen.choice(("producer_exception", "producer_request_hold"))
    scene.burst(200, target=target)
    _over_quota(scene, target, policy, undo)


def _throttle_target(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Let a target take few messages per second."""
    target = choose_target(scene, chosen)
    scene.burst(300, target=target)
    _throttle(scene, target, chosen.choice((5, 50, 200)), undo)


def _kill_and_refuse(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Kill dispatchers while they publish to a target, which refuses their successors.

    The dispatchers die without the answers of the broker, so only the target knows what it has
    stored, and it tells nobody.
    """
    target = choose_target(scene, chosen, plain=True)
    stage = scene.stage_of(target)
    name = TopicName.parse(target)

    def stored() -> int:
        return sum(scene.admin.messages_in(name).values())

    with ExitStack() as meanwhile:
        _throttle(scene, target, 50, meanwhile)
        before = stored()
        scene.burst(300, target=target)
        scene.wait(lambda: stored() > before + 100, "the first messages of a burst", 60)
        before = stored()
        meanwhile.callback(scene.proxy.restore)
        scene.proxy.hold_answers()
        # The journal does not answer either: what is not sent by now is not sent any more.
        with suppress(StageError):
            scene.wait(lambda: stored() > before + 50, "further messages of a burst", 3)
        for dispatcher in stage.dispatchers:
            scene.parts[dispatcher].kill(lambda tree: tree[0] if tree else None)
        _over_quota(scene, target, "producer_exception", undo)

    def taken_over() -> bool:
        pids = [scene.parts[dispatcher].pid for dispatcher in stage.dispatchers]
        owners = partition_owners(scene.admin, stage.level_topic)
        names = [each.owner.name if each.owner else "" for each in owners]
        return all(name.endswith(tuple(f":{pid}" for pid in pids)) for name in names)

    with suppress(StageError):
        scene.wait(taken_over, "a takeover", 60)


def _terminate(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Terminate a target; later delete it, and create it again after that.

    Producers and consumers of the application leave it before, as docs/operations.md asks for. Our
    own processes do not: they meet the terminated topic, the missing one and the new one.
    """
    target = choose_target(scene, chosen, plain=True)
    undo.callback(scene.use, target, sends=True, receives=True)
    scene.use(target, sends=False, receives=True)
    undo.callback(_renew, scene, target)
    _terminate_and_delete(scene, target)


def _terminate_and_delete(scene: Scene, target: str) -> None:
    name = TopicName.parse(target)
    scene.admin.terminate(name)
    # What the topic has stored is deleted with it.
    scene.wait(lambda: not scene.backlog(target), "the consumers of a terminated topic", 60)
    scene.use(target, sends=False, receives=False)
    scene.admin.delete(name, force=True)


def _renew(scene: Scene, target: str) -> None:
    """Create a target again, which may be there still if the fault failed."""
    name = TopicName.parse(target)
    if scene.admin.topic_exists(name) and KEEP in scene.admin.subscriptions(name):
        _terminate_and_delete(scene, target)
    _create_paused(scene, target)


def _delete(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Delete a target by force while dispatchers run; create it again later.

    It is paused until it has nothing that the deletion would lose. Messages become due while it is
    away, and have to wait for the new one.
    """
    target = choose_target(scene, chosen, plain=True)
    undo.callback(scene.use, target, sends=True, receives=True)
    scene.use(target, sends=False, receives=True)
    with _paused(scene, target):
        scene.wait(lambda: not scene.backlog(target), "the consumers of a paused topic", 60)
        scene.use(target, sends=False, receives=False)
        undo.callback(_create_paused, scene, target)
        scene.admin.delete(TopicName.parse(target), force=True)


def _create_paused(scene: Scene, target: str) -> None:
    """Create a target, which our producers may have created again, and subscribe to what follows.

    It is paused meanwhile: a topic with only some of its subscriptions loses messages for others.
    What a topic got before it had one is published again, and must not be received twice.
    """
    with _paused(scene, target):
        scene.create_target(target, earliest=False)


@contextmanager
def _paused(scene: Scene, target: str) -> Iterator[None]:
    """Pause a target; the block begins when nothing comes any more."""
    level_topic = scene.stage_of(target).level_topic
    with ExitStack() as undo:
        undo.callback(resume, scene.admin, level_topic, target, SystemClock())
        pause(scene.admin, level_topic, target, SystemClock())
        _await_silence(scene, target)
        yield


def _await_silence(scene: Scene, target: str) -> None:
    """Wait until every dispatcher follows a pause, and nothing comes any more."""
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
    Fault("terminate", (1.0, 8.0), _terminate, weight=1.5, alone=True),
    # Dispatchers follow the end of the pause within five seconds.
    Fault("delete", (8.0, 14.0), _delete, weight=1.5, alone=True),
)
