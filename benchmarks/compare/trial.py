"""One load on one system: publish, wait, kill or cancel, deliver, measure."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from common import note

from .client import Client
from .loads import Load
from .measurement import arrivals, measured, served_s
from .system import System, cpu_s, disk, memory

# Time in which nothing arrives until no more is expected. It exceeds the time after which NATS
# repeats a delivery that was not acknowledged (30 s).
_QUIET_S = 35.0
# Pause until memory and disk are measured.
_SETTLE_S = 3.0


def run(system: System, load: Load) -> dict[str, Any]:
    """Measure one load on one system with its own data; return a row of results."""
    with tempfile.TemporaryDirectory(prefix="delaylevel-compare-") as folder:
        trial = _Trial(system, load, Path(folder))
        data = Path(folder) / "data"
        data.mkdir()
        try:
            system.start(data, bool(load.cancelled))
            with trial.memory_peak():
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
            sure="yes" if load.sure else "no",
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
        time.sleep(_SETTLE_S)
        resident, private = memory(self._system.pids())
        self._found |= {"again_mib": resident >> 20, "again_private_mib": private >> 20}

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
        if load.sure:
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

    @contextlib.contextmanager
    def memory_peak(self) -> Iterator[None]:
        """Measure the largest memory of the system during the block."""
        done = threading.Event()
        peak = 0

        def look() -> None:
            nonlocal peak
            while not done.wait(0.5):
                peak = max(peak, memory(self._system.pids())[0])

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self._found["peak_mib"] = peak >> 20

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
