"""The faults: what can be broken, in groups.

A fault is injected into the scene, lasts for a random time, and is undone. It says itself when it
is not possible, for example because there is no process of its kind. More than one fault may be
there at the same time, except for those that need the rest of the scene in order (`alone`). One
that fails half-way is undone as far as it came.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import psutil
import pulsar

from delaylevel import topics
from delaylevel.cluster.targets.receivers import topic_stats
from delaylevel.errors import BrokerError
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.lifecycle import expand, pause, resume
from support.world import quiet_client

from .ledger import Stepped, now_ms
from .part import DISK_FULL, write_clock
from .process import Part, Victim
from .scene import Scene
from .stage import COARSE_UNIT_S, KEEP, MOST_ADDED, MOST_S, Stage

#: What repairs a fault: everything that it has done so far, even if the rest of it fails.
Undo = ExitStack


@dataclass(frozen=True)
class Fault:
    """Something that breaks.

    Attributes:
        name: the name of its kind.
        lasts_s: the shortest and the longest time from its beginning to its end, in s.
        inject: function that breaks something. It adds what repairs it to the stack, before or
            directly after it has broken it.
        weight: how often it is chosen, compared with others.
        alone: True if no other fault may be there at the same time.
        possible: function whose result is true if it can be injected now.
    """

    name: str
    lasts_s: tuple[float, float]
    inject: Callable[[Scene, random.Random, Undo], object]
    weight: float = 1.0
    alone: bool = False
    possible: Callable[[Scene], object] = lambda scene: True


# -- processes that are killed, suspended and ended


_IS: dict[str, Callable[[psutil.Process], bool]] = {
    " JVM": lambda each: each.name() == "java",
    # One of the Python processes in which Spark runs tasks.
    " worker": lambda each: "pyspark.daemon" in " ".join((each.parent() or each).cmdline()),
}


def _there(kind: str, which: str, scene: Scene) -> list[tuple[Victim, psutil.Process]]:
    """Return the processes of some parts themselves, or those of a kind that they have started."""
    found = []
    every = sorted([*scene.parts.values(), *scene.functions], key=lambda each: each.name)
    for part in (each for each in every if each.name.startswith(kind)):
        tree = part.tree()
        for each in tree if which else tree[:1]:
            with contextlib.suppress(psutil.Error):
                if not which or _IS[which](each):
                    found.append((part, each))
    return found


def _kill(kind: str, which: str, scene: Scene, chosen: random.Random, undo: Undo) -> None:
    _, process = chosen.choice(_there(kind, which, scene))
    with contextlib.suppress(psutil.Error):
        process.kill()


def _suspend(kind: str, which: str, scene: Scene, chosen: random.Random, undo: Undo) -> None:
    _, process = chosen.choice(_there(kind, which, scene))

    def resume() -> None:
        with contextlib.suppress(psutil.Error):
            process.resume()

    undo.callback(resume)
    with contextlib.suppress(psutil.Error):
        process.suspend()


def _signals(kind: str, which: str, weight: float) -> tuple[Fault, Fault]:
    """Return the faults that kill and suspend a process of the parts whose names begin so."""
    name, possible = f"{kind}{which}", partial(_there, kind, which)
    kill, suspend = partial(_kill, kind, which), partial(_suspend, kind, which)
    return (
        Fault(f"kill {name}", (0.0, 0.0), kill, weight=weight, possible=possible),
        Fault(f"suspend {name}", (0.5, 15.0), suspend, weight=weight, possible=possible),
    )


def _running(scene: Scene) -> list[Part]:
    programs = (part for part in scene.parts.values() if part.is_program)
    return [part for part in programs if part.pid is not None]


def _restart(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """End a process of the product by SIGTERM; start it again."""
    part = chosen.choice(_running(scene))
    undo.callback(part.resume)
    part.stop()


def _restart_function(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Restart the Function by the command for it."""
    for function in scene.functions:
        function.restart()


# -- a broker that dies, topics that it unloads, and locks that somebody else gets


# Longest time in which a rival tries to be faster than the owner.
_RIVAL_S = 5.0


def _end_broker(by: str, scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Kill the broker, or stop it by SIGTERM; start it again after a while."""
    undo.callback(scene.start_broker)
    getattr(scene.broker, by)()


def _unload(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Let the broker close topics of ours, or targets, and open them again."""
    found = [
        member.topic.partition(index)
        for stage in scene.stages
        for member in scene.description(stage).members()
        for index in range(member.partitions)
    ]
    found += [TopicName.parse(target) for target in scene.control.targets]
    for name in chosen.sample(found, chosen.choice((1, 1, 3, len(found)))):
        scene.admin.unload(name)


def _take_lock(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Take the lock of a partition from its owner while the topic is unloaded, and give it back.

    The owner's exclusive consumer connects again by itself later, as if nothing had happened.
    """
    stage = chosen.choice(scene.stages)
    description = scene.description(stage)
    name = description.window_topic.partition(chosen.randrange(description.window_partitions))
    client = undo.enter_context(contextlib.closing(quiet_client(scene.broker.connection)))
    deadline = time.monotonic() + _RIVAL_S
    while time.monotonic() < deadline:
        scene.admin.unload(name)
        with contextlib.suppress(pulsar.PulsarException):
            client.subscribe(name.full, SUBSCRIPTION, consumer_name="rival", receiver_queue_size=0)
            return


# -- connections that break, hang and become slow, in the proxies


def _network(
    of: str, hows: tuple[str, ...], scene: Scene, chosen: random.Random, undo: Undo
) -> None:
    """Break what passes a proxy, in one of some ways."""
    proxy = getattr(scene, of)
    undo.callback(proxy.restore)
    getattr(proxy, chosen.choice(hows))()


def _slow(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    undo.callback(scene.proxy.restore)
    scene.proxy.slow(chosen.choice((0.01, 0.05, 0.2)))


# -- business topics that refuse messages, take them slowly, or are deleted and created again


# Every dispatcher follows a pause within this time.
_PAUSE_S = 5.5


def choose_target(scene: Scene, chosen: random.Random, plain: bool = False) -> str:
    """Return a random target; with ``plain``, one without partitions."""
    found = [
        target
        for target, state in scene.control.targets.items()
        if state.sends
        and not (plain and scene.admin.partitioned_metadata(TopicName.parse(target)).partitions)
    ]
    return chosen.choice(sorted(found))


def _exceed_quota(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    target = choose_target(scene, chosen)
    policy = chosen.choice(("producer_exception", "producer_request_hold"))
    scene.burst(200, target=target)
    path = f"{TopicName.parse(target).rest_path}/backlogQuota"
    quota = {"limit": 1, "limitSize": 1, "limitTime": -1, "policy": policy}
    undo.callback(scene.rest.delete, path, backlogQuotaType="destination_storage")
    scene.rest.post(path, quota, backlogQuotaType="destination_storage")


def _throttle_target(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    target = choose_target(scene, chosen)
    scene.burst(300, target=target)
    path = f"{TopicName.parse(target).rest_path}/publishRate"
    per_second = chosen.choice((5, 50, 200))
    rate = {"publishThrottlingRateInMsg": per_second, "publishThrottlingRateInByte": -1}
    undo.callback(scene.rest.delete, path)
    scene.rest.post(path, rate)


def _delete(terminates: bool, scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Delete a target while dispatchers run; create it again later.

    It is terminated or paused until it has nothing that the deletion would lose. Producers and
    consumers of the application leave it before, as docs/operations.md asks for. Our own processes
    do not: they meet the terminated topic, the missing one and the new one. Messages become due
    meanwhile, and have to wait for the new one.
    """
    target = choose_target(scene, chosen, plain=True)
    undo.callback(scene.use, target, sends=True, receives=True)
    scene.use(target, sends=False, receives=True)
    undo.callback(_renew, terminates, scene, target)
    _remove(terminates, scene, target)


def _remove(terminates: bool, scene: Scene, target: str) -> None:
    name = TopicName.parse(target)
    if terminates:
        scene.admin.terminate(name)
    with contextlib.nullcontext() if terminates else _paused(scene, target):
        # What the topic has stored is deleted with it.
        scene.wait(lambda: not scene.backlog(target), "the consumers of a topic", 60)
        scene.use(target, sends=False, receives=False)
        scene.admin.delete(name, force=True)


def _renew(terminates: bool, scene: Scene, target: str) -> None:
    """Create a target again, which may be there still if the fault failed."""
    name = TopicName.parse(target)
    if terminates and scene.admin.topic_exists(name) and KEEP in scene.admin.subscriptions(name):
        _remove(terminates, scene, target)
    # Paused, as a topic with only some of its subscriptions loses messages for others. Our own
    # producers may have created it again. What it got before it had a subscription is published
    # again, and must not be received twice.
    with _paused(scene, target):
        scene.create_target(target, earliest=False)


@contextmanager
def _paused(scene: Scene, target: str) -> Iterator[None]:
    """Pause a target; the block begins when nothing comes any more."""
    level_topic = scene.control.targets[target].level_topic
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
            stats = topic_stats(scene.admin, name) or {}
            count = sum(each.messages_in for each in stats.values())
        except BrokerError:
            count = 0  # it does not exist
        if not seen or seen[0][1] != count:
            seen[:] = [(time.monotonic(), count)]
        now_s = time.monotonic()
        return now_s - paused_s > _PAUSE_S and now_s - seen[0][0] > 1.0

    scene.wait(quiet, "a pause", 60)


# -- operations while everything runs


def _pause_targets(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Pause a level topic, or one of its targets; resume it."""
    stage = chosen.choice(scene.stages)
    targets = sorted(scene.description(stage).targets)
    target = chosen.choice([None, *targets])
    spread_ms = chosen.choice((0, 0, 3_000))
    undo.callback(resume, scene.admin, stage.level_topic, target, SystemClock(), spread_ms)
    pause(scene.admin, stage.level_topic, target, SystemClock())


def _longest(scene: Scene, stage: Stage) -> timedelta:
    return scene.description(stage).levels.strategies[0].maximum_delay


def _can_expand(scene: Scene) -> bool:
    most = timedelta(seconds=MOST_S)
    return any(_longest(scene, stage) < most for stage in scene.stages)


def _expand(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    stages = list(scene.stages)
    stage = min(chosen.sample(stages, len(stages)), key=partial(_longest, scene))
    longest = _longest(scene, stage) + timedelta(seconds=COARSE_UNIT_S)
    expand(scene.admin, stage.level_topic, longest)
    shortest = min(_longest(scene, each) for each in stages)
    scene.control.longest_delay_ms = int(shortest.total_seconds() * 1000) - 3_000
    scene.save_control()


def _takes_targets(scene: Scene) -> list[Stage]:
    return [stage for stage in scene.stages if scene.added.get(stage.name, 0) < MOST_ADDED]


def _add_target(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Add a target to a level topic; producers use it at once."""
    stage = chosen.choice(_takes_targets(scene))
    number = scene.added[stage.name] = scene.added.get(stage.name, 0) + 1
    target = stage.target(len(stage.partitions) + number - 1)
    scene.create_target(target)
    before = scene.description(stage)
    topics.create(scene.admin, replace(before, targets=(*before.targets, target)))
    scene.announce(stage, target)
    scene.save_control()


# -- clocks that step: those of dispatchers, movers and producers


# Short of the leads, as docs/operations.md asks for; a producer or mover beyond that is late.
_STEPS_MS = (-5_000, -1_500, -300, 200, 900, 3_000)


def _with_clock(scene: Scene) -> list[Part]:
    return [part for part in scene.parts.values() if part.has_clock]


def _step(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Set a clock wrong for a while; then correct it."""
    part, offset_ms = chosen.choice(_with_clock(scene)), chosen.choice(_STEPS_MS)
    begin_ms = now_ms()
    write_clock(part.folder, offset_ms)

    def correct() -> None:
        write_clock(part.folder, 0)
        scene.ledger.write(Stepped(part.name, offset_ms, begin_ms, now_ms()))

    undo.callback(correct)


# -- spill disks without space


def _dispatchers(scene: Scene) -> list[Part]:
    names = {name for stage in scene.stages for name in stage.dispatchers}
    return [part for name, part in scene.parts.items() if name in names]


def _fill(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Fill the spill disks of all dispatchers during bursts of large messages."""
    for part in _dispatchers(scene):
        file = part.folder / DISK_FULL
        file.touch()
        undo.callback(file.unlink, missing_ok=True)
    # More than the memory of a window partition, due when all of it has been read.
    scene.burst(800, 5_000, target=choose_target(scene, chosen), after_ms=5_000)


ALL: tuple[Fault, ...] = (
    *_signals("dispatcher", "", 3.0),
    *_signals("run", "", 3.0),
    *_signals("mover-spark", "", 1.0),
    *_signals("mover-spark", " JVM", 1.0),
    *_signals("mover-spark", " worker", 1.0),
    *_signals("function", "", 1.0),
    *_signals("producer", "", 1.0),
    *_signals("producer-java", " JVM", 0.5),
    *_signals("consumer", "", 1.0),
    Fault("restart", (0.0, 3.0), _restart, possible=_running),
    Fault("restart function", (0.0, 0.0), _restart_function, 0.5, possible=lambda on: on.functions),
    Fault("kill broker", (0.0, 4.0), partial(_end_broker, "kill"), alone=True),
    Fault("restart broker", (0.0, 4.0), partial(_end_broker, "stop"), weight=0.5, alone=True),
    Fault("unload", (0.0, 0.0), _unload, weight=3.0),
    Fault("lost lock", (0.1, 4.0), _take_lock, weight=3.0),
    Fault(
        *("cut connections", (0.0, 0.0)),
        lambda scene, chosen, _: scene.proxy.cut_some(chosen, chosen.choice((0.1, 0.5, 1.0))),
        weight=2.0,
    ),
    Fault("network away", (0.5, 8.0), partial(_network, "proxy", ("cut",)), 2.0),
    Fault("network hangs", (0.5, 8.0), partial(_network, "proxy", ("hold", "hold_answers")), 2.0),
    Fault("network slow", (3.0, 10.0), _slow, weight=2.0),
    Fault("admin away", (2.0, 15.0), partial(_network, "web_proxy", ("cut", "hold")), 2.0),
    Fault("over quota", (1.0, 10.0), _exceed_quota, weight=2.0),
    Fault("throttled", (3.0, 10.0), _throttle_target, weight=2.0),
    Fault("terminate", (1.0, 8.0), partial(_delete, True), weight=1.5, alone=True),
    # Dispatchers follow the end of the pause within five seconds.
    Fault("delete", (8.0, 14.0), partial(_delete, False), weight=1.5, alone=True),
    Fault("pause", (1.0, 12.0), _pause_targets, weight=2.0),
    Fault("expand", (0.0, 0.0), _expand, possible=_can_expand),
    Fault("add target", (0.0, 0.0), _add_target, possible=_takes_targets),
    Fault("clock step", (1.0, 12.0), _step, weight=3.0, possible=_with_clock),
    Fault("disk full", (12.0, 20.0), _fill, weight=2.0, possible=_dispatchers),
)
