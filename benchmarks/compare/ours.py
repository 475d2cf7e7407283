"""Level topics on the private broker, served by ``delaylevel run`` with its defaults."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import delaylevel

from .native import Native
from .system import TOPIC, Server, answers


class Ours(Native):
    """The wrapper as publisher, and mover and dispatcher in one process."""

    cancels = True
    client_kind = "ours"

    def __init__(self) -> None:
        super().__init__(
            "ours",
            "delaylevel",
            {},
            "One `delaylevel run` with its defaults (at-least-once).",
        )
        self._server: Server | None = None
        self._directory = Path()

    def version(self) -> str:
        """Return the versions of this project and of the broker."""
        return f"delaylevel {delaylevel.__version__}, {super().version()}"

    def start(self, directory: Path, cancellable: bool) -> None:
        """Start a broker, create the level topic, and start the service."""
        super().start(directory, cancellable)
        self._directory = directory
        subprocess.run(
            self._command("levels", "create", TOPIC, "--keep-target"),
            check=True,
            capture_output=True,
        )
        self._serve()

    def restart(self) -> None:
        """Start broker and service again."""
        super().restart()
        self._serve()

    def kill(self) -> None:
        """Kill broker and service."""
        super().kill()
        self._service.kill()
        self._server = None

    def stop(self) -> None:
        """Stop service and broker."""
        if self._server is not None:
            self._server.stop()
            self._server = None
        super().stop()

    def pids(self) -> list[int]:
        """Return the IDs of both processes."""
        return [*super().pids(), *([] if self._server is None else [self._server.pid])]

    @property
    def _service(self) -> Server:
        assert self._server is not None
        return self._server

    def _command(self, *words: str) -> list[str]:
        connection = self.broker.connection
        urls = ("--service-url", connection.service_url, "--admin-url", connection.admin_url)
        return [sys.executable, "-m", "delaylevel", *urls, *words]

    def _serve(self) -> None:
        spill = str(self._directory / "spill")
        command = self._command("run", TOPIC, "--metrics-port", "0", "--spill-dir", spill)
        self._server = Server(command, self._directory, "run")
        self._server.wait_for(lambda: "/metrics" in self._service.log())
        found = re.search(r"(http://\S+)/metrics", self._server.log())
        assert found is not None
        self._server.wait_for(lambda: answers(f"{found[1]}/readyz"))
