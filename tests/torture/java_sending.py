"""The part that sends through the Java producer: a Java program, and this one that tells it what.

The ledger is written here. The Java program answers when the broker has confirmed a message.
"""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from delaylevel.broker.distribution import distribution_directory, java

from .control import ControlFile, note_open
from .ledger import Confirmed, Ledger, now_ms
from .part import end_with_parent
from .producing import Message, random_message
from .stage import load_connection

_CLIENT = Path(__file__).parents[2] / "clients" / "java"
_PAUSE_S = 0.2


def compile_session(classes: Path) -> Path | None:
    """Compile the Java producer and its program; return the folder, or None without a compiler."""
    compiler = shutil.which("javac", path=str(Path(java()).parent)) or shutil.which("javac")
    if compiler is None:
        return None
    sources = [*(_CLIENT / "src" / "main").rglob("*.java")]
    sources.append(_CLIENT / "src/test/java/delaylevel/client/Session.java")
    command = [compiler, "-J-XX:TieredStopAtLevel=1", "-d", str(classes), "-encoding", "UTF-8"]
    command += ["-cp", f"{distribution_directory()}/lib/*", *map(str, sources)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return classes


class JavaSession:
    """A running Java program with producers.

    Attributes:
        opened: the targets of its producers.
    """

    def __init__(self, classes: str, folder: Path) -> None:
        connection = load_connection(folder)
        self._admin_url = connection.admin_url
        self._process = subprocess.Popen(
            [
                *(java(), "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
                *("-cp", f"{classes}:{distribution_directory()}/lib/*"),
                *("delaylevel.client.Session", connection.service_url),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            preexec_fn=end_with_parent,
        )
        self.opened: set[str] = set()
        self._answer()

    def send(self, target: str, level_topic: str, message: Message) -> dict[str, Any]:
        """Send a message; return the answer."""
        if target not in self.opened:
            answer = self._ask(
                "open",
                name=target,
                topic=target,
                schema="bytes",
                admin=self._admin_url,
                levelTopic=level_topic,
            )
            if "levelTopic" not in answer:
                return answer
            self.opened.add(target)
        fields: dict[str, Any] = {
            "value": base64.b64encode(message.body).decode(),
            "properties": message.properties,
            "at": message.due_ms,
        }
        if message.key:
            fields["key"] = message.key
        if message.ordering_key:
            fields["orderingKey"] = base64.b64encode(message.ordering_key.encode()).decode()
        if message.event_ms:
            fields["eventTime"] = message.event_ms
        return self._ask("send", name=target, schema="bytes", **fields)

    def close(self, target: str) -> None:
        """Close the producer of a target."""
        if target in self.opened:
            self.opened.discard(target)
            self._ask("close", name=target)

    def _ask(self, command: str, **values: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": command, **values}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # the client logs to the same stream
                return json.loads(line)  # type: ignore[no-any-return]
        raise SystemExit(f"the Java program ended ({self._process.wait()})")


def produce_with_java(name: str, folder: str, classes: str, seed: str) -> None:
    """Send until the end of the process."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    chosen = random.Random(f"{seed} java {os.getpid()}")
    control = ControlFile(Path(folder) / "control.json")
    ledger = Ledger(Path(folder) / "ledgers", name)
    session = JavaSession(classes, Path(folder))
    number = 0
    while not ended.wait(_PAUSE_S):
        control.refresh()
        now = control.control
        for target, state in now.targets.items():
            if not state.sends:
                session.close(target)
        note_open(session.opened)
        targets = sorted(target for target, state in now.targets.items() if state.sends)
        if not now.sending or not targets:
            continue
        target = chosen.choice(targets)
        number += 1
        message = random_message(f"{name}-{os.getpid()}-{now_ms()}-{number}", now, chosen)
        ledger.write([message.sent(target)])
        answer = session.send(target, now.targets[target].level_topic, message)
        stored = "stored" in answer
        reason = "" if stored else json.dumps(answer)[:200]
        ledger.write([Confirmed(message.name, now_ms(), int(stored), reason)])
    os._exit(0)
