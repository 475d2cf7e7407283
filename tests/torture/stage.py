"""The names of a run: level topics, targets and processes; and the orders to these, in a file."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar

from delaylevel.cluster.connection.settings import Connection
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import Mover
from delaylevel.model.strategy import Levels, PartitionStrategy

NAMESPACE = "public/default"
#: The subscriptions of every target, each of another type.
SUBSCRIPTIONS: dict[str, Any] = {
    "exclusive": pulsar.ConsumerType.Exclusive,
    "failover": pulsar.ConsumerType.Failover,
    "shared": pulsar.ConsumerType.Shared,
    "key-shared": pulsar.ConsumerType.KeyShared,
}
#: A subscription that acknowledges nothing: only a backlog exceeds a quota.
KEEP = "keep"


def _level(unit_s: float, maximum_s: float, lead_s: float) -> PartitionStrategy:
    return PartitionStrategy(
        partition_by=timedelta(seconds=unit_s),
        maximum_delay=timedelta(seconds=maximum_s),
        lead=timedelta(seconds=lead_s),
    )


COARSE_UNIT_S = 6
LONGEST_S = 24
#: The longest delay after all expansions.
MOST_S = 60
#: Largest number of targets that are added to a level topic.
MOST_ADDED = 3
LEVELS = Levels([_level(COARSE_UNIT_S, LONGEST_S, 2), _level(2, 8, 1)])


@dataclass(frozen=True)
class Stage:
    """A level topic with its targets and its processes.

    Attributes:
        movers: arguments of the programs that move, by name of the process, without the level
            topic; dispatchers are only named.
        partitions: number of partitions of each target; 0 for a target that is not partitioned.
    """

    name: str
    movers: dict[str, tuple[str, ...]]
    dispatchers: tuple[str, ...]
    delivery: Delivery
    partitions: tuple[int, ...] = (0, 0)
    mover: Mover = Mover.SERVICE

    @property
    def once(self) -> bool:
        """True if it promises effectively-once delivery."""
        return self.delivery is Delivery.EFFECTIVELY_ONCE

    @property
    def clocks(self) -> set[str]:
        """Names of the processes whose clocks decide when its messages are due."""
        return {*self.dispatchers, *PRODUCERS}

    @property
    def level_topic(self) -> str:
        return f"persistent://{NAMESPACE}/_{self.name}-delay-level"

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(self.target(index) for index in range(len(self.partitions)))

    def target(self, index: int) -> str:
        return f"persistent://{NAMESPACE}/{self.name}-{index}"


SPARK = ("mover", "run", "--checkpoint", "checkpoint", "--trigger", "300ms")
DISPATCHERS = ("dispatcher-1", "dispatcher-2")
RUNNERS = ("run-1", "run-2")
PRODUCERS = ("producer-1", "producer-2")


def stages(once: bool) -> tuple[Stage, ...]:
    """Return the level topics of a run.

    With ``once``, `dispatcher run` delivers effectively once, and `run` at least once; otherwise it
    is the other way round.
    """
    first, second = Delivery.EFFECTIVELY_ONCE, Delivery.AT_LEAST_ONCE
    if not once:
        first, second = second, first
    return (
        Stage("spark", {"mover-spark": SPARK}, DISPATCHERS, first),
        Stage("run", {}, RUNNERS, second, (0, 2)),
        Stage("function", {}, DISPATCHERS, first, mover=Mover.FUNCTION),
    )


def save_connection(folder: Path, connection: Connection) -> None:
    kept = connection.model_dump(mode="json", include={"service_url", "admin_url"})
    (folder / "connection.json").write_text(json.dumps(kept))


def load_connection(folder: Path) -> Connection:
    values = json.loads((folder / "connection.json").read_text())
    return Connection(**values, operation_timeout_seconds=20)


_AGAIN_S = 1.0
_OPEN = "open.json"


@dataclass
class TargetState:
    """A business topic, as producers and consumers see it, and if they use it now."""

    level_topic: str
    sends: bool = True
    receives: bool = True


@dataclass
class Control:
    """The contents of the file.

    Attributes:
        bursts: number of bursts that were ordered so far; each is sent once by each producer.
        burst_target: target of the last burst; empty for a random one.
        burst_after_ms: time by which the messages of a burst are due later than usual.
    """

    targets: dict[str, TargetState] = field(default_factory=dict)
    sending: bool = True
    bursts: int = 0
    burst_size: int = 200
    burst_bytes: int = 100
    burst_target: str = ""
    burst_after_ms: int = 0
    longest_delay_ms: int = 20_000

    def save(self, path: Path) -> None:
        _replace(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Control:
        values = json.loads(path.read_text())
        targets = {name: TargetState(**state) for name, state in values.pop("targets").items()}
        return cls(targets, **values)


def open_targets(folder: Path) -> list[str]:
    """Return the targets that a process uses, by its folder."""
    try:
        return list(json.loads((folder / _OPEN).read_text()))
    except FileNotFoundError:
        return []


class Openings:
    """Producers or consumers of this process, each opened in a thread, as that may take long."""

    def __init__(self, open_one: Callable[[str], Any]) -> None:
        self.open: dict[str, Any] = {}
        self._open_one = open_one
        self._opening: set[str] = set()
        self._wanted: set[str] = set()
        self._noted: set[str] = {""}

    def follow(self, wanted: set[str]) -> None:
        """Open those of these topics, close all others, and note what is used."""
        self._wanted = wanted
        for topic in wanted - self.open.keys() - self._opening:
            self._opening.add(topic)
            threading.Thread(target=self._run, args=(topic,), daemon=True).start()
        for topic in self.open.keys() - wanted:
            try:
                self.open.pop(topic).close()
            except Exception as error:
                print(f"close {topic}: {error!r}", flush=True)
        used = self.open.keys() | self._opening
        if used != self._noted:
            self._noted = used
            _replace(Path(_OPEN), sorted(used))

    def _run(self, topic: str) -> None:
        while topic in self._wanted:
            try:
                self.open[topic] = self._open_one(topic)
                break
            except Exception as error:
                print(f"open {topic}: {error!r}", flush=True)
                time.sleep(_AGAIN_S)
        self._opening.discard(topic)


def _replace(path: Path, value: Any) -> None:
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(value))
    os.replace(aside, path)
