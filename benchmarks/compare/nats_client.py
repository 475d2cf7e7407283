"""Client of NATS that writes and reads its text protocol."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from arrivals import stamped
from nats_peer import rfc3339

from .client import CALLS, IN_FLIGHT, Arrivals, Progress, numbers, options, say
from .system import TOPIC

# Number of messages that are written at once.
_BLOCK = 250
_DELIVERY = "bench.deliveries"


class Connection:
    """Connection to a server.

    Args:
        port: port of the server.
        limit_s: longest time to wait for something to read, in seconds.
    """

    def __init__(self, port: int, limit_s: float = 5) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), limit_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()
        given = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True}
        self.write(f"CONNECT {json.dumps(given)}\r\n".encode())

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()

    def write(self, data: bytes) -> None:
        """Write lines of the protocol."""
        self._socket.sendall(data)

    def read(self) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Yield subject, reply subject and payload of the messages that are there.

        Headers come before the payload: the caller knows if there are any.

        Raises:
            TimeoutError: nothing came within the limit.
            ConnectionError: the server closed the connection.
        """
        data = self._socket.recv(1 << 20)
        if not data:
            raise ConnectionError("the server closed the connection")
        self._buffer += data
        place, buffer = 0, self._buffer
        while (end := buffer.find(b"\r\n", place)) >= 0:
            words = bytes(buffer[place:end]).split()
            following = end + 2
            if words and words[0] in (b"MSG", b"HMSG"):
                size = int(words[-1])
                if len(buffer) < following + size + 2:
                    break
                reply = words[3] if len(words) > (4 if words[0] == b"MSG" else 5) else b""
                yield words[1], reply, bytes(buffer[following : following + size])
                following += size + 2
            elif words and words[0] == b"PING":
                self.write(b"PONG\r\n")
            elif words and words[0] == b"-ERR":
                raise ConnectionError(bytes(buffer[place:end]).decode())
            place = following
        del buffer[:place]

    def request(self, subject: str, body: str) -> dict[str, Any]:
        """Return the answer to a request of the JetStream API.

        Raises:
            RuntimeError: the server refused the request.
        """
        inbox = f"_INBOX.{uuid.uuid4().hex}"
        size = len(body.encode())
        self.write(f"SUB {inbox} 1\r\nPUB {subject} {inbox} {size}\r\n{body}\r\n".encode())
        while True:
            for _, _, payload in self.read():
                if b'"error"' in payload or payload.startswith(b"NATS/1.0 503"):
                    raise RuntimeError(f"the NATS server refused a request: {payload.decode()}")
                found: dict[str, Any] = json.loads(payload)
                return found


def publish(given: dict[str, str]) -> None:
    """Publish the plan as schedules; repeat those that are not confirmed."""
    dues = numbers(given["plan"])
    times = {due: rfc3339(due) for due in set(dues)}

    def line(number: int, inbox: str) -> bytes:
        due_ms = dues[number]
        headers = (
            f"NATS/1.0\r\nNats-Schedule: @at {times[due_ms]}\r\n"
            f"Nats-Schedule-Target: {TOPIC}.due\r\n\r\n"
        )
        body, size = stamped(number, due_ms), len(headers)
        command = f"HPUB {TOPIC}.at.{number} {inbox}.{number} {size} {size + len(body)}\r\n"
        return (command + headers).encode() + body + b"\r\n"

    began = time.perf_counter()
    flags = _ask(int(given["port"]), range(len(dues)), line, IN_FLIGHT, float(given["limit_s"]))
    seconds = time.perf_counter() - began
    if given["sure"] == "yes":
        Path(given["out"]).write_bytes(flags)
    elif not all(flags):
        raise RuntimeError("messages were not stored")
    say("result", f'{{"seconds": {seconds:.3f}}}')


def cancel(given: dict[str, str]) -> None:
    """Cancel messages: purge the subject of each schedule."""
    chosen = numbers(given["numbers"])

    def line(place: int, inbox: str) -> bytes:
        body = json.dumps({"filter": f"{TOPIC}.at.{chosen[place]}"})
        subject = f"$JS.API.STREAM.PURGE.{TOPIC} {inbox}.{place}"
        return f"PUB {subject} {len(body)}\r\n{body}\r\n".encode()

    began = time.perf_counter()
    wanted = b'"purged":1'
    flags = _ask(int(given["port"]), range(len(chosen)), line, CALLS, 60, wanted)
    seconds = time.perf_counter() - began
    Path(given["out"]).write_bytes(flags)
    say("result", f'{{"seconds": {seconds:.3f}}}')


def _ask(
    port: int,
    places: Sequence[int],
    line: Callable[[int, str], bytes],
    in_flight: int,
    limit_s: float,
    wanted: bytes = b"",
) -> bytearray:
    """Send a request for each place, and again after a failure; return the ones that succeeded.

    Args:
        line: function that returns the lines for a place and an inbox; the answer goes to the
            inbox, followed by the place.
        in_flight: longest number of requests without an answer.
        limit_s: longest time for all, in seconds.
        wanted: part of the answer that means success; any answer without an error by default. An
            answer without it is final, too.
    """
    flags = bytearray(len(places))
    deadline = time.monotonic() + limit_s
    progress = Progress(lambda: flags.count(1))
    todo = deque(places)
    while todo and time.monotonic() < deadline:
        asked: set[int] = set()
        try:
            with Connection(port) as connection:
                inbox = f"_INBOX.{uuid.uuid4().hex}"
                connection.write(f"SUB {inbox}.* 1\r\n".encode())
                while (todo or asked) and time.monotonic() < deadline:
                    block = []
                    while todo and len(asked) < in_flight and len(block) < _BLOCK:
                        asked.add(todo[0])
                        block.append(line(todo.popleft(), inbox))
                    if block:
                        connection.write(b"".join(block))
                    if len(asked) < in_flight - _BLOCK and todo:
                        continue
                    for subject, _, answer in connection.read():
                        place = int(subject.rpartition(b".")[2])
                        asked.discard(place)
                        if b'"error"' in answer or answer.startswith(b"NATS/1.0 503"):
                            todo.append(place)
                        else:
                            flags[place] = wanted in answer
        except OSError:
            time.sleep(0.05)
        todo.extend(sorted(asked))
    progress.end()
    return flags


def consume(given: dict[str, str]) -> None:
    """Receive and acknowledge each due message, until SIGTERM; connect again if necessary."""
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    found = Arrivals(given["out"])
    config = {
        "durable_name": "bench",
        "filter_subject": f"{TOPIC}.due",
        "deliver_subject": _DELIVERY,
        "deliver_policy": "all",
        "ack_policy": "explicit",
    }
    body = json.dumps({"stream_name": TOPIC, "config": config})
    while not over.is_set():
        try:
            with Connection(int(given["port"]), 0.2) as connection:
                api = f"$JS.API.CONSUMER.DURABLE.CREATE.{TOPIC}.bench"
                size = len(body)
                connection.write(f"SUB _INBOX.made 1\r\nSUB {_DELIVERY} 2\r\n".encode())
                connection.write(f"PUB {api} _INBOX.made {size}\r\n{body}\r\n".encode())
                _receive(connection, found, over)
        except OSError:
            time.sleep(0.05)
    found.write()


def _receive(connection: Connection, found: Arrivals, over: threading.Event) -> None:
    while not over.is_set():
        acknowledgements = []
        try:
            for subject, reply, content in connection.read():
                if subject == b"_INBOX.made":
                    if b'"error"' in content or content.startswith(b"NATS/1.0 503"):
                        raise ConnectionError(f"the consumer was refused: {content.decode()}")
                    say("ready")
                    continue
                _, _, payload = content.rpartition(b"\r\n")
                found.add(payload[:25])
                acknowledgements.append(b"PUB %b 4\r\n+ACK\r\n" % reply)
        except TimeoutError:
            found.write()
            continue
        found.write_if_old()
        connection.write(b"".join(acknowledgements))


if __name__ == "__main__":
    action, chosen_options = options()
    sys.exit({"publish": publish, "consume": consume, "cancel": cancel}[action](chosen_options))
