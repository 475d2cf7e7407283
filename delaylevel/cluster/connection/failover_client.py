"""A Pulsar client for services that goes on with the other brokers while one of them hangs.

The client asks the hosts of its address in turn, and needs two answers for each producer, reader or
consumer that it opens. If one of two hosts accepts connections and never answers (its process is
suspended, or its machine has no memory left), one of the two requests goes there. So every opening
fails with ConnectError, as long as that host hangs. Seen with pulsar-client 3.13.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any
from urllib.parse import urlsplit

import pulsar

from delaylevel.cluster.failures import close_quietly
from delaylevel.cluster.threads import in_background, in_parallel

log = logging.getLogger(__name__)

_ANSWER_S = 3.0
# Former clients keep their producers and consumers until their owners open other ones.
_MOST_CLIENTS = 8
# A command of the protocol, CONNECT without credentials: any answer shows that the broker is alive.
_COMMAND = b"\x08\x02\x12\x0e\x0a\x0adelaylevel\x20\x13"
_FRAME = (len(_COMMAND) + 4).to_bytes(4, "big") + len(_COMMAND).to_bytes(4, "big") + _COMMAND


class FailoverClient:
    """The part of ``pulsar.Client`` that movers and dispatchers use; thread-safe."""

    def __init__(self, open_client: Callable[[str], Any], service_url: str) -> None:
        self._open_client = open_client
        self._scheme, _, rest = service_url.partition("://")
        self._hosts = tuple(host.strip() for host in rest.split("/")[0].split(","))
        self._lock = threading.Lock()
        self._present = self._hosts
        self._clients = [open_client(service_url)]

    def _call(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        client = self._clients[-1]
        try:
            return getattr(client, operation)(*args, **kwargs)
        except (pulsar.ConnectError, pulsar.Timeout):
            # Perhaps a host hangs: another client, of the hosts that answer, serves from then on.
            if not self._replace(client):
                raise
        return getattr(self._clients[-1], operation)(*args, **kwargs)

    # With the arguments and errors of `pulsar.Client`.
    create_producer = partialmethod(_call, "create_producer")
    create_reader = partialmethod(_call, "create_reader")
    subscribe = partialmethod(_call, "subscribe")
    get_topic_partitions = partialmethod(_call, "get_topic_partitions")

    def close(self) -> None:
        """Close everything that was opened."""
        with self._lock:
            clients, self._clients = self._clients, self._clients[-1:]
            self._hosts = ()  # what fails from now on opens no other client
        for client in clients:
            close_quietly(client, "client")

    def _replace(self, failed: Any) -> bool:
        """Open a client for the hosts that answer; return False if that is no change."""
        with self._lock:
            if self._clients[-1] is not failed:
                return True  # another thread has done it
            ask = partial(host_answers, secure=self._scheme == "pulsar+ssl")
            found = in_parallel(ask, self._hosts)
            present = tuple(
                host for host, answers in zip(self._hosts, found, strict=True) if answers
            )
            if not present or present == self._present:
                return False
            away = ", ".join(host for host in self._hosts if host not in present)
            log.warning("hosts of the cluster that do not answer: %s", away or "none")
            self._present = present
            self._clients.append(self._open_client(f"{self._scheme}://{','.join(present)}"))
            if len(self._clients) > _MOST_CLIENTS:
                in_background(partial(close_quietly, self._clients.pop(0), "client"))
        return True


def host_answers(host: str, secure: bool) -> bool:
    """Return True if a broker answers at ``host:port``; a refusal is an answer."""
    try:
        parts = urlsplit(f"//{host}")
        address = parts.hostname or "", parts.port or (6651 if secure else 6650)
        with socket.create_connection(address, _ANSWER_S) as connection:
            connection.settimeout(_ANSWER_S)
            if secure:
                context = ssl.create_default_context()
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                with contextlib.suppress(ssl.SSLError), context.wrap_socket(connection):
                    pass
                return True
            connection.sendall(_FRAME)
            return bool(connection.recv(1))
    except (OSError, ValueError):
        return False
