"""NATS JetStream with message schedules: its server, and a client that writes its text protocol.

Each delayed message is a schedule with its own subject, because a stream keeps one schedule for
each subject. At the due time the server stores its body once more, under the target subject.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from common import STAMP, complete, stamped, summary

from delaylevel.broker import process

from .client import CALLS, IN_FLIGHT, Arrivals, Progress, numbers, options, say
from .system import TOPIC, System

MISSING = "NATS is left out: its server is not installed (pip install -e '.[bench]')"
_DELIVERY, _MADE = "bench.deliveries", "_INBOX.made"
# Number of messages that are written at once.
_BLOCK = 250


class Nats(System):
    """One server with file storage, of the extra ``bench``."""

    name = "nats"
    title = "NATS JetStream"
    settings = (
        "File storage, one replica. It confirms before the disk has the data: `sync_interval` is 2 "
        "minutes (its default)."
    )
    port = 0

    def fetch(self) -> None:
        if server_path() is None:
            raise RuntimeError(MISSING)

    def version(self) -> str:
        command = [str(server_path()), "-v"]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        return "NATS " + found.stdout.split()[-1].removeprefix("v")

    def start(self, cancellable: bool) -> None:
        self.port = process.free_ports(1)[0]
        self._start()
        stream = {
            "name": TOPIC,
            "subjects": [f"{TOPIC}.at.*", f"{TOPIC}.due"],
            "storage": "file",
            "num_replicas": 1,
            "retention": "limits",
            "allow_msg_schedules": True,
        }
        with Connection(self.port) as connection:
            connection.request(f"$JS.API.STREAM.CREATE.{TOPIC}", json.dumps(stream))

    def restart(self) -> None:
        self._start()
        self.servers[0].wait_for(self._has_stream)

    def client(self, action: str) -> list[str]:
        return [sys.executable, "-m", "compare.nats", action, f"port={self.port}"]

    def _start(self) -> None:
        options = ("-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self.directory))
        command = [str(server_path()), *options]
        self.run(command, "nats", lambda server: "Server is ready" in server.log())

    def _has_stream(self) -> bool:
        try:
            with Connection(self.port) as connection:
                connection.request(f"$JS.API.STREAM.INFO.{TOPIC}", "")
        except (OSError, RuntimeError):
            return False
        return True


def server_path() -> str | None:
    """Return the path of the server; None if it is not installed."""
    folders = (sysconfig.get_path("scripts"), os.environ.get("PATH", ""))
    return shutil.which("nats-server", path=os.pathsep.join(folders))


class Connection:
    """Connection to a server; a read that gets nothing within ``limit_s`` raises TimeoutError."""

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
        """Yield subject, reply subject, and headers with payload of the messages that are there.

        Raises:
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
        """Return the answer to a request of the JetStream API."""
        inbox = f"_INBOX.{uuid.uuid4().hex}"
        size = len(body.encode())
        self.write(f"SUB {inbox} 1\r\nPUB {subject} {inbox} {size}\r\n{body}\r\n".encode())
        while True:
            for _, _, payload in self.read():
                if _is_refusal(payload):
                    raise RuntimeError(f"the NATS server refused a request: {payload.decode()}")
                found: dict[str, Any] = json.loads(payload)
                return found


def _is_refusal(answer: bytes) -> bool:
    return b'"error"' in answer or answer.startswith(b"NATS/1.0 503")


def publish(port: int, dues_ms: Sequence[int], limit_s: float, flags: bytearray) -> float:
    """Publish schedules, and set the flag of each that was stored; return the time in seconds."""
    texts = _schedules(dues_ms)

    def line(number: int, inbox: str) -> bytes:
        due_ms = dues_ms[number]
        headers = (
            f"NATS/1.0\r\nNats-Schedule: {texts[due_ms]}\r\n"
            f"Nats-Schedule-Target: {TOPIC}.due\r\n\r\n"
        )
        body, size = stamped(number, due_ms), len(headers)
        command = f"HPUB {TOPIC}.at.{number} {inbox}.{number} {size} {size + len(body)}\r\n"
        return (command + headers).encode() + body + b"\r\n"

    began = time.perf_counter()
    _ask(port, flags, line, IN_FLIGHT, limit_s)
    return time.perf_counter() - began


def _schedules(dues_ms: Sequence[int]) -> dict[int, str]:
    times = {due: datetime.fromtimestamp(due / 1000, timezone.utc) for due in set(dues_ms)}
    return {due: f"@at {at:%Y-%m-%dT%H:%M:%S}.{due % 1000:03}Z" for due, at in times.items()}


def publish_with_client(port: int, dues_ms: Sequence[int]) -> float:
    """Publish schedules with the server's own client for Python; return the time in seconds."""
    import nats  # of the extra

    async def send() -> float:
        client = await nats.connect(f"nats://127.0.0.1:{port}")
        stream = client.jetstream(publish_async_max_pending=IN_FLIGHT)
        began, texts, target = time.perf_counter(), _schedules(dues_ms), f"{TOPIC}.due"
        for number, due_ms in enumerate(dues_ms):
            headers = {"Nats-Schedule": texts[due_ms], "Nats-Schedule-Target": target}
            subject, body = f"{TOPIC}.at.{number}", stamped(number, due_ms)
            stored.append(await stream.publish_async(subject, body, headers=headers))
        await asyncio.gather(*stored)
        seconds = time.perf_counter() - began
        await client.close()
        return seconds

    stored: list[Any] = []
    return asyncio.run(send())


def cancel(port: int, chosen: Sequence[int], flags: bytearray) -> float:
    """Purge the subjects of schedules, and set the flag of each that was there; return the time."""

    def line(place: int, inbox: str) -> bytes:
        body = json.dumps({"filter": f"{TOPIC}.at.{chosen[place]}"})
        subject = f"$JS.API.STREAM.PURGE.{TOPIC} {inbox}.{place}"
        return f"PUB {subject} {len(body)}\r\n{body}\r\n".encode()

    began = time.perf_counter()
    _ask(port, flags, line, CALLS, 60, b'"purged":1')
    return time.perf_counter() - began


def _ask(
    port: int,
    flags: bytearray,
    line: Callable[[int, str], bytes],
    in_flight: int,
    limit_s: float,
    wanted: bytes = b"",
) -> None:
    """Send a request for each flag, and again after a failure; set the flags of successes.

    An answer without the ``wanted`` part is final, but no success.
    """
    deadline = time.monotonic() + limit_s
    todo = deque(range(len(flags)))
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
                        if _is_refusal(answer):
                            todo.append(place)
                        else:
                            flags[place] = wanted in answer
        except OSError:
            time.sleep(0.05)
        todo.extend(sorted(asked))


def deliveries(port: int, ready: Callable[[], None]) -> Iterator[bytes | None]:
    """Yield the stamp of each due message, None now and then; connect again if necessary."""
    config = {
        "durable_name": "bench",
        "filter_subject": f"{TOPIC}.due",
        "deliver_subject": _DELIVERY,
        "deliver_policy": "all",
        "ack_policy": "explicit",
    }
    body = json.dumps({"stream_name": TOPIC, "config": config})
    create = f"PUB $JS.API.CONSUMER.DURABLE.CREATE.{TOPIC}.bench {_MADE} {len(body)}\r\n{body}\r\n"
    while True:
        try:
            with Connection(port, 0.2) as connection:
                connection.write(f"SUB {_MADE} 1\r\nSUB {_DELIVERY} 2\r\n{create}".encode())
                while True:
                    yield from _receive(connection, ready)
                    yield None
        except OSError:
            time.sleep(0.05)
            yield None


def _receive(connection: Connection, ready: Callable[[], None]) -> Iterator[bytes]:
    acknowledgements = []
    try:
        for subject, reply, content in connection.read():
            if subject != _MADE.encode():
                yield content.rpartition(b"\r\n")[2][:STAMP]
                acknowledgements.append(b"PUB %b 4\r\n+ACK\r\n" % reply)
            elif _is_refusal(content):
                raise ConnectionError(f"the consumer was refused: {content.decode()}")
            else:
                ready()
    except TimeoutError:
        return
    connection.write(b"".join(acknowledgements))


def consume(port: int, count: int, keys: int, limit_s: float, answer: Any) -> None:
    """Receive ``count`` due messages; put "ready", then a summary of their arrivals, in a queue.

    The consumer is what an application would use: an ordered one, with a callback.
    """
    import nats  # of the extra

    stamps: list[bytes] = []
    times: list[float] = []

    async def arrive(message: Any) -> None:
        times.append(time.time())
        stamps.append(message.data[:STAMP])

    async def receive() -> None:
        client = await nats.connect(f"nats://127.0.0.1:{port}")
        # By default, it drops what comes faster than it is handled.
        limits = {"pending_msgs_limit": count, "pending_bytes_limit": 1 << 32}
        await client.jetstream().subscribe(
            f"{TOPIC}.due", stream=TOPIC, cb=arrive, ordered_consumer=True, **limits
        )
        answer.put("ready")
        deadline = time.monotonic() + limit_s
        while not complete(stamps, count) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        await client.close()

    asyncio.run(receive())
    answer.put(summary(stamps, times, count, keys))


def main() -> None:
    """Do what the arguments of this program say: publish, cancel, or consume until SIGTERM."""
    action, given = options()
    port, out = int(given["port"]), Path(given["out"])
    if action == "consume":
        over = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: over.set())
        found = Arrivals(given["out"])
        for stamp in deliveries(port, lambda: say("ready")):
            if stamp is not None:
                found.add(stamp)
            else:
                found.write_if_old()
            if over.is_set():
                break
        found.write()
        return
    publishing = action == "publish"
    given_numbers = numbers(given["plan" if publishing else "numbers"])
    flags = bytearray(len(given_numbers))
    progress = Progress(lambda: flags.count(1))
    if publishing:
        seconds = publish(port, given_numbers, float(given["limit_s"]), flags)
    else:
        seconds = cancel(port, given_numbers, flags)
    progress.end()
    if not publishing or given["sure"] == "yes":
        out.write_bytes(flags)
    elif not all(flags):
        raise RuntimeError("messages were not stored")
    say("result", f'{{"seconds": {seconds:.3f}}}')


if __name__ == "__main__":
    main()
