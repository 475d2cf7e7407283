"""Tests that the Pulsar client's log reaches stderr: a file, a pipe, or a socket."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

CLOSED = b"Closing Pulsar client"
PROGRAM = """
import pulsar
from delaylevel.cluster import logs as _clientlog
pulsar.Client("pulsar://127.0.0.1:1", logger=_clientlog.{}).close()
"""
TO_STDERR = PROGRAM.format("to_stderr(pulsar.LoggerLevel.Info)")


@pytest.fixture
def journal() -> tuple[socket.socket, socket.socket]:
    """Return a socket, which services use for stderr, and its other end."""
    return socket.socketpair()


def test_output_in_a_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "errors"
    script = f"import sys\n{TO_STDERR}\nprint('ours', file=sys.stderr)"
    with path.open("wb") as errors:
        subprocess.run([sys.executable, "-c", script], stderr=errors, check=True)
    first, *_, last = path.read_bytes().splitlines()
    assert CLOSED in first
    assert last == b"ours"


def test_a_socket_without_a_path_receives_the_log(
    journal: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = journal
    with ours, theirs:
        subprocess.run([sys.executable, "-c", TO_STDERR], stderr=theirs, check=True)
        theirs.close()
        assert CLOSED in ours.makefile("rb").read()


def test_a_silent_client_writes_nothing() -> None:
    program = [sys.executable, "-c", PROGRAM.format("silent()")]
    done = subprocess.run(program, capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")
