"""The broker, the topics and the processes of a run, with the means to break them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from delaylevel import topics
from delaylevel.cluster.connection.local_brokers import status_of
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.rest.http import Rest
from delaylevel.errors import BrokerError, ConflictError
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Mover
from delaylevel.model.topic_name import TopicName
from delaylevel.testing.embedded import small_broker
from support.java_client import compile_producer
from support.proxy import Proxy

from .ledger import Ledger
from .process import MovingFunction, Part
from .stage import (
    KEEP,
    LEVELS,
    LONGEST_S,
    PRODUCERS,
    SUBSCRIPTIONS,
    Control,
    Stage,
    TargetState,
    open_targets,
    save_connection,
)

_HEAP_MB = 400
#: Longest time for the start of the broker, in s: other programs may use all processors.
START_S = 300


class StageError(Exception):
    """Something that a run needs did not happen in time."""


class Scene:
    """Everything of a run but the faults.

    As the broker is standalone, all connections of a client go to the address that the client was
    given, which is that of `proxy`; `web_proxy` is in front of the admin interface, and ``admin``
    and ``rest`` go around both. ``stopping`` ends every wait.
    """

    def __init__(
        self, folder: Path, stages: tuple[Stage, ...], seed: int, say: Callable[[str], None]
    ) -> None:
        self.stages, self.seed, self.say = stages, seed, say
        self.stopping = threading.Event()
        self.control = Control(longest_delay_ms=LONGEST_S * 1000 - 3_000)
        self.parts: dict[str, Part] = {}
        self._watching = threading.Thread(target=self._watch, name="watch", daemon=True)
        self.ledgers, self._folder = folder / "ledgers", folder
        self.ledgers.mkdir(parents=True)
        self._broker_folder, self._parts_folder = self._folder / "broker", self._folder / "parts"
        self.proxy = Proxy("127.0.0.1", find_port=lambda: self._port("service_port"))
        self.web_proxy = Proxy("127.0.0.1", find_port=lambda: self._port("web_port"))
        self.broker = small_broker(
            self._broker_folder,
            conf={
                "forceDeleteNamespaceAllowed": True,
                "journalSyncData": False,
                "brokerDeduplicationEnabled": True,
                "backlogQuotaCheckIntervalInSeconds": 1,
            },
            heap_mb=_HEAP_MB,
            functions=True,
        )
        self.functions: list[MovingFunction] = []
        self._closing = contextlib.ExitStack()
        ends = self.broker.remove, self.web_proxy.close, self.proxy.close, self._end_parts
        for end in (self._end_functions, *ends):
            self._closing.callback(end)
        self.added: dict[str, int] = {}
        self._web_url = f"http://127.0.0.1:{self.web_proxy.port}"
        self._connection = Connection(
            service_url=f"pulsar://127.0.0.1:{self.proxy.port}",
            admin_url=self._web_url,
        )

    def _port(self, name: str) -> int:
        port = int(getattr(status_of(self._broker_folder), name))
        if not port:
            raise OSError("the broker does not run yet")
        return port

    # -- the beginning and the end

    def start(self) -> None:
        """Start the broker, make the topics, and start every part."""
        self.say("starting the broker")
        self.broker.start(timeout_seconds=START_S)
        self.admin = self._closing.enter_context(Admin.from_connection(self.broker.connection))
        self.rest = self._closing.enter_context(
            contextlib.closing(Rest(self.broker.connection.admin_url))
        )
        self.ledger = Ledger(self.ledgers, "faults")
        save_connection(self._folder, self._connection)
        for stage in self.stages:
            self._create(stage)
        self.save_control()
        self.say("starting the processes")
        self._watching.start()
        for stage in self.stages:
            for name, arguments in stage.movers.items():
                self._start_program(name, arguments, [stage])
            if stage.mover is Mover.FUNCTION:
                function = MovingFunction(self.broker, self.description(stage), self._web_url)
                self.functions.append(function)
        for name in {name for stage in self.stages for name in stage.dispatchers}:
            served = [stage for stage in self.stages if name in stage.dispatchers]
            command = ("run",) if name.startswith("run") else ("dispatcher", "run")
            options = ("--delivery", served[0].delivery.value, "--spill-dir", "spill")
            self._start_program(name, (*command, *options), served)
        folder = str(self._folder)
        for subscription in SUBSCRIPTIONS:
            self._start_part(f"consumer-{subscription}", "consumer", folder, subscription)
        seed = str(self.seed)
        for name in PRODUCERS:
            self._start_part(name, "producer", folder, seed)
        classes = compile_producer(self._folder / "classes")
        if classes is None:
            self.say("no Java compiler: nothing is sent from Java")
        else:
            self._start_part("producer-java", "java-producer", folder, seed, str(classes))

    def start_broker(self) -> None:
        """Start the broker again, and the Functions, which a standalone broker does not."""
        self.broker.start(timeout_seconds=START_S)
        for function in self.functions:
            function.restart()

    def close(self) -> None:
        self.stopping.set()
        self._closing.close()

    def _watch(self) -> None:
        while not self.stopping.wait(0.2):
            for part in list(self.parts.values()):
                part.look()

    def _end_parts(self) -> None:
        if self._watching.ident:
            self._watching.join()
        for part in self.parts.values():
            part.wanted = False
        for part in self.parts.values():
            part.end()

    def _end_functions(self) -> None:
        for function in self.functions:
            function.end()

    def _create(self, stage: Stage) -> None:
        for target, partitions in zip(stage.targets, stage.partitions, strict=True):
            self.create_target(target, partitions)
        topics.create(
            self.admin,
            LevelTopicDescription(
                stage.level_topic,
                LEVELS,
                stage.targets,
                mover=stage.mover,
                final_window=FinalWindow.TRACKER,
                hold_pause_ms=1_000,
                window_partitions=2,
            ),
        )
        for target in stage.targets:
            self.announce(stage, target)

    def create_target(self, target: str, partitions: int = 0, *, earliest: bool = True) -> None:
        """Create a business topic with all subscriptions, which may get what it has already."""
        name = TopicName.parse(target)
        if partitions:
            self.admin.create_partitioned(name, partitions)
        elif not self.admin.topic_exists(name):
            self.rest.put(name.rest_path)
        for subscription in (*SUBSCRIPTIONS, KEEP):
            with contextlib.suppress(ConflictError):  # it is there already
                self.admin.create_subscription(name, subscription, earliest=earliest)

    def announce(self, stage: Stage, target: str) -> None:
        """Let producers and consumers use a target."""
        self.control.targets[target] = TargetState(stage.level_topic)

    def save_control(self) -> None:
        """Tell the parts what `control` says."""
        self.control.save(self._folder / "control.json")

    def _start_program(self, name: str, arguments: tuple[str, ...], served: list[Stage]) -> None:
        command = ["cli", "--service-url", str(self._connection.service_url)]
        command += ["--admin-url", self._web_url, *arguments]
        level_topics = [stage.level_topic for stage in served]
        self._start_part(name, *command, *level_topics)

    def _start_part(self, name: str, *arguments: str) -> None:
        part = Part(name, arguments, self._parts_folder)
        part.start()
        self.parts[name] = part

    # -- what faults use

    def description(self, stage: Stage) -> LevelTopicDescription:
        return topics.describe(self.admin, stage.level_topic)

    def wait(self, condition: Callable[[], Any], what: str, seconds: float) -> None:
        """Wait until a condition holds; a `StageError` tells that it did not, or the run ends."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(BrokerError, psutil.Error):
                if condition():
                    return
            if time.monotonic() > deadline:
                raise StageError(f"waited {seconds:.0f} s for {what}")
            if self.stopping.wait(0.1):
                raise StageError("the run ends")

    def backlog(self, target: str) -> int:
        """Return the number of entries of a partition that an application has to acknowledge."""
        stats = self.admin.partition_stats(TopicName.parse(target))
        return sum(stats.subscriptions[each].backlog_entries for each in SUBSCRIPTIONS)

    def use(self, target: str, *, sends: bool, receives: bool) -> None:
        """Let the application use a target or leave it; wait until it has left."""
        state = self.control.targets[target]
        state.sends, state.receives = sends, receives
        self.save_control()
        kinds = [kind for kind, uses in (("producer", sends), ("consumer", receives)) if not uses]

        def left() -> bool:
            return not any(
                target in open_targets(part.folder)
                for name, part in self.parts.items()
                if name.partition("-")[0] in kinds
            )

        self.wait(left, f"the application to leave {target}", 60)

    def burst(self, size: int, body_bytes: int = 100, target: str = "", after_ms: int = 0) -> None:
        """Let every producer send a burst of messages for one instant, to a random target."""
        self.control.bursts += 1
        self.control.burst_size, self.control.burst_bytes = size, body_bytes
        self.control.burst_target, self.control.burst_after_ms = target, after_ms
        self.save_control()
