"""The loads: numbers of messages, their due times, and what happens meanwhile."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

_DAY_S = 86_400
#: Messages that become due while the system is down, to see when it serves again.
PROBES = 20


@dataclass(frozen=True)
class Load:
    """A load of messages of 1 KiB.

    Attributes:
        name: name on the command line.
        title: description for tables.
        count: number of messages.
        spread_s: range of the due times, in seconds.
        grace_s: longest time to wait after the last due time, in seconds.
        kill: ``publishing`` or ``delivering``, if the system is killed in the middle of it.
        restart: True to kill the system while all messages wait, and to measure its restart.
        cancelled: number of messages that are cancelled.
        patience: factor for the time to publish and for all limits, for a busy machine.
    """

    name: str
    title: str
    count: int
    spread_s: float
    grace_s: float = 120
    kill: str = ""
    restart: bool = False
    cancelled: int = 0
    patience: float = 1.0

    def of(self, count: int) -> Load:
        """Return the same load with another number of messages."""
        return replace(self, count=count, cancelled=self.cancelled * count // self.count)

    @property
    def sure(self) -> bool:
        """True if the publisher has to report which messages were confirmed."""
        return bool(self.kill)

    @property
    def prepare_s(self) -> float:
        """Time to publish everything before the first message is due, in seconds."""
        outage_s = 25 if self.kill == "publishing" else 0
        calls_s = self.cancelled / 400
        return self.patience * (9 + self.count / 8000 + outage_s + calls_s)

    def dues_ms(self, begin_ms: int) -> Any:
        """Return the due times in ms, shape (count,).

        With a restart, `PROBES` of the messages are due at the beginning, and the others at least
        an hour later.

        Args:
            begin_ms: beginning of the range, in ms since the epoch.
        """
        chosen = random.Random(7)
        width_ms = max(1, round(self.spread_s * 1000))
        first_ms = 3_600_000 if self.restart else 0
        dues = np.array([first_ms + chosen.randrange(width_ms) for _ in range(self.count)])
        if self.restart:
            dues[self.probes] = 0
        return (dues + begin_ms).astype(np.int64)

    @property
    def probes(self) -> Any:
        """Numbers of the messages that are due while the system is down, spread over all."""
        return np.linspace(0, self.count - 1, PROBES if self.restart else 0).astype(np.int64)

    @property
    def to_cancel(self) -> Any:
        """Numbers of the messages to cancel, in the order of the calls."""
        chosen = random.Random(8).sample(range(self.count), self.cancelled)
        return np.array(chosen, dtype=np.int64)


LOADS = {
    each.name: each
    for each in (
        Load("minute", "at random within a minute", 60_000, 60, grace_s=130),
        Load("instant", "at one instant", 100_000, 0),
        Load("month", "within 30 days", 150_000, 29.5 * _DAY_S, restart=True),
        Load("publishing", "killed while publishing", 30_000, 10, kill="publishing"),
        Load("delivering", "killed while delivering", 30_000, 20, kill="delivering"),
        Load("cancel", "half of them cancelled", 10_000, 10, cancelled=5_000),
    )
}
