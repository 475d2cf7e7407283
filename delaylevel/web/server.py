"""An HTTP server that a thread of this process runs, with limits on everything a client can send.

One thread reads all requests and writes all answers without blocking, so that a slow client costs a
buffer and no thread. A few other threads build the answers; each probe has one of its own.

Whoever can reach the port can open connections. Beyond a number of them, each new one takes the
place of the oldest one that is not being answered. So a probe, which sends its request at once,
gets through however many clients hold a connection. The server is our own because others stop
accepting connections instead.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import NamedTuple, TypeAlias
from urllib.parse import unquote

from delaylevel.errors import ConfigError

log = logging.getLogger(__name__)

#: Number of threads that build answers, except those to probes.
THREADS = 8
#: Number of open connections. A new one takes the place of the oldest.
CONNECTIONS = 64
#: Limits of a request, in bytes.
HEADER_BYTES = 16 << 10
BODY_BYTES = 4 << 10
#: Time in which a request must be complete, and in which its answer must be read, in s.
REQUEST_S = 10.0
ANSWER_S = 60.0
# Connections that wait until the thread accepts them.
_QUEUED_CONNECTIONS = 1024
# What a refused client still sends is read for a moment, because the operating system would drop
# the answer otherwise.
_LINGER_S, _LINGER_BYTES = 2.0, 1 << 20
_NO_ROOM_S = 0.1
_VERSIONS = ("HTTP/1.1", "HTTP/1.0")


class Request(NamedTuple):
    """A request: the path is decoded, the query is not; the names of headers are in lower case."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes = b""
    client: str = ""


class Response(NamedTuple):
    """An answer."""

    status: int
    body: bytes
    headers: Sequence[tuple[str, str]] = ()


Application: TypeAlias = Callable[[Request], Response]


class HttpServer:
    """A server of one application: it answers until it is left, and then ends what is in work.

    No other answers delay those to the paths of probes. Port 0 means any free one.
    """

    def __init__(
        self, application: Application, address: str, port: int, probes: Collection[str]
    ) -> None:
        self._application = application
        self._listening = _listen(address, port)
        self.port: int = self._listening.getsockname()[1]
        # The connections, oldest first; the value is True while the answer is built.
        self._connections: dict[asyncio.Task[None], bool] = {}
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        # Not one pool for all probes: that of readiness may wait for the broker's statistics, and a
        # process whose liveness is not answered is killed.
        self._probe_threads = {path: ThreadPoolExecutor(1, "http-probe") for path in probes}
        self._threads = ThreadPoolExecutor(THREADS, "http-answer")
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def __enter__(self) -> HttpServer:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._listening.close()
        self._loop.close()
        for threads in (self._threads, *self._probe_threads.values()):
            threads.shutdown()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        accepting = self._loop.create_task(self._accept())
        await self._stop.wait()
        ended = [accepting, *self._connections]
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)

    async def _accept(self) -> None:
        """Accept one connection after the other, and end the oldest one if there are too many."""
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listening)
            except OSError as error:  # the process has too many open files, for example
                log.debug("a connection was not accepted: %s", error)
                self._end_oldest()
                await asyncio.sleep(_NO_ROOM_S)
                continue
            if len(self._connections) >= CONNECTIONS:
                self._end_oldest()
            task = self._loop.create_task(self._converse(connection))
            self._connections[task] = False
            task.add_done_callback(lambda task: self._connections.pop(task, None))
            # Accepting does not wait while connections are queued: let the others go on.
            await asyncio.sleep(0)

    def _end_oldest(self) -> None:
        waiting = (task for task, answering in self._connections.items() if not answering)
        oldest = next(waiting, None) or next(iter(self._connections), None)
        if oldest is not None:
            oldest.cancel()
            del self._connections[oldest]

    def _mark(self, *, answering: bool) -> None:
        """Mark the connection of this task: while it is answered, it ends after all others."""
        task = asyncio.current_task()
        assert task is not None
        if task in self._connections:
            self._connections[task] = answering

    async def _converse(self, connection: socket.socket) -> None:
        """Read one request and answer it."""
        try:
            connection.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=connection, limit=HEADER_BYTES)
        except BaseException:
            connection.close()
            raise
        writer.transport.set_write_buffer_limits(0)  # drain() waits for all of an answer
        try:
            answer = await asyncio.wait_for(_read(reader), REQUEST_S)
            head_only = False
            if isinstance(answer, Request):
                head_only = answer.method == "HEAD"
                self._mark(answering=True)
                client = str(writer.get_extra_info("peername", ("",))[0])
                answer = await self._answer(answer._replace(client=client))
            writer.write(_encoded(answer, head_only))
            await asyncio.wait_for(writer.drain(), ANSWER_S)
            self._mark(answering=False)
            writer.write_eof()
            await asyncio.wait_for(_discard(reader), _LINGER_S)
        except (OSError, EOFError, asyncio.TimeoutError):
            pass  # the client is gone, or too slow
        finally:
            writer.transport.abort()

    async def _answer(self, request: Request) -> Response:
        threads = self._probe_threads.get(request.path, self._threads)
        try:
            return await self._loop.run_in_executor(threads, self._application, request)
        except Exception:
            log.exception("the answer to an HTTP request failed")
            return _refusal(500, "the answer failed; the log of this process has why")


async def _read(reader: asyncio.StreamReader) -> Request | Response:
    """Return the next request, or the refusal of what is none."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return _refusal(431, f"a request has at most {HEADER_BYTES} bytes")
    request = _parsed(head.decode("latin-1"))
    if isinstance(request, Request) and request.method == "POST":
        length = int(request.headers.get("content-length", "0"))
        return request._replace(body=await reader.readexactly(length))
    return request


def _parsed(head: str) -> Request | Response:
    """Return the request of a head, or its refusal."""
    line, *fields = head.split("\r\n")[:-2]
    parts = line.split(" ")
    if len(parts) != 3 or parts[2] not in _VERSIONS:
        return _refusal(400, "this is no HTTP request")
    headers: dict[str, str] = {}
    for field in fields:
        name, colon, value = field.partition(":")
        if not colon or not name or name.strip() != name:
            return _refusal(400, "a header cannot be read")
        headers[name.lower()] = value.strip()
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not (length.isascii() and length.isdigit()):
        return _refusal(400, "the length of the body cannot be read")
    if len(length) > 9 or int(length) > BODY_BYTES:
        return _refusal(413, f"a body has at most {BODY_BYTES} bytes")
    path, _, query = parts[1].partition("?")
    return Request(parts[0], unquote(path, errors="replace"), query, headers)


def _refusal(status: int, text: str) -> Response:
    return Response(status, f"{text}\n".encode(), (("Content-Type", "text/plain; charset=utf-8"),))


def _encoded(answer: Response, head_only: bool) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}",
        *(f"{name}: {value}" for name, value in answer.headers),
        f"Content-Length: {len(answer.body)}",
        "Connection: close",
        "",
        "",
    ]
    head = "\r\n".join(lines).encode("latin-1", "replace")
    return head if head_only else head + answer.body


async def _discard(reader: asyncio.StreamReader) -> None:
    """Read what a client still sends, up to a limit."""
    left = _LINGER_BYTES
    while left > 0 and (data := await reader.read(65_536)):
        left -= len(data)


def _listen(address: str, port: int) -> socket.socket:
    """Return a listening socket."""
    where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    listening = None
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(target)
        listening.listen(_QUEUED_CONNECTIONS)
        listening.setblocking(False)
    except (OSError, UnicodeError) as error:
        if listening is not None:
            listening.close()
        raise ConfigError(
            f"the HTTP service cannot listen at {where}: {getattr(error, 'strerror', '') or error}."
            " Choose another --metrics-port (0 takes any free one) or --metrics-address"
        ) from error
    return listening


def is_loopback(address: str) -> bool:
    """Return True if only this machine can reach an address."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
