"""A separate connection for each business topic.

A broker throttles a topic by not reading the connection, which delays everything else on it. If a
topic is fenced, as it is while it is deleted by force, the broker refuses a send. The C++ client
then closes the *whole* connection and resends everything that was in flight on it: to every topic,
stored or not. So a target must not share a connection with other targets or with our own topics.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from delaylevel.cluster.background import Starter, in_thread
from delaylevel.cluster.failures import error_name

log = logging.getLogger(__name__)

# Each client has two threads and about 0.5 MB. More targets than this share the clients in turn.
MOST_CLIENTS = 64


class TargetClients:
    """Clients for business topics.

    Args:
        make: function that returns a new client of the same cluster.
        most: limit of clients.
        start: function that runs the closing.
    """

    def __init__(
        self, make: Callable[[], Any], *, most: int = MOST_CLIENTS, start: Starter = in_thread
    ) -> None:
        self._make = make
        self._most = most
        self._start = start
        self._lock = threading.Lock()
        self._clients: list[Any] = []
        self._by_target: dict[str, Any] = {}

    def of(self, target: str) -> Any:
        """Return the client for a target, always the same one; thread-safe."""
        with self._lock:
            if target not in self._by_target:
                turn = len(self._by_target) % self._most
                if turn == len(self._clients):
                    self._clients.append(self._make())
                self._by_target[target] = self._clients[turn]
            return self._by_target[target]

    def close(self) -> None:
        """Close the clients; a later call of :meth:`of` makes new ones."""
        with self._lock:
            clients, self._clients = self._clients, []
            self._by_target.clear()
        for client in clients:
            self._start(partial(close_anyway, client, "client"))


@contextmanager
def clients_of_targets(
    client: Any, make: Callable[[], Any] | None
) -> Iterator[Callable[[str], Any]]:
    """Yield a function that returns the client for a target, and close these clients at the end.

    Args:
        client: the client for all targets if ``make`` is None; it is not closed here.
        make: function that returns a new client of the same cluster, or None.
    """
    if make is None:
        yield lambda _: client
        return
    clients = TargetClients(make)
    try:
        yield clients.of
    finally:
        clients.close()


def close_anyway(resource: Any, kind: str) -> None:
    """Close a client or consumer; ignore a failure."""
    try:
        resource.close()
    except Exception as error:  # the worker may be closing it too
        log.debug("closing a %s: %s", kind, error_name(error))
