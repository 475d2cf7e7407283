"""An HTTP server that a thread of this process runs, with limits on everything a client can send.

One thread of the server reads all requests without blocking, so that a slow client costs a buffer
and no thread. A few other threads build the answers.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from delaylevel.errors import ConfigError, MissingExtraError

Application: TypeAlias = Callable[[dict[str, Any], Any], Iterable[bytes]]

#: Number of threads that build answers.
THREADS = 8
#: Number of open connections, beyond which new ones wait.
CONNECTIONS = 64
#: Limits of a request, in bytes. No endpoint reads a body.
HEADER_BYTES = 16 << 10
BODY_BYTES = 4 << 10
#: Time after which a connection without activity is closed, in s. A request that is not complete
#: at two successive looks is closed as well, however busily its bytes trickle in.
IDLE_S = 10
LOOK_S = 5
_QUEUED_CONNECTIONS = 64
# The buffer of an answer that the client reads slowly. Beyond it, the thread of the answer waits,
# so it is above the largest answer.
_ANSWER_BYTES = 64 << 20


class HttpServer:
    """A server of one WSGI application.

    Args:
        application: the application; its code runs in the server's threads.
        address: address of the interface to listen on.
        port: TCP port; 0 for any free one.

    Attributes:
        port: the port in use.

    Raises:
        MissingExtraError: the HTTP server is not installed.
        ConfigError: the address or the port is not available.
    """

    def __init__(self, application: Application, address: str, port: int) -> None:
        try:
            from waitress.server import create_server
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                "the HTTP service needs waitress: pip install 'delaylevel[metrics]'"
            ) from error
        listening = _listen(address, port)
        self.port: int = listening.getsockname()[1]
        self._connections: dict[int, Any] = {}
        self._incomplete: set[Any] = set()
        self._server = create_server(
            application,
            map=self._connections,
            sockets=[listening],
            threads=THREADS,
            connection_limit=CONNECTIONS,
            channel_timeout=IDLE_S,
            cleanup_interval=LOOK_S,
            max_request_header_size=HEADER_BYTES,
            max_request_body_size=BODY_BYTES,
            outbuf_overflow=_ANSWER_BYTES,
            outbuf_high_watermark=_ANSWER_BYTES,
            asyncore_use_poll=True,  # select() fails in a process with more than 1,024 files
            log_socket_errors=False,
            ident="delaylevel",
        )
        self._close_idle = self._server.maintenance
        self._server.maintenance = self._maintain
        # It would log every request that waits for a thread.
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)
        self._thread = threading.Thread(target=self._server.run, name="http", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Close all connections, and wait for the answers in work."""
        trigger = self._server.trigger
        trigger.pull_trigger(self._close_connections)
        self._thread.join()
        self._server.task_dispatcher.shutdown()
        if not self._server.task_dispatcher.threads:
            trigger.close()

    def _close_connections(self) -> None:
        """Close everything except the trigger, whose file other threads may be writing to.

        The number of its closed file could belong to a connection of another part of the process.
        The loop of the thread ends when it has no connection left.
        """
        from waitress.wasyncore import dispatcher

        for connection in list(self._connections.values()):
            with contextlib.suppress(OSError):
                if connection is self._server:
                    dispatcher.close(connection)  # its own method would close the trigger, too
                elif connection is not self._server.trigger:
                    connection.close()
        self._connections.clear()

    def _maintain(self, now: float) -> None:
        """Close connections that are idle, or whose request is not complete for too long."""
        self._close_idle(now)
        incomplete = {
            (channel, channel.request)
            for channel in self._server.active_channels.values()
            if channel.request is not None
        }
        for channel, _ in incomplete & self._incomplete:
            channel.will_close = True
        self._incomplete = incomplete


def _listen(address: str, port: int) -> socket.socket:
    """Return a listening socket."""
    where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"the HTTP service cannot listen at {where}: there is no address {address!r} on this "
            "machine. Choose another one with --metrics-address"
        ) from error
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(target)
        listening.listen(_QUEUED_CONNECTIONS)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"the HTTP service cannot listen at {where}: {error.strerror or error}. Choose another "
            "port with --metrics-port (0 takes any free one), or another address with "
            "--metrics-address"
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
