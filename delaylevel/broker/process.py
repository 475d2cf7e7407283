"""Processes and ports of the embedded broker: find ours by its command line, end it, follow us."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path

# Below the range from which systems take the ports of outgoing connections, so that a broker that
# is started again finds its ports free.
_PORTS = range(20_000, 31_000)
_POLL_SECONDS = 0.05
_EXEC_SECONDS = 1.0
_EXEC_POLL_SECONDS = 0.002
_STOP_SECONDS = 1.0
_STOPPED = {b"T", b"t", b"Z", b"X"}


def command_line(pid: int) -> str:
    """The command line of a process; empty where there is none, or it is a zombie."""
    if not Path("/proc/self/stat").exists():
        return _command_line_from_ps(pid)
    limit = time.monotonic() + _EXEC_SECONDS
    while True:
        try:
            raw = Path(f"/proc/{pid}/cmdline").read_bytes()
            state = _state(Path(f"/proc/{pid}/stat"))
        except OSError:
            return ""
        if raw or state in (b"Z", b"X"):
            return raw.replace(b"\0", b" ").decode(errors="replace")
        # Alive without a command line: in the middle of exec(), or on its way out. To call it gone
        # now would leave a broker running that somebody asked to stop.
        if time.monotonic() > limit:
            return ""
        time.sleep(_EXEC_POLL_SECONDS)


def _command_line_from_ps(pid: int) -> str:
    answer = subprocess.run(
        ["ps", "-ww", "-p", str(pid), "-o", "command="],
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.rstrip("\n") + " "


def is_ours(pid: int, marker: str) -> bool:
    """Whether the process lives and is the one whose command line carries the marker."""
    return marker in command_line(pid)


def end(pid: int, marker: str, *, timeout_seconds: float) -> bool:
    """End our process with SIGTERM, and after the timeout with SIGKILL.

    Returns:
        Whether SIGTERM was enough.
    """
    if _signal(pid, marker, signal.SIGTERM) and _wait_gone(pid, marker, timeout_seconds):
        return True
    return not kill(pid, marker)


def kill(pid: int, marker: str) -> bool:
    """End our process at once (SIGKILL), between two of its writes; whether there was one.

    SIGKILL alone ends a write in its middle (seen in 214 of 300 processes that wrote 30 kB at a
    time), and the storage node takes half a record at the end of its journal for a whole one: the
    topic can never be opened again where no other node has it. SIGSTOP lets each write end first.
    """
    if _signal(pid, marker, signal.SIGSTOP):
        _wait_stopped(pid)
    was_there = _signal(pid, marker, signal.SIGKILL)
    _wait_gone(pid, marker, 10)
    return was_there


def _signal(pid: int, marker: str, number: signal.Signals) -> bool:
    if not is_ours(pid, marker):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _wait_gone(pid: int, marker: str, timeout_seconds: float) -> bool:
    limit = time.monotonic() + timeout_seconds
    while is_ours(pid, marker) or _is_ending(pid):
        if time.monotonic() > limit:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _wait_stopped(pid: int) -> None:
    """Wait until every thread has stopped; without /proc for as long as that may take."""
    if not Path("/proc/self/stat").exists():
        time.sleep(_POLL_SECONDS)
        return
    limit = time.monotonic() + _STOP_SECONDS
    while not _STOPPED.issuperset(_states(pid)) and time.monotonic() < limit:
        time.sleep(_EXEC_POLL_SECONDS)


def _state(stat: Path) -> bytes:
    """The state in a ``stat`` file of /proc; it follows the name, which may hold anything."""
    return stat.read_bytes().rpartition(b")")[2].split()[0]


def _states(pid: int) -> set[bytes]:
    """The states of a process' threads, as /proc has them; none where it is gone."""
    found = set()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            found.add(_state(path))
    return found


def _is_ending(pid: int) -> bool:
    """Whether a process that has no command line any more still holds files and ports.

    They are closed by its last thread, which may outlive the first one: that is a zombie then.
    """
    folder = Path(f"/proc/{pid}")
    try:
        if (folder / "cmdline").read_bytes():
            return False  # somebody else has the number now
        state = _state(folder / "stat")
        return state not in (b"Z", b"X") or len(os.listdir(folder / "task")) > 1
    except OSError:
        return False


def port_is_free(port: int) -> bool:
    """Whether a server can listen on this loopback port now."""
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def become_free(ports: list[int], *, timeout_seconds: float) -> bool:
    """Wait until all these ports are free: a killed process may hold them a moment longer."""
    limit = time.monotonic() + timeout_seconds
    while not all(port_is_free(port) for port in ports):
        if time.monotonic() > limit:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def free_ports(count: int) -> list[int]:
    """Different loopback ports that nobody listens on."""
    chosen: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if port_is_free(port):
            chosen.append(port)
            if len(chosen) == count:
                return chosen
    raise OSError(f"fewer than {count} free ports between {_PORTS.start} and {_PORTS.stop}")


def follow_parent(pid: int) -> subprocess.Popen[bytes]:
    """End the process when this one dies, in whatever way; end the watcher itself to call it off.

    The watcher waits on a pipe of which only we hold the other end.
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; kill "$1" 2>/dev/null', "delaylevel-watch", str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
