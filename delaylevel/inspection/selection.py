"""Selections of pending messages, read in parallel and without cancelled ones; without Arrow."""

from __future__ import annotations

import atexit
import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

from delaylevel.cluster.threads import in_thread
from delaylevel.model.envelope import ID, TARGET
from delaylevel.model.level_topic import Role
from delaylevel.model.message import properties_of
from delaylevel.topics.scan import ALWAYS, PendingRange, Window

from .snapshot import PendingSnapshot, is_cancellation, name_of, observe, own_topic


@dataclass(frozen=True)
class Selection:
    """Conditions that select pending messages; a message must meet all of them.

    Attributes:
        due: the window of due times; if it has a bound, messages without a due time are left out.
        where: an SQL condition on the columns of
            :data:`delaylevel.inspection.rows.SCHEMA`, e.g. ``size > 1000``.
        key: the partition key.
        properties: properties of the application, with their values.
        id: the stable identity.
    """

    due: Window = ALWAYS
    where: str | None = None
    key: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    id: str | None = None


T = TypeVar("T")
S = TypeVar("S")
_THREADS = 4
_QUEUED_RESULTS = 8
_POLL_S = 0.2
# Number of messages between two reports of progress.
CHUNK = 2000

Tell = Callable[[int], None]


def read_in_parallel(
    items: Sequence[S], read: Callable[[S], Iterable[T]]
) -> Generator[T, None, None]:
    """Yield the results of ``read`` in any order; close the generator to end its threads."""
    results: queue.Queue[T | BaseException | None] = queue.Queue(_QUEUED_RESULTS)  # bounds memory
    stop = threading.Event()
    threads: list[threading.Thread] = []
    left = iter(items)  # each thread takes the next one

    def put(result: T | BaseException | None) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                results.put(result, timeout=_POLL_S)
                return

    def work() -> None:
        try:
            for item in left:
                for result in read(item):
                    put(result)
                    if stop.is_set():
                        return
            put(None)
        except BaseException as error:  # raised again in the caller's thread
            put(error)

    # The caller of a generator that is not exhausted may forget it, at the end of the process too.
    atexit.register(stop.set)
    try:
        for _ in range(min(_THREADS, len(items))):
            threads.append(in_thread(work))
        for _ in threads:
            while (result := results.get()) is not None:
                if isinstance(result, BaseException):
                    raise result
                yield result
    finally:
        stop.set()
        atexit.unregister(stop.set)
        for thread in threads:
            if not sys.is_finalizing():
                thread.join()


def without_cancelled(snapshot: PendingSnapshot, tell: Tell) -> PendingSnapshot:
    """Return a snapshot without the messages whose cancellations are in its ranges."""
    if not snapshot.description.cancellable:
        return snapshot

    def read(item: PendingRange) -> Iterator[list[int]]:
        own = own_topic(item.source)
        with closing(snapshot.read(item)) as messages:
            # Nearly all are messages, of which nothing is needed, and whose payloads may be large.
            found = (
                observe(one) if is_cancellation(properties_of(one[0])) else None for one in messages
            )
            while chunk := list(islice(found, CHUNK)):
                tell(len(chunk))
                named = snapshot.cancelling(item.source, list(filter(None, chunk)))
                yield [
                    name_of(
                        one.properties.get(TARGET) or own, one.properties[ID], one.due_ms, one.key
                    )
                    for one in named
                ]

    # Held messages cannot be cancelled.
    ranges = [item for item in snapshot.ranges if item.source.role is not Role.HELD]
    parked = frozenset(name for names in read_in_parallel(ranges, read) for name in names)
    return replace(snapshot, parked=parked)
