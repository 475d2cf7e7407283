"""The parts that send and receive: delayed messages to every target, and what arrives there.

Messages are sent with the Python or the Java producer. Some of them expire, and some are cancelled
or replaced later; but none of those from Java. One subscription is on every target.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pulsar

from delaylevel import DelayLevelClient
from delaylevel.errors import CancellationFailedError, DelayLevelError
from delaylevel.model.envelope import ID
from delaylevel.model.outcome import Outcome, Receipt
from support.java_client import JavaSession, b64
from support.world import QUIET, quiet_client

from .ledger import NAME, Cancelled, Confirmed, Ledger, Received, Row, Sent, checksum, now_ms
from .stage import SUBSCRIPTIONS, Control, Openings, TargetState, load_connection

# Messages per second to each target, and in the shortest time between two looks.
_RATE = 4.0
TICK_S = 0.05
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
    """One message, made at random; its name is also its ID if it has one."""

    expires_ms = 0

    def __init__(self, name: str, due_ms: int, size: int, chosen: random.Random) -> None:
        self.name = name
        self.due_ms = due_ms
        self.body = chosen.randbytes(size)
        self.properties = {NAME: name, "n": str(chosen.randrange(100)), "text": "ü ✓"}
        self.key = f"key-{chosen.randrange(50)}" if chosen.random() < 0.5 else ""
        self.ordering_key = f"order-{chosen.randrange(9)}" if chosen.random() < 0.2 else ""
        self.event_ms = chosen.randrange(1, 1 << 40) if chosen.random() < 0.5 else 0

    def sent(self, target: str) -> Sent:
        whole = checksum(self.body, self.properties, self.key, self.ordering_key, self.event_ms)
        return Sent(self.name, target, self.due_ms, now_ms(), whole, self.expires_ms)

    def arguments(self) -> dict[str, Any]:
        return {
            "properties": dict(self.properties),
            "partition_key": self.key or None,
            "ordering_key": self.ordering_key or None,
            "event_timestamp": self.event_ms or None,
            "deliver_at": self.due_ms,
        }


class JavaProducer:
    """A producer of a Java program, which answers when the broker has confirmed a message."""

    def __init__(self, session: JavaSession, target: str, level_topic: str) -> None:
        self._session, self._target = session, target
        answer = session.open(target, target, levelTopic=level_topic)
        assert "levelTopic" in answer, answer

    def send_async(self, body: bytes, callback: Callable[[Any, Any], None], **given: Any) -> None:
        """Send a message, and wait for the answer."""
        fields = {
            "value": b64(body),
            "properties": given["properties"],
            "at": given["deliver_at"],
        }
        if given["partition_key"]:
            fields["key"] = given["partition_key"]
        if given["ordering_key"]:
            fields["orderingKey"] = b64(given["ordering_key"].encode())
        if given["event_timestamp"]:
            fields["eventTime"] = given["event_timestamp"]
        answer = self._session("send", name=self._target, schema="bytes", **fields)
        callback(pulsar.Result.Ok if "stored" in answer else answer, None)

    def close(self) -> None:
        self._session("close", name=self._target)


class OneAtATime(JavaSession):
    """A Java program that several threads use; this process ends with it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._lock = threading.RLock()
        super().__init__(*arguments, **options)

    def __call__(self, command: str, **values: Any) -> dict[str, Any]:
        with self._lock:
            try:
                return super().__call__(command, **values)
            except (AssertionError, OSError):
                os._exit(1)


class Sender:
    """The producers of one process, with their outcomes in its ledger.

    It sends with the Java producer in the folder ``classes``, if that is given.
    """

    def __init__(
        self, name: str, folder: Path, seed: str, classes: str = "", preexec_fn: Any = None
    ) -> None:
        self._ledger = Ledger(folder / "ledgers", name)
        self._java: JavaSession | None = None
        if classes:
            self._java = OneAtATime(classes, load_connection(folder), preexec_fn=preexec_fn)
        else:
            self._client = DelayLevelClient.from_connection(load_connection(folder), logger=QUIET)
        self._name = f"{name}-{os.getpid()}-{now_ms() % 1_000_000}"
        self._count = 0
        self._chosen = random.Random(f"{seed} {name} {os.getpid()}")
        self._targets: dict[str, TargetState] = {}
        self._openings = Openings(self._open)
        self._producers = self._openings.open
        self._answers: deque[Row] = deque()
        self._longest_ms = 6_000
        self._bursts: int | None = None
        self._own_burst_s = time.monotonic() + self._chosen.uniform(3, 10)
        self._cancellations: queue.Queue[tuple[int, str, str, int, str]] = queue.Queue()
        for _ in range(2):
            threading.Thread(target=self._cancel, daemon=True).start()

    def work(self, control: Control) -> None:
        """Do what the time between two looks asks for."""
        self._targets = control.targets
        self._openings.follow({name for name, state in control.targets.items() if state.sends})
        burst = self._bursts is not None and control.bursts > self._bursts
        if time.monotonic() > self._own_burst_s:
            burst = True
            self._own_burst_s = time.monotonic() + self._chosen.uniform(5, 15)
        self._bursts = control.bursts
        if control.sending and self._producers:
            self._send_all(control, burst and self._java is None)
        self.note()

    def note(self) -> None:
        """Write down the answers so far."""
        self._ledger.write(*(self._answers.popleft() for _ in range(len(self._answers))))

    def _open(self, target: str) -> Any:
        level_topic = self._targets[target].level_topic
        if self._java is not None:
            return JavaProducer(self._java, target, level_topic)
        return self._client.create_producer(
            target,
            enable_delay_level_topic=True,
            delay_level_topic=level_topic,
            send_timeout_millis=_SEND_TIMEOUT_MS,
            batching_enabled=True,
            max_pending_messages=20_000,
            # Without it, the plain client loses messages without a delay: see docs/operations.md.
            initial_sequence_id=1,
        )

    def _send_all(self, control: Control, burst: bool) -> None:
        """Send the messages of one tick; the ledger has them before."""
        messages: list[tuple[str, Message]] = []
        self._longest_ms = control.longest_delay_ms
        for target in list(self._producers):
            messages += [(target, self._message()) for _ in range(_poisson(self._chosen))]
        if burst:
            target = control.burst_target
            if target not in self._producers:
                target = self._chosen.choice(list(self._producers))
            due_ms = now_ms() + control.burst_after_ms + self._chosen.randint(1_500, 5_000)
            for _ in range(control.burst_size):
                message = Message(self._next(), due_ms, control.burst_bytes, self._chosen)
                messages.append((target, message))
        self._ledger.write(*(message.sent(target) for target, message in messages))
        for target, message in messages:
            self._send(target, message)

    def _message(self) -> Message:
        """Return a message with a delay that the level topics take."""
        chosen = self._chosen
        if chosen.random() < _DIRECT_SHARE:
            delay_ms = -1  # it goes straight to its target
        else:
            # Half of the delays are short, so that something is always due.
            longest_ms = self._longest_ms if chosen.random() < 0.5 else 6_000
            delay_ms = chosen.randint(_SHORTEST_DELAY_MS, longest_ms)
        size = chosen.randrange(60_000 if chosen.random() < _LARGE_SHARE else 300)
        message = Message(self._next(), now_ms() + delay_ms, size, chosen)
        if delay_ms > 0 and self._java is None and chosen.random() < _EXPIRY_SHARE:
            message.expires_ms = message.due_ms + chosen.choice(_EXPIRIES_MS)
        return message

    def _send(self, target: str, message: Message) -> None:
        named = self._java is None and self._chosen.random() < 0.7
        # A message that goes straight to its target is not recognised as a copy.
        again = named and message.due_ms > now_ms() + _STRAIGHT_MS
        for _ in range(2 if again and self._chosen.random() < _TWICE_SHARE else 1):
            try:
                self._producers[target].send_async(
                    message.body,
                    partial(self._answer, message.name),
                    **message.arguments(),
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
        reason = "" if stored else str(result)[:200]
        self._answers.append(Confirmed(name, now_ms(), int(stored), reason))

    def _cancel(self) -> None:
        """Cancel messages at their times, in a thread."""
        waiting: list[tuple[int, str, str, int, str]] = []
        while True:
            with contextlib.suppress(queue.Empty):
                heapq.heappush(waiting, self._cancellations.get(timeout=0.1))
            while waiting and waiting[0][0] <= now_ms():
                _, name, target, due_ms, key = heapq.heappop(waiting)
                producer = self._producers.get(target)
                if producer is None:
                    continue
                replaces = self._chosen.random() < _RESCHEDULE_SHARE
                call = self._reschedule_one if replaces else self._cancel_one
                timeout = 0.5 if self._chosen.random() < 0.5 else None
                row = Cancelled(name, now_ms(), "requested")
                try:
                    outcome = call(producer, row, target, due_ms, key, timeout)
                except (DelayLevelError, pulsar.PulsarException) as error:
                    print(f"cancel {name}: {error!r}", flush=True)
                    self._ledger.write(Cancelled(name, now_ms(), "failed"))
                else:
                    self._ledger.write(Cancelled.of(outcome, name, now_ms()))

    def _cancel_one(
        self, producer: Any, row: Cancelled, _: str, due_ms: int, key: str, timeout: float | None
    ) -> Outcome:
        self._ledger.write(row)
        options = {"partition_key": key or None, "timeout": timeout}
        found: Outcome = producer.cancel(message_id=row.name, deliver_at=due_ms, **options)
        return found

    def _reschedule_one(
        self, producer: Any, row: Cancelled, target: str, due_ms: int, key: str, timeout: Any
    ) -> Outcome:
        """Replace a message: at least one of the two arrives, as the outcome says."""
        later_ms = now_ms() + self._chosen.randint(_SHORTEST_DELAY_MS, self._longest_ms)
        message = Message(f"{row.name}-again", later_ms, 100, self._chosen)
        message.key = key
        self._ledger.write(message.sent(target), row)
        receipt = Receipt(row.name, due_ms, target, producer.description.topic, key)
        options = {**message.arguments(), "message_id": message.name, "timeout": timeout}
        stored = 0
        try:
            found: Outcome = producer.reschedule(receipt, message.body, **options).outcome
            stored = 1
        except CancellationFailedError:
            stored = 1
            raise
        finally:
            self._ledger.write(Confirmed(message.name, now_ms(), stored))
        return found

    def _next(self) -> str:
        self._count += 1
        return f"{self._name}-{self._count}"


def _poisson(chosen: random.Random) -> int:
    """Return the number of messages to one target in a tick."""
    count, left = 0, chosen.expovariate(1.0)
    while left < _RATE * TICK_S:
        count += 1
        left += chosen.expovariate(1.0)
    return count


class Receiver:
    """The consumers of one subscription, whose name is also its type."""

    def __init__(self, name: str, folder: Path, subscription: str) -> None:
        self._subscription = subscription
        self._ledger = Ledger(folder / "ledgers", name)
        self._client = quiet_client(load_connection(folder))
        self._arrived: deque[tuple[str, Any, Any, int]] = deque()
        self._consumers = Openings(self._open)

    def _open(self, topic: str) -> Any:
        return self._client.subscribe(
            topic,
            self._subscription,
            consumer_type=SUBSCRIPTIONS[self._subscription],
            initial_position=pulsar.InitialPosition.Earliest,
            message_listener=lambda consumer, message: self._arrived.append(
                (topic, consumer, message, now_ms())
            ),
        )

    def work(self, control: Control) -> None:
        """Receive from the targets that are used now."""
        targets = control.targets.items()
        self._consumers.follow({topic for topic, state in targets if state.receives})
        self.note()

    def note(self) -> None:
        """Write down what has arrived, and acknowledge it."""
        rows, done = [], []
        while self._arrived:
            topic, consumer, message, at_ms = self._arrived.popleft()
            done.append((consumer, message))
            if NAME in message.properties():
                rows.append(self._row(topic, message, at_ms))
        self._ledger.write(*rows)
        for consumer, message in done:
            # A consumer that lost its connection gets the message again.
            with contextlib.suppress(pulsar.PulsarException):
                consumer.acknowledge(message)

    def _row(self, topic: str, message: Any, at_ms: int) -> Received:
        properties, place = message.properties(), message.message_id()
        partition = message.topic_name().rpartition("/")[2]
        keys = message.partition_key(), message.ordering_key()
        return Received(
            properties[NAME],
            topic,
            self._subscription,
            f"{partition}:{place.ledger_id()}:{place.entry_id()}:{place.batch_index()}",
            message.publish_timestamp(),
            at_ms,
            checksum(message.data(), properties, *keys, message.event_timestamp()),
            properties.get(ID, ""),
        )
