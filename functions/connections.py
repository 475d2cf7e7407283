"""A connection of its own for each business topic that the Function writes to.

Where a topic is fenced, as it is while it is deleted by force, the broker refuses a send, and the
C++ client then ends the *whole* connection and sends anew what was on its way on it: to every
topic, stored or not. So one target's end must not share a connection with the others, nor with
the level topics.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from delaylevel.cluster.failures import error_name

from .publisher import Starter, in_thread

log = logging.getLogger(__name__)

# Each has some threads of its own. More targets than that share them in turn.
MOST_CLIENTS = 16


class TargetClients:
    """The clients by which business topics are written.

    Args:
        make: makes a client of the same cluster.
        most: how many are made at the most.
        start: runs the closing.
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
        """Return the client for a target, always the same one; safe in every thread."""
        with self._lock:
            if target not in self._by_target:
                turn = len(self._by_target) % self._most
                if turn == len(self._clients):
                    self._clients.append(self._make())
                self._by_target[target] = self._clients[turn]
            return self._by_target[target]

    def close(self) -> None:
        """Close them; another may be made afterwards."""
        with self._lock:
            clients, self._clients = self._clients, []
            self._by_target.clear()
        for client in clients:
            self._start(partial(_close, client))


def _close(client: Any) -> None:
    try:
        client.close()
    except Exception as error:  # what it had not confirmed comes again anyway
        log.debug("closing a client: %s", error_name(error))
