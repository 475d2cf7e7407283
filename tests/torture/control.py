"""The orders to the processes of a run while they run: one file, which they look at often."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
        targets: business topics by full name.
        sending: True until the end of the last fault.
        bursts: number of bursts that were ordered so far; each is sent once by each producer.
        burst_target: target of the last burst; empty for a random one.
        burst_after_ms: time by which the messages of a burst are due later than usual.
        longest_delay_ms: longest delay that the level topics take.
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
        """Replace the file."""
        _replace(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Control:
        """Read the file."""
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
    """Producers or consumers of this process, each opened in a thread, as that may take long.

    Args:
        open_one: function that opens the one of a topic; it is called again after an error.

    Attributes:
        open: those that are open, by topic.
    """

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
