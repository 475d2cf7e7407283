"""The Java program of the tests, which has producers and consumers (Session.java)."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from delaylevel.broker.distribution import distribution_directory, java
from delaylevel.cluster.connection.settings import Connection

_CLIENT = Path(__file__).parents[2] / "clients" / "java"
_SESSION = _CLIENT / "src/test/java/delaylevel/client/Session.java"
_BRIEF = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")  # a short run


def b64(value: bytes) -> str:
    """Return bytes as the program takes them."""
    return base64.b64encode(value).decode()


def compile_producer(classes: Path) -> Path | None:
    """Compile the Java producer and its program; return the folder, or None without a compiler."""
    compiler = shutil.which("javac", path=str(Path(java()).parent)) or shutil.which("javac")
    if compiler is None:
        return None
    sources = [*(_CLIENT / "src" / "main").rglob("*.java"), _SESSION]
    command = [compiler, *(f"-J{each}" for each in _BRIEF), "-d", str(classes)]
    command += ["-encoding", "UTF-8", "-cp", f"{distribution_directory()}/lib/*"]
    subprocess.run([*command, *map(str, sources)], check=True, capture_output=True, timeout=300)
    return classes


class JavaSession:
    """A running Java program, which obeys the lines of its standard input, and answers each.

    Its option is ``transactions``, or the number of ms by which its clock is ahead.
    """

    def __init__(
        self,
        classes: Path | str,
        connection: Connection,
        option: str = "0",
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        self._admin_url = connection.admin_url
        libraries = f"{classes}:{distribution_directory()}/lib/*"
        command = [java(), "-Xmx192m", *_BRIEF, "-cp", libraries, "delaylevel.client.Session"]
        self._process = subprocess.Popen(
            [*command, connection.service_url, option],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            preexec_fn=preexec_fn,
        )
        self._answer()

    def __call__(self, command: str, **values: Any) -> dict[str, Any]:
        """Give a command, and return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": command, **values}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # the client logs to the same stream
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError(f"the Java program ended ({self._process.wait()})")

    def open(self, name: str, topic: str, schema: str = "bytes", **values: Any) -> dict[str, Any]:
        return self("open", name=name, topic=topic, schema=schema, admin=self._admin_url, **values)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
