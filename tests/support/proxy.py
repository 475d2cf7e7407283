"""A TCP proxy in front of a broker, for tests of connections that break or hang."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit


class Proxy:
    """A TCP proxy on a port of its own; ``find_port`` tells the other one at each connection."""

    def __init__(
        self, host: str, port: int = 0, *, find_port: Callable[[], int] | None = None
    ) -> None:
        self._host = host
        self._find_port = find_port or (lambda: port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self._flows = threading.Event()
        self._flows.set()
        self._answers = threading.Event()
        self._answers.set()
        self._away = False
        self._delay_s = 0.0
        self._lock = threading.Lock()
        self._links: set[tuple[socket.socket, socket.socket]] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    @classmethod
    def before(cls, url: str) -> Proxy:
        address = urlsplit(url)
        return cls(str(address.hostname), address.port or 0)

    def cut(self) -> None:
        """Close all connections and refuse new ones."""
        self._away = True
        self._cut(self._present())

    def cut_some(self, chosen: random.Random, share: float) -> int:
        """Close a share of the connections; return their number."""
        links = [link for link in self._present() if chosen.random() < share]
        self._cut(links)
        return len(links)

    def hold(self) -> None:
        """Keep connections, but pass nothing on."""
        self._flows.clear()

    def hold_answers(self) -> None:
        """Pass on what the client sends, but not the broker's answers."""
        self._answers.clear()

    def slow(self, delay_s: float) -> None:
        """Wait before each piece of data is passed on, in s; 0 for no more waiting."""
        self._delay_s = delay_s

    def restore(self) -> None:
        """Pass everything on again."""
        self._away = False
        self._delay_s = 0.0
        self._flows.set()
        self._answers.set()

    def close(self) -> None:
        # The thread that accepts is not woken up by close() alone.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._flows.set()
        self._answers.set()
        self.cut()

    def _present(self) -> list[tuple[socket.socket, socket.socket]]:
        with self._lock:
            return list(self._links)

    @staticmethod
    def _cut(links: list[tuple[socket.socket, socket.socket]]) -> None:
        for each in (end for link in links for end in link):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._away:
                    raise OSError
                far = socket.create_connection((self._host, self._find_port()))
            except OSError:
                near.close()  # as if nobody listened
                continue
            with self._lock:
                self._links.add((near, far))
            threading.Thread(target=self._connect, args=(near, far), daemon=True).start()

    def _connect(self, near: socket.socket, far: socket.socket) -> None:
        """Pass on what each end of a connection sends, until both have ended."""
        answers = threading.Thread(target=self._pump, args=(far, near, self._answers), daemon=True)
        answers.start()
        self._pump(near, far, self._flows)
        answers.join()
        with self._lock:
            self._links.discard((near, far))
        near.close()
        far.close()

    def _pump(self, source: socket.socket, sink: socket.socket, held: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                held.wait()
                if self._delay_s:
                    time.sleep(self._delay_s)
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
