"""NATS JetStream as a peer: a private server, and message schedules with a due time.

Each delayed message is a schedule: a stored message with the headers ``Nats-Schedule: @at <time>``
and ``Nats-Schedule-Target``, with a subject of its own, because a stream keeps one schedule for
each subject. At the due time the server stores its body once more, under the target subject. The
streams use file storage and one replica, and every stored message is acknowledged.

The client of NATS for Python sets up streams and consumers. Messages are written to the socket and
read from it without that client, as far as nothing else is said, which is several times as fast.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from arrivals import STAMP, complete, stamped, summary, wait

from delaylevel.cluster.connection.local_brokers import DIRECTORIES

MISSING = "NATS is left out: its server and client are not installed (pip install -e '.[bench]')"
#: Version of the server that `make compare` builds with Go, which is preferred.
GO_VERSION = "v2.15.2"
# The number of messages without an answer, and the number that are written at once.
_IN_FLIGHT, _BLOCK = 5000, 250


def server_path() -> str | None:
    """Return the path of the NATS server; None if it or its client is not installed."""
    found = importlib.util.find_spec("nats")
    if found is None or found.origin is None:
        return None
    if built_path().is_file():
        return str(built_path())
    near = Path(found.origin).parents[1] / "bin"  # with `pip install --target`
    folders = (sysconfig.get_path("scripts"), str(near), os.environ.get("PATH", ""))
    return shutil.which("nats-server", path=os.pathsep.join(folders))


def built_path() -> Path:
    """Return the path of the server that was built with Go, if it was."""
    folder = Path(DIRECTORIES.user_cache_dir) / "peers" / f"nats-server-{GO_VERSION}"
    return folder / "nats-server"


class NatsServer:
    """Process of a NATS server with its own directory, on a free port of this machine.

    Attributes:
        port: the port.
        pid: process ID.
    """

    def __init__(self, path: str, directory: Path) -> None:
        self._path, self._directory = path, directory
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._start()

    @property
    def pid(self) -> int:
        """Process ID."""
        return self._process.pid

    def restart(self) -> float:
        """Kill the server (-9), start it again; return the seconds until its streams answer."""
        streams = self.manage(lambda js: js.streams_info())
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        began = time.monotonic()
        self._start()
        wait(lambda: len(self.manage(lambda js: js.streams_info())) == len(streams), 120)
        return time.monotonic() - began

    def stop(self) -> None:
        """Stop the server."""
        self._process.terminate()
        self._process.wait()

    def manage(self, request: Callable[[Any], Awaitable[Any]]) -> Any:
        """Call a function with a JetStream context of the client, and return its result."""
        import nats

        async def run() -> Any:
            connection = await nats.connect(f"nats://127.0.0.1:{self.port}")
            try:
                return await request(connection.jetstream())
            finally:
                await connection.close()

        return asyncio.run(run())

    def add_stream(self) -> str:
        """Create a stream with message schedules; return its name.

        Its schedules have the subjects ``<name>.at.<number>``, its due messages ``<name>.due``.
        """
        from nats.js.api import StorageType, StreamConfig

        name = f"orders-{uuid.uuid4().hex[:6]}"
        self.manage(
            lambda js: js.add_stream(
                StreamConfig(
                    name=name,
                    subjects=[f"{name}.at.*", f"{name}.due"],
                    storage=StorageType.FILE,
                    num_replicas=1,
                    allow_msg_schedules=True,
                )
            )
        )
        return name

    def _start(self) -> None:
        options = ["-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self._directory)]
        with (self._directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen([self._path, *options], stdout=log, stderr=log)
        wait(self._answers, 30)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@contextmanager
def private_nats() -> Iterator[NatsServer | None]:
    """Start a NATS server with its own data; stop it and delete the data at the end.

    Yields:
        The server; None if it is not installed.
    """
    path = server_path()
    if path is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="delaylevel-bench-nats-") as directory:
        server = NatsServer(path, Path(directory))
        try:
            yield server
        finally:
            server.stop()


class _Connection:
    """Connection that writes and reads the text protocol of NATS.

    Args:
        port: port of the server.
        limit_s: longest time to wait for a message, in seconds.
    """

    def __init__(self, port: int, limit_s: float) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), limit_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = self._socket.makefile("rb", buffering=1 << 20)
        self._reader.readline()  # INFO
        options = {"verbose": False, "pedantic": False, "headers": True}
        self.write(f"CONNECT {json.dumps(options)}\r\n".encode())

    def write(self, data: bytes) -> None:
        self._socket.sendall(data)

    def next(self) -> tuple[list[bytes], bytes]:
        """Return the words of the next message's control line, and its headers and payload.

        Raises:
            TimeoutError: none came within the limit.
        """
        while True:
            line = self._reader.readline()
            if line.startswith((b"MSG", b"HMSG")):
                words = line.split()
                return words, self._reader.read(int(words[-1]) + 2)[:-2]
            if line.startswith(b"PING"):
                self.write(b"PONG\r\n")
            elif line.startswith(b"-ERR") or not line:
                raise ConnectionError(f"the NATS server ended the connection: {line.decode()!r}")

    def close(self) -> None:
        self._reader.close()
        self._socket.close()


def publish(port: int, stream: str, dues_ms: Sequence[int | None]) -> float:
    """Publish messages that are due at the given times; return messages per second.

    The rate is from the first message to the answer to the last one.

    Args:
        port: port of the server.
        stream: name of a stream, for the subjects.
        dues_ms: due times in ms since the epoch, None for a message without delay.

    Raises:
        RuntimeError: the server refused a message.
    """
    connection = _Connection(port, 60)
    inbox = f"_INBOX.{uuid.uuid4().hex}"
    connection.write(f"SUB {inbox} 1\r\n".encode())
    times = {due: rfc3339(due) for due in set(dues_ms) if due is not None}
    unanswered = 0

    def take_answers(allowed: int) -> None:
        nonlocal unanswered
        while unanswered > allowed:
            _, answer = connection.next()
            if b'"error"' in answer:
                raise RuntimeError(f"the NATS server refused a message: {answer.decode()}")
            unanswered -= 1

    began = time.perf_counter()
    block: list[bytes] = []
    for number, due_ms in enumerate(dues_ms):
        body = stamped(number, due_ms or 0)
        if due_ms is None:
            block.append(f"PUB {stream}.due {inbox} {len(body)}\r\n".encode() + body + b"\r\n")
        else:
            headers = (
                f"NATS/1.0\r\nNats-Schedule: @at {times[due_ms]}\r\n"
                f"Nats-Schedule-Target: {stream}.due\r\n\r\n"
            )
            size = len(headers)
            command = f"HPUB {stream}.at.{number} {inbox} {size} {size + len(body)}\r\n{headers}"
            block.append(command.encode() + body + b"\r\n")
        if len(block) == _BLOCK:
            connection.write(b"".join(block))
            unanswered += len(block)
            block.clear()
            take_answers(_IN_FLIGHT - _BLOCK)
    connection.write(b"".join(block))
    unanswered += len(block)
    take_answers(0)
    rate = len(dues_ms) / (time.perf_counter() - began)
    connection.close()
    return rate


def publish_with_client(server: NatsServer, stream: str, dues_ms: Sequence[int]) -> float:
    """Publish as :func:`publish` does, with ``publish_async`` of the client of NATS."""

    async def run(js: Any) -> float:
        began = time.perf_counter()
        answers = []
        for number, due_ms in enumerate(dues_ms):
            headers = {
                "Nats-Schedule": f"@at {rfc3339(due_ms)}",
                "Nats-Schedule-Target": f"{stream}.due",
            }
            answers.append(
                await js.publish_async(
                    f"{stream}.at.{number}", stamped(number, due_ms), headers=headers
                )
            )
        await asyncio.gather(*answers)
        return len(dues_ms) / (time.perf_counter() - began)

    return float(server.manage(run))


def consume(port: int, stream: str, count: int, keys: int, limit_s: float, answer: Any) -> None:
    """Receive ``count`` due messages; put a summary of their arrivals into a queue.

    A durable consumer pushes the messages, and every 1,000th one acknowledges those before it.

    Args:
        port: port of the server.
        stream: name of the stream.
        count: number of messages to wait for.
        keys: number of different keys, as for :func:`~arrivals.summary`.
        limit_s: longest time to wait, in seconds.
        answer: queue for "ready", and then for the summary.
    """
    connection = _Connection(port, limit_s)
    inbox = f"_INBOX.{uuid.uuid4().hex}"
    connection.write(f"SUB {inbox} 1\r\nSUB {inbox}.made 2\r\n".encode())
    config = {
        "durable_name": "bench",
        "filter_subject": f"{stream}.due",
        "deliver_subject": inbox,
        "deliver_policy": "all",
        "ack_policy": "all",
        "ack_wait": 60_000_000_000,
        "max_ack_pending": 20_000,
    }
    body = json.dumps({"stream_name": stream, "config": config})
    api = f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.bench"
    connection.write(f"PUB {api} {inbox}.made {len(body)}\r\n{body}\r\n".encode())
    _, made = connection.next()
    if b'"error"' in made:
        raise RuntimeError(f"the NATS server refused the consumer: {made.decode()}")
    answer.put("ready")
    stamps: list[bytes] = []
    times: list[float] = []
    deadline = time.monotonic() + limit_s
    while not complete(stamps, count) and time.monotonic() < deadline:
        try:
            words, content = connection.next()
        except TimeoutError:
            break
        times.append(time.time())
        start = int(words[-2])  # the length of the headers
        stamps.append(content[start : start + STAMP])
        if len(stamps) % 1000 == 0:
            connection.write(b"PUB %b 4\r\n+ACK\r\n" % words[3])
    answer.put(summary(stamps, times, count, keys))
    connection.close()


def rfc3339(due_ms: int) -> str:
    """Return a time as message schedules need it."""
    due = datetime.fromtimestamp(due_ms / 1000, timezone.utc)
    return due.isoformat(timespec="milliseconds").replace("+00:00", "Z")
