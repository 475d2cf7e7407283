"""Python's state of the client's threads, on a real broker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import DelayLevelClient, PartitionStrategy
from delaylevel.cluster.client_parts import cores
from delaylevel.cluster.connection.settings import Connection
from delaylevel.producer import client_calls
from support.world import QUIET, eventually

pytestmark = pytest.mark.broker

THREE_DAYS = timedelta(days=3)


class Visits(threading.local):
    """Number of callbacks of the present thread since Python has made its state."""

    number = 0


class Callbacks:
    """Sends messages, and counts the callbacks with one state of the client's thread."""

    def __init__(self) -> None:
        self._visits = Visits()
        self._results: list[Any] = []
        self._counts: list[int] = []
        self.threads: set[int] = set()

    def __call__(self, result: Any, _: Any) -> None:
        self._results.append(result)  # an exception here would end the process
        self.threads.add(threading.get_ident())
        self._visits.number += 1
        self._counts.append(self._visits.number)

    def counts(self, producer: Any, **delay: Any) -> list[int]:
        """Send three messages, and return how many callbacks the state had seen at each."""
        self._counts.clear()
        for _ in range(3):
            producer.send_async(b"", self, **delay)
        producer.flush()  # the last callbacks may come a moment later
        eventually(lambda: len(self._counts) == 3, "three callbacks")
        assert set(map(str, self._results)) == {str(pulsar.Result.Ok)}
        assert threading.get_ident() not in self.threads
        return list(self._counts)


@pytest.fixture
def client(connection: Connection) -> Iterator[DelayLevelClient]:
    client = DelayLevelClient.from_connection(connection, logger=QUIET)
    yield client
    client.close()


@pytest.fixture
def orders(namespace: str) -> str:
    return f"persistent://{namespace}/orders"


def open_wrapper(client: DelayLevelClient, topic: str) -> Any:
    return client.create_producer(
        topic, enable_delay_level_topic=True, partition_strategy=PartitionStrategy()
    )


def test_the_state_lasts_as_long_as_a_level_producer(
    client: DelayLevelClient, orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    callbacks = Callbacks()
    closing: set[int] = set()

    def release_state(producer: Any) -> None:
        closing.add(threading.get_ident())
        cores.release_state(producer)

    monkeypatch.setattr(client_calls, "release_state", release_state)
    plain = client.create_producer(orders)
    assert callbacks.counts(plain) == [1, 1, 1]  # the client's own way
    first, second = open_wrapper(client, orders), open_wrapper(client, orders)
    first.send(b"", deliver_after=THREE_DAYS)
    second.send(b"", deliver_after=THREE_DAYS)
    assert callbacks.counts(first, deliver_after=THREE_DAYS) == [1, 2, 3]
    first.close()
    assert callbacks.counts(second, deliver_after=THREE_DAYS) == [4, 5, 6]
    assert callbacks.counts(plain) == [7, 8, 9]
    second.close()
    # On a busy machine, the calling thread may call back for a closing. Then the state stays.
    released = closing <= callbacks.threads
    assert callbacks.counts(plain) == ([1, 1, 1] if released else [10, 11, 12])
