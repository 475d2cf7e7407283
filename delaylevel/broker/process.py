"""Process and ports of the embedded broker: find the process by its command line, and end it."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from delaylevel.cluster.connection.local_brokers import is_ours, process_state

# Below the range for outgoing connections, so that a restarted broker finds its ports free.
_PORTS = range(20_000, 31_000)
_POLL_SECONDS = 0.05
_STOP_POLL_SECONDS = 0.002
_STOP_SECONDS = 1.0
_STOPPED = {b"T", b"t", b"Z", b"X"}


def end(pid: int, marker: str, *, timeout_seconds: float) -> bool:
    """End our process with SIGTERM, after the timeout with SIGKILL; True if that was not needed."""
    if _signal(pid, marker, signal.SIGTERM) and _wait_ended(pid, marker, timeout_seconds):
        return True
    return not kill(pid, marker)


def kill(pid: int, marker: str) -> bool:
    """End our process with SIGKILL, between two of its writes; return whether there was one."""
    # SIGKILL alone can tear a write (seen in 214 of 300 processes that wrote 30 kB at a time). The
    # storage node takes half a record at the end of its journal for a complete one, and without
    # another copy, the topic can never be opened again. SIGSTOP first lets each write finish.
    if _signal(pid, marker, signal.SIGSTOP):
        _wait_stopped(pid)
    was_there = _signal(pid, marker, signal.SIGKILL)
    _wait_ended(pid, marker, 10)
    return was_there


def _signal(pid: int, marker: str, number: signal.Signals) -> bool:
    if not is_ours(pid, marker):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _wait_ended(pid: int, marker: str, timeout_seconds: float) -> bool:
    return wait_until(lambda: not (is_ours(pid, marker) or _is_ending(pid)), timeout_seconds)


def _wait_stopped(pid: int) -> None:
    """Wait until every thread is stopped; without /proc, wait a fixed time."""
    if not Path("/proc/self/stat").exists():
        time.sleep(_POLL_SECONDS)
        return
    wait_until(lambda: _STOPPED.issuperset(_states(pid)), _STOP_SECONDS, _STOP_POLL_SECONDS)


def _states(pid: int) -> set[bytes]:
    """Return the states of the threads of a process, from /proc; none if it is gone."""
    found = set()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            found.add(process_state(path))
    return found


def _is_ending(pid: int) -> bool:
    """Return whether a process without a command line still has files and ports open."""
    # The last thread closes them. It may outlive the first thread, which is then a zombie.
    folder = Path(f"/proc/{pid}")
    try:
        if (folder / "cmdline").read_bytes():
            return False  # another process has this ID now
        state = process_state(folder / "stat")
        return state not in (b"Z", b"X") or len(os.listdir(folder / "task")) > 1
    except OSError:
        return False


def port_is_free(port: int) -> bool:
    """Return whether a server can listen on this loopback port now."""
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def wait_until(
    condition: Callable[[], bool], timeout_seconds: float, poll_seconds: float = _POLL_SECONDS
) -> bool:
    """Wait until a condition holds; return False after the timeout."""
    limit = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(poll_seconds)
    return True


def free_ports(count: int) -> list[int]:
    """Return distinct loopback ports without a listener."""
    # At random: processes that start at the same time seldom choose the same ones.
    ports = random.sample(_PORTS, len(_PORTS))
    chosen = list(itertools.islice(filter(port_is_free, ports), count))
    if len(chosen) < count:
        raise OSError(
            f"fewer than {count} ports between {_PORTS.start} and {_PORTS.stop} are free: "
            "stop a program that listens there"
        )
    return chosen


def follow_parent(pid: int) -> subprocess.Popen[bytes]:
    """Start a watcher that ends a process when this one dies, until the watcher is killed."""
    # It waits on a pipe whose other end only this process has.
    return subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; kill "$1" 2>/dev/null', "delaylevel-watch", str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
