"""A TCP proxy in front of a broker, for tests of connections that break or hang."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """A TCP proxy on a port of its own.

    Args:
        host, port: the address to which it connects.

    Attributes:
        port: the port on which it listens.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._flows = threading.Event()
        self._flows.set()
        self._answers = threading.Event()
        self._answers.set()
        self._away = False
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close all connections and refuse new ones."""
        self._away = True
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def hold(self) -> None:
        """Keep connections, but pass nothing on."""
        self._flows.clear()

    def hold_answers(self) -> None:
        """Pass on what the client sends, but not the broker's answers."""
        self._answers.clear()

    def restore(self) -> None:
        """Pass everything on again."""
        self._away = False
        self._flows.set()
        self._answers.set()

    def close(self) -> None:
        """Close the port and all connections."""
        self._listener.close()
        self._flows.set()
        self._answers.set()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._away:
                near.close()
                continue
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                held = self._answers if source is far else self._flows
                threading.Thread(target=self._pump, args=(source, sink, held), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, held: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                held.wait()
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
