"""Live queries to the dispatchers that own the window partitions of a level topic.

A dispatcher announces the address of its HTTP service with its consumers, which the broker's
statistics show. An answer counts only if it comes from the dispatcher with the announced name: on
another machine, 127.0.0.1 is another process.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlencode, urlsplit

import urllib3

from delaylevel.cluster.port import ClientStats, TopicAdmin
from delaylevel.cluster.threads import in_parallel
from delaylevel.errors import BrokerError
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.topics.scan import Window
from delaylevel.topics.status import ADDRESS_PROPERTY, NAME_PROPERTY, window_stats
from delaylevel.web.reports import DISPATCHER, TOKEN_VARIABLE

log = logging.getLogger(__name__)

_TIMEOUT = urllib3.Timeout(connect=1.0, read=10.0)
_POOLS = 8
#: Longest answer that is read, in bytes; it is far above that of a dispatcher.
_MOST_BYTES = 64 << 20
_WILDCARDS = ("0.0.0.0", "::")

#: Ledger, entry, and the index in a batch; 0 without one.
Place: TypeAlias = tuple[int, int, int]


class DispatcherAddress(NamedTuple):
    """A dispatcher that can be asked."""

    name: str
    url: str


class LiveAnswer(NamedTuple):
    """The answer of a dispatcher; mappings are by window partition."""

    named: dict[int, set[Place]]  # what waits there
    read_to: dict[int, Place | None]  # the last place that it has read; None before all
    more: bool  # it does not name all
    cancellations: bool  # it names cancellations, or messages that are cancelled


class LiveDispatchers:
    """The running dispatchers of a level topic."""

    def __init__(
        self, admin: TopicAdmin, description: LevelTopicDescription, token: str | None = None
    ) -> None:
        self._admin = admin
        self._description = description
        self._token = token or os.environ.get(TOKEN_VARIABLE, "").strip() or None
        self.refusals: dict[str, str] = {}  # why some did not answer the last question, by address

    def ask(self, due: Window, most: int) -> dict[int, LiveAnswer]:
        """Ask for at most some messages due in a window; return the answers by partition."""
        try:
            owners = {
                status.partition: address
                for status in window_stats(self._admin, self._description)
                if status.owner is not None and (address := _address(status.owner)) is not None
            }
        except BrokerError as error:
            self.refusals = {"": str(error)}
            return {}
        given = {"from": due.from_ms, "to": due.before_ms}
        bounds = {name: time_ms for name, time_ms in given.items() if time_ms is not None}
        query = urlencode({"topic": self._description.topic, "limit": most, **bounds})
        distinct = sorted(set(owners.values()))
        # Several processes of one command answer at one address. None is asked twice: the window
        # topic has the same messages.
        with urllib3.PoolManager(_POOLS, maxsize=_POOLS, retries=False, timeout=_TIMEOUT) as pool:
            results = in_parallel(lambda each: self._request(pool, each, query), distinct)
        answers: dict[int, LiveAnswer] = {}
        self.refusals = {}
        for address, result in zip(distinct, results, strict=True):
            if isinstance(result, str):
                self.refusals[address.url] = result
                log.debug("live query to %s: %s", address.url, result)
            # A former owner that has not noticed its loss yet answers for a partition, too.
            elif all(owners.get(index) == address for index in result.named):
                answers |= dict.fromkeys(result.named, result)
        return answers

    def _request(
        self, pool: urllib3.PoolManager, address: DispatcherAddress, query: str
    ) -> LiveAnswer | str:
        """Return the answer of one dispatcher, or why there is none."""
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        url = f"{address.url}/pending?{query}&{urlencode({DISPATCHER: address.name})}"
        try:
            answer = pool.request("GET", url, headers=headers, preload_content=False)
            with answer:
                data = answer.read(_MOST_BYTES)
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            return f"it cannot be reached ({type(error).__name__})"
        text = data.decode(errors="replace")
        if answer.status != 200:
            return text.strip()[:500] or f"status {answer.status}"
        try:
            found: dict[str, Any] = json.loads(text)
            if found["dispatcher"] != address.name:
                return f"another process, {str(found['dispatcher'])[:100]}, answers there"
            if found["level_topic"] != self._description.topic:
                return "it answers for another level topic"
            return _read_answer(found)
        except (ValueError, TypeError, LookupError, RecursionError):
            return "its answer cannot be read"


def _read_answer(found: dict[str, Any]) -> LiveAnswer:
    """Return what an answer says; raise ValueError, TypeError or LookupError if it is malformed."""
    named: dict[int, set[Place]] = {index: set() for index in found["partitions"]}
    for _, partition, *place, _ in found["rows"]:
        named[partition].add(_place(place))
    read_to = {index: found["read_to"][str(index)] for index in named}
    places = {index: at and _place(at) for index, at in read_to.items()}
    cancellations = bool(found["cancelled"] or found["cancellations"])
    return LiveAnswer(named, places, bool(found["more"]), cancellations)


def _place(values: Sequence[Any]) -> Place:
    ledger, entry, batch = values
    if not all(type(each) is int and 0 <= each < 1 << 62 for each in values):
        raise ValueError(values)
    return ledger, entry, batch


def _address(owner: ClientStats) -> DispatcherAddress | None:
    """Return where a dispatcher can be reached from here; None if it announces no address."""
    url, name = owner.properties.get(ADDRESS_PROPERTY), owner.properties.get(NAME_PROPERTY)
    if not url or not name:
        return None
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.scheme != "http" or not host or not port:
        return None
    local = host in ("localhost", "::1") or host.startswith("127.")
    if host in _WILDCARDS:
        # It listens on all interfaces: take the one from which it talks to the broker.
        host = owner.address.rpartition(":")[0].strip("[]")
    elif local and f"@{socket.gethostname()}:" not in owner.name:
        return None  # only its own machine reaches it
    if not host:
        return None
    return DispatcherAddress(
        name, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    )
