"""The part that sends through the Java producer: a Java program, and this one that tells it what.

The ledger is written here. The Java program answers when the broker has confirmed a message.
"""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

from support.java_client import JavaSession

from .control import ControlFile, note_open
from .ledger import Confirmed, Ledger, now_ms
from .part import end_with_parent
from .producing import Message, random_message
from .stage import load_connection

_PAUSE_S = 0.2


class Sender:
    """A Java program that sends to several targets.

    Attributes:
        opened: the targets of its producers.
    """

    def __init__(self, classes: str, folder: Path) -> None:
        connection = load_connection(folder)
        self._session = JavaSession(classes, connection, preexec_fn=end_with_parent)
        self.opened: set[str] = set()

    def send(self, target: str, level_topic: str, message: Message) -> dict[str, Any]:
        """Send a message; return the answer."""
        if target not in self.opened:
            answer = self._session.open(target, target, levelTopic=level_topic)
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
        return self._session("send", name=target, schema="bytes", **fields)

    def close(self, target: str) -> None:
        """Close the producer of a target."""
        if target in self.opened:
            self.opened.discard(target)
            self._session("close", name=target)


def produce_with_java(name: str, folder: str, classes: str, seed: str) -> None:
    """Send until the end of the process."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    chosen = random.Random(f"{seed} java {os.getpid()}")
    control = ControlFile(Path(folder) / "control.json")
    ledger = Ledger(Path(folder) / "ledgers", name)
    sender = Sender(classes, Path(folder))
    number = 0
    while not ended.wait(_PAUSE_S):
        control.refresh()
        now = control.control
        for target, state in now.targets.items():
            if not state.sends:
                sender.close(target)
        note_open(sender.opened)
        targets = sorted(target for target, state in now.targets.items() if state.sends)
        if not now.sending or not targets:
            continue
        target = chosen.choice(targets)
        number += 1
        message = random_message(f"{name}-{os.getpid()}-{now_ms()}-{number}", now, chosen)
        ledger.write([message.sent(target)])
        answer = sender.send(target, now.targets[target].level_topic, message)
        stored = "stored" in answer
        reason = "" if stored else json.dumps(answer)[:200]
        ledger.write([Confirmed(message.name, now_ms(), int(stored), reason)])
    os._exit(0)
