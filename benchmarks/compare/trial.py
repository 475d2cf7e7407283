"""The loads; one load on one system: publish, wait, kill or cancel, deliver, measure."""

from __future__ import annotations

import math
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from common import cpu_s, memory, note

from .client import Client
from .system import System, disk

_DAY_S = 86_400
#: Messages that become due while the system is down, to see when it serves again.
PROBES = 20
# Time in which nothing arrives until no more is expected. It exceeds the time after which NATS
# repeats a delivery that was not acknowledged (30 s).
_QUIET_S = 35.0
# Pause until memory and disk are measured.
_SETTLE_S = 3.0


@dataclass(frozen=True)
class Load:
    """A load of messages of 1 KiB.

    The system is killed while ``publishing`` or ``delivering``, or (``restart``) while all messages
    wait. Times are in seconds; ``patience`` is a factor for all limits, for a busy machine.
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
    def prepare_s(self) -> float:
        """Time to publish everything before the first message is due, in seconds."""
        outage_s = 25 if self.kill == "publishing" else 0
        calls_s = self.cancelled / 400
        return self.patience * (9 + self.count / 8000 + outage_s + calls_s)

    def dues_ms(self, begin_ms: int) -> Any:
        """Return the due times in ms, shape (count,).

        With a restart, `PROBES` of the messages are due at the beginning, and the others at least
        an hour later.
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


def run(system: System, load: Load) -> dict[str, Any]:
    """Measure one load on one system with its own data; return a row of results."""
    with tempfile.TemporaryDirectory(prefix="delaylevel-compare-") as folder:
        trial = _Trial(system, load, Path(folder))
        data = Path(folder) / "data"
        data.mkdir()
        system.directory = data
        try:
            system.start(bool(load.cancelled))
            trial.publish()
            trial.look(data)
            if load.cancelled:
                trial.cancel()
            if load.restart:
                trial.restart()
            else:
                trial.deliver()
        finally:
            trial.end_clients()
            system.stop()
        return trial.row()


class _Trial:
    def __init__(self, system: System, load: Load, folder: Path) -> None:
        self._system, self._load, self._folder = system, load, folder
        self._clients: list[Client] = []
        self._found: dict[str, Any] = {}
        self._last_due_s = 0.0
        self._load_average: list[float] = [os.getloadavg()[0]]
        self._cpu_s = 0.0

    def publish(self) -> None:
        """Publish everything; kill the system in the middle of it if the load says so."""
        load = self._load
        self._consume()
        self._cpu_s = cpu_s(self._system.pids())
        begin_ms = round((time.time() + load.prepare_s) * 1000)
        dues = load.dues_ms(begin_ms)
        dues.tofile(self._path("plan"))
        self._begin_s = begin_ms / 1000
        self._last_due_s = float(dues.max()) / 1000
        publisher = self._client(
            "publish",
            sure="yes" if load.kill else "no",
            named="yes" if load.cancelled else "no",
            handles=self._path("handles"),
            limit_s=round(90 * load.patience),
        )
        if load.kill == "publishing":
            publisher.wait_progress(load.count // 2, 60 * load.patience)
            self._kill_and_restart(lambda: publisher.progress)
        result = publisher.result(120 * load.patience)
        publisher.stop()
        self._found["publish_per_s"] = round(load.count / result["seconds"])
        self._found["spare_s"] = round(self._begin_s - time.time(), 1)
        note(f"published in {result['seconds']:.1f} s, {self._found['spare_s']} s to spare")
        if self._found["spare_s"] < 0:
            note("TOO SLOW: messages were due before all were published; use --patience")

    def look(self, data: Path) -> None:
        """Measure memory and disk space while everything is pending."""
        time.sleep(_SETTLE_S)
        resident, private = memory(self._system.pids())
        self._found |= {
            "memory_mib": resident >> 20,
            "private_mib": private >> 20,
            "disk_mib": disk(data) >> 20,
        }

    def cancel(self) -> None:
        """Cancel messages."""
        path = self._path("numbers")
        self._load.to_cancel.tofile(path)
        client = self._client("cancel", numbers=path, handles=self._path("handles"))
        result = client.result(60 * self._load.patience)
        client.stop()
        self._found["cancel_per_s"] = round(self._load.cancelled / result["seconds"])
        self._found["cancel_spare_s"] = round(self._begin_s - time.time(), 1)

    def restart(self) -> None:
        """Kill the system before messages are due, and start it again once they are."""
        self.end_clients()
        time.sleep(max(0.0, self._begin_s - time.time() - 2.5))
        self._system.kill()
        time.sleep(max(0.0, self._begin_s - time.time() + 0.2))
        began_us = time.time_ns() // 1000
        began = time.monotonic()
        self._system.restart()
        self._found["ready_s"] = round(time.monotonic() - began, 2)
        self._consume()
        probes = self._load.probes
        limit = time.monotonic() + self._load.grace_s
        served = None
        while served is None and time.monotonic() < limit:
            time.sleep(0.3)
            served = served_s(self._arrivals(), probes, began_us)
        self._found["served_s"] = served

    def deliver(self) -> None:
        """Wait until everything has arrived; kill the system in the middle if the load says so."""
        load = self._load
        time.sleep(max(0.0, self._begin_s - time.time()))
        if load.kill == "delivering":
            time.sleep(max(0.0, self._begin_s + load.spread_s / 2 - time.time()))
            self._kill_and_restart(lambda: len(self._arrivals()))
        wanted = load.count - load.cancelled
        limit_s = self._last_due_s + load.grace_s
        rows, changed_s = 0, time.time()
        while time.time() < limit_s:
            time.sleep(0.3)
            found = self._arrivals()
            if len(found) != rows:
                rows, changed_s = len(found), time.time()
            quiet_s = time.time() - max(changed_s, self._last_due_s)
            # Copies may follow after a kill; otherwise, the last arrival is the end.
            enough_s = _QUIET_S if load.kill == "delivering" else 1.5
            whole = quiet_s > enough_s and np.unique(found[:, 0]).size >= wanted
            if whole or quiet_s > _QUIET_S:
                break
        self._load_average.append(os.getloadavg()[0])
        if not load.kill:
            self._found["cpu_s"] = round(cpu_s(self._system.pids()) - self._cpu_s, 1)

    def row(self) -> dict[str, Any]:
        """Return the row of results."""
        load, rows = self._load, self._arrivals()
        expected = np.arange(load.count)
        found: dict[str, Any] = {"confirmed": load.count}
        if load.kill:  # the publisher reports which messages were confirmed
            flags = np.fromfile(self._path("out-publish"), dtype=np.uint8)
            expected = np.flatnonzero(flags)
            found["confirmed"] = len(expected)
        if load.cancelled:
            flags = np.fromfile(self._path("out-cancel"), dtype=np.uint8)
            taken = load.to_cancel[flags == 1]
            expected = np.setdiff1d(expected, load.to_cancel)
            came = np.isin(taken, rows[:, 0])
            found |= {
                "asked": load.cancelled,
                "cancelled": len(taken),
                "cancelled_but_came": int(came.sum()),
            }
        if not load.restart:
            found |= measured(rows, expected)
        return {
            "system": self._system.name,
            "load": load.name,
            "messages": load.count,
            "grace_s": load.grace_s,
            **self._found,
            **found,
            "load_average": round(max(self._load_average), 1),
            "measured": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        }

    def end_clients(self) -> None:
        """End all clients that run."""
        while self._clients:
            self._clients.pop().stop()

    def _kill_and_restart(self, count: Callable[[], int]) -> None:
        """Kill the system and start it again; note what it had done before."""
        began = time.monotonic()
        self._system.kill()
        self._found["before_kill"] = count()
        self._system.restart()
        self._found["outage_s"] = round(time.monotonic() - began, 1)
        note(f"killed after {self._found['before_kill']:,}, back in {self._found['outage_s']} s")

    def _consume(self) -> None:
        self._client("consume").wait_ready(120 * self._load.patience)

    def _arrivals(self) -> Any:
        return arrivals(self._path("out-consume"))

    def _client(self, action: str, **options: Any) -> Client:
        options = {"plan": self._path("plan"), "out": self._path(f"out-{action}"), **options}
        log_file = self._folder / f"{action}.log"
        client = Client(self._system.client(action), options, log_file)
        self._clients.append(client)
        return client

    def _path(self, name: str) -> Path:
        return self._folder / name


def arrivals(path: Path) -> Any:
    """Return the outcome of a consumer: numbers, due times in ms and arrivals in µs, shape (n, 3).

    A row that is not complete is left out.
    """
    found = np.frombuffer(path.read_bytes() if path.exists() else b"", dtype=np.uint8)
    whole = found.size // 24 * 24
    return np.frombuffer(found[:whole].tobytes(), dtype="<i8").reshape(-1, 3)


def measured(rows: Any, expected: Any) -> dict[str, Any]:
    """Compare the arrivals of a load with the numbers that had to arrive.

    Messages that did not arrive count as later than all others, so a quantile is None if they
    determine it.
    """
    numbers, firsts, times = np.unique(rows[:, 0], return_index=True, return_counts=True)
    late_ms = rows[firsts, 2] / 1000 - rows[firsts, 1]
    wanted = np.isin(numbers, expected)
    missing = len(expected) - int(wanted.sum())
    p50_ms, p99_ms, max_ms = _quantiles(late_ms[wanted], missing, (0.5, 0.99, 1.0))
    early = late_ms < 0
    return {
        "missing": missing,
        "twice": int((times > 1).sum()),
        "early": int(early.sum()),
        "early_ms": round(float(-late_ms.min()), 1) if early.any() else 0.0,
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        "max_ms": max_ms,
    }


def _quantiles(late_ms: Any, missing: int, shares: Any) -> list[float | None]:
    """Return the lateness that a share of the messages does not exceed, in ms."""
    ordered = np.sort(late_ms)
    count = ordered.size + missing
    found: list[float | None] = []
    for share in shares:
        place = max(0, math.ceil(share * count) - 1)
        found.append(round(float(ordered[place]), 1) if place < ordered.size else None)
    return found


def served_s(rows: Any, probes: Any, began_us: int) -> float | None:
    """Return the seconds from a restart to the last arrival of what was due before; None if never.

    The time of the restart is in µs since the epoch, as that of the arrivals.
    """
    chosen = rows[np.isin(rows[:, 0], probes)]
    found, firsts = np.unique(chosen[:, 0], return_index=True)
    if found.size < len(probes):
        return None
    return round(float(chosen[firsts, 2].max() - began_us) / 1e6, 2)
