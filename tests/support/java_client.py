"""Java programs of the tests: each obeys the lines of its standard input, and answers each."""

from __future__ import annotations

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


class JavaProgram:
    """A running Java program, with the libraries of the Java client.

    Args:
        program: name of its class, or path of its source.
        classes: folder with further classes.
    """

    def __init__(
        self,
        program: str,
        *arguments: str,
        classes: Path | str = "",
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        libraries = ":".join(filter(None, (str(classes), f"{distribution_directory()}/lib/*")))
        self._process = subprocess.Popen(
            [java(), "-Xmx192m", *_BRIEF, "-cp", libraries, program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            preexec_fn=preexec_fn,
        )

    def ask(self, line: str, *begins: str) -> str:
        """Give a command, and return its answer, which begins with one of these texts."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.answer(*begins)

    def answer(self, *begins: str) -> str:
        """Return the next line that begins so; the client logs to the same stream."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(begins):
                return line
        raise AssertionError(f"the Java program ended ({self._process.wait()})")

    def close(self) -> None:
        """Stop the program."""
        self._process.kill()
        self._process.communicate()


class JavaSession(JavaProgram):
    """A Java program with producers and consumers (Session.java)."""

    def __init__(
        self, classes: Path | str, connection: Connection, *options: str, **process: Any
    ) -> None:
        self._admin_url = connection.admin_url
        program = "delaylevel.client.Session"
        super().__init__(program, connection.service_url, *options, classes=classes, **process)
        self.answer("{")

    def __call__(self, command: str, **values: Any) -> dict[str, Any]:
        """Give a command, and return its answer."""
        found: dict[str, Any] = json.loads(self.ask(json.dumps({"do": command, **values}), "{"))
        return found

    def open(self, name: str, topic: str, schema: str = "bytes", **values: Any) -> dict[str, Any]:
        """Open a producer."""
        return self("open", name=name, topic=topic, schema=schema, admin=self._admin_url, **values)
