"""The part that sends: delayed messages to every target.

Some of them expire, and some are cancelled or replaced later.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import queue
import random
import signal
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pulsar

from delaylevel import DelayLevelClient
from delaylevel.errors import CancellationFailedError, DelayLevelError
from delaylevel.model.outcome import Outcome, Receipt

from .control import Control, ControlFile, Openings, TargetState
from .ledger import NAME, Cancelled, Confirmed, Ledger, Row, Sent, checksum, now_ms
from .stage import load_connection

_TICK_S = 0.05
# Messages per second to each target.
_RATE = 4.0
_SEND_TIMEOUT_MS = 20_000
_CANCEL_SHARE = 0.08
# Of the messages that are cancelled: those that are replaced by another message instead.
_RESCHEDULE_SHARE = 0.4
_EXPIRY_SHARE = 0.1
_EXPIRIES_MS = (2_000, 8_000, 3_600_000)
_DIRECT_SHARE = 0.02
_TWICE_SHARE = 0.03
_LARGE_SHARE = 0.02
_SHORTEST_DELAY_MS = 200
# A clock that is ahead by less never makes a message with a longer delay due.
_STRAIGHT_MS = 6_000


class Message:
    """One message, made at random.

    Args:
        name: unique name, which is also its ID if it has one.
        due_ms: due time, ms since the epoch.
        size: size of the body, in bytes.
    """

    def __init__(self, name: str, due_ms: int, size: int, chosen: random.Random) -> None:
        self.name = name
        self.due_ms = due_ms
        self.body = chosen.randbytes(size)
        self.properties = {NAME: name, "n": str(chosen.randrange(100)), "text": "ü ✓"}
        self.key = f"key-{chosen.randrange(50)}" if chosen.random() < 0.5 else ""
        self.ordering_key = f"order-{chosen.randrange(9)}" if chosen.random() < 0.2 else ""
        self.event_ms = chosen.randrange(1, 1 << 40) if chosen.random() < 0.5 else 0
        self.expires_ms = 0

    def sent(self, target: str) -> Sent:
        """Return the row of the ledger."""
        whole = checksum(self.body, self.properties, self.key, self.ordering_key, self.event_ms)
        return Sent(self.name, target, self.due_ms, now_ms(), whole, self.expires_ms)


def random_message(name: str, control: Control, chosen: random.Random) -> Message:
    """Return a message with a delay that the level topics take."""
    if chosen.random() < _DIRECT_SHARE:
        delay_ms = -1  # it goes straight to its target
    else:
        # Half of the delays are short, so that something is always due.
        longest = control.longest_delay_ms if chosen.random() < 0.5 else 6_000
        delay_ms = chosen.randint(_SHORTEST_DELAY_MS, longest)
    size = chosen.randrange(2, 60_000) if chosen.random() < _LARGE_SHARE else chosen.randrange(300)
    return Message(name, now_ms() + delay_ms, size, chosen)


class Sender:
    """The producers of one process, with their outcomes in its ledger."""

    def __init__(self, name: str, folder: Path, chosen: random.Random) -> None:
        self._ledger = Ledger(folder / "ledgers", name)
        self._client = DelayLevelClient.from_connection(
            load_connection(folder),
            logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull),
        )
        self._name = f"{name}-{os.getpid()}-{now_ms() % 1_000_000}"
        self._count = 0
        self._chosen = chosen
        self._targets: dict[str, TargetState] = {}
        self._openings = Openings(self._open)
        self._producers = self._openings.open
        self._answers: deque[Row] = deque()
        self._longest_ms = 6_000
        self._cancellations: queue.PriorityQueue[tuple[int, str, str, int, str]] = (
            queue.PriorityQueue()
        )
        for _ in range(2):
            threading.Thread(target=self._cancel, daemon=True).start()

    def follow(self, targets: dict[str, TargetState]) -> None:
        """Open producers of the targets that are used now, and close all others."""
        self._targets = targets
        self._openings.follow({name for name, state in targets.items() if state.sends})

    def _open(self, target: str) -> Any:
        return self._client.create_producer(
            target,
            enable_delay_level_topic=True,
            delay_level_topic=self._targets[target].level_topic,
            send_timeout_millis=_SEND_TIMEOUT_MS,
            batching_enabled=True,
            max_pending_messages=20_000,
            # Without it, the plain client loses messages without a delay: see docs/operations.md.
            initial_sequence_id=1,
        )

    def send(self, control: Control, burst: bool) -> None:
        """Send the messages of one tick; the ledger has them before."""
        messages: list[tuple[str, Message]] = []
        self._longest_ms = control.longest_delay_ms
        for target in list(self._producers):
            count = _poisson(_RATE * _TICK_S, self._chosen)
            for _ in range(count):
                message = random_message(self._next(), control, self._chosen)
                if message.due_ms > now_ms() and self._chosen.random() < _EXPIRY_SHARE:
                    message.expires_ms = message.due_ms + self._chosen.choice(_EXPIRIES_MS)
                messages.append((target, message))
        if burst and self._producers:
            target = control.burst_target
            if target not in self._producers:
                target = self._chosen.choice(list(self._producers))
            due_ms = now_ms() + control.burst_after_ms + self._chosen.randint(1_500, 5_000)
            for _ in range(control.burst_size):
                message = Message(self._next(), due_ms, control.burst_bytes, self._chosen)
                messages.append((target, message))
        if not messages:
            return
        self._ledger.write([message.sent(target) for target, message in messages])
        for target, message in messages:
            self._send(target, message)

    def _send(self, target: str, message: Message) -> None:
        named = self._chosen.random() < 0.7
        producer = self._producers[target]
        # A message that goes straight to its target is not recognised as a copy.
        again = named and message.due_ms > now_ms() + _STRAIGHT_MS
        times = 2 if again and self._chosen.random() < _TWICE_SHARE else 1
        for _ in range(times):
            try:
                producer.send_async(
                    message.body,
                    partial(self._answer, message.name),
                    properties=dict(message.properties),
                    partition_key=message.key or None,
                    ordering_key=message.ordering_key or None,
                    event_timestamp=message.event_ms or None,
                    deliver_at=message.due_ms,
                    message_id=message.name if named else None,
                    expires_at=message.expires_ms or None,
                )
            except Exception as error:
                self._answers.append(Confirmed(message.name, now_ms(), 0, repr(error)[:200]))
        if named and self._chosen.random() < _CANCEL_SHARE and message.due_ms > now_ms():
            at_ms = self._chosen.randint(now_ms(), message.due_ms + 500)
            self._cancellations.put((at_ms, message.name, target, message.due_ms, message.key))

    def _answer(self, name: str, result: Any, _place: Any) -> None:
        stored = result == pulsar.Result.Ok
        self._answers.append(Confirmed(name, now_ms(), int(stored), "" if stored else str(result)))

    def _cancel(self) -> None:
        """Cancel messages at their times, in a thread."""
        waiting: list[tuple[int, str, str, int, str]] = []
        while True:
            with contextlib.suppress(queue.Empty):
                heapq.heappush(waiting, self._cancellations.get(timeout=0.1))
            while waiting and waiting[0][0] <= now_ms():
                _, *which = heapq.heappop(waiting)
                replaces = self._chosen.random() < _RESCHEDULE_SHARE
                (self._reschedule_one if replaces else self._cancel_one)(*which)

    def _cancel_one(self, name: str, target: str, due_ms: int, key: str) -> None:
        producer = self._producers.get(target)
        if producer is None:
            return
        self._ledger.write([Cancelled(name, now_ms(), "requested", "call")])
        try:
            outcome = producer.cancel(
                message_id=name,
                deliver_at=due_ms,
                partition_key=key or None,
                timeout=0.5 if self._chosen.random() < 0.5 else None,
            )
        except (DelayLevelError, pulsar.PulsarException) as error:
            print(f"cancel {name}: {error!r}", flush=True)
            self._ledger.write([Cancelled(name, now_ms(), "failed", "call")])
            return
        self._write_outcome(name, outcome)

    def _reschedule_one(self, name: str, target: str, due_ms: int, key: str) -> None:
        """Replace a message: at least one of the two arrives, as the outcome says."""
        producer = self._producers.get(target)
        if producer is None:
            return
        later_ms = now_ms() + self._chosen.randint(_SHORTEST_DELAY_MS, self._longest_ms)
        message = Message(f"{name}-again", later_ms, 100, self._chosen)
        message.key = key
        self._ledger.write([message.sent(target), Cancelled(name, now_ms(), "requested", "call")])
        try:
            result = producer.reschedule(
                Receipt(name, due_ms, target, producer.description.topic, key),
                message.body,
                properties=dict(message.properties),
                partition_key=key or None,
                ordering_key=message.ordering_key or None,
                event_timestamp=message.event_ms or None,
                deliver_at=later_ms,
                message_id=message.name,
                timeout=0.5 if self._chosen.random() < 0.5 else None,
            )
        except CancellationFailedError:
            stored = 1
        except (DelayLevelError, pulsar.PulsarException) as error:
            print(f"reschedule {name}: {error!r}", flush=True)
            stored = 0
        else:
            self._ledger.write([Confirmed(message.name, now_ms(), 1, "")])
            self._write_outcome(name, result.outcome)
            return
        self._ledger.write(
            [
                Confirmed(message.name, now_ms(), stored, "" if stored else "failed"),
                Cancelled(name, now_ms(), "failed", "call"),
            ]
        )

    def _write_outcome(self, name: str, outcome: Outcome) -> None:
        self._ledger.write(
            [
                Cancelled(
                    name,
                    now_ms(),
                    outcome.status.value,
                    "call",
                    outcome.released_ms or 0,
                    outcome.decided_ms or 0,
                )
            ]
        )

    def note(self) -> None:
        """Write down the answers so far."""
        rows = []
        while self._answers:
            rows.append(self._answers.popleft())
        if rows:
            self._ledger.write(rows)

    def _next(self) -> str:
        self._count += 1
        return f"{self._name}-{self._count}"


def produce(name: str, folder: str, seed: str) -> None:
    """Send until the end of the process."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    chosen = random.Random(f"{seed} {os.getpid()}")
    control = ControlFile(Path(folder) / "control.json")
    sender = Sender(name, Path(folder), chosen)
    bursts = control.control.bursts
    own_burst_s = time.monotonic() + chosen.uniform(3, 10)
    while not ended.wait(_TICK_S):
        control.refresh()
        now = control.control
        sender.follow(now.targets)
        burst = now.bursts > bursts or time.monotonic() > own_burst_s
        if time.monotonic() > own_burst_s:
            own_burst_s = time.monotonic() + chosen.uniform(5, 15)
        bursts = now.bursts
        if now.sending:
            sender.send(now, burst)
        sender.note()
    os._exit(0)  # whatever the client waits for


def _poisson(mean: float, chosen: random.Random) -> int:
    """Return a number of events whose mean number is small."""
    count, left = 0, chosen.expovariate(1.0)
    while left < mean:
        count += 1
        left += chosen.expovariate(1.0)
    return count
