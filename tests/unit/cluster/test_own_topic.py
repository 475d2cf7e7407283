"""Tests of storing messages in a topic of our own, with a slow client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.own_topic import OwnTopic
from delaylevel.cluster.publisher import PRODUCER_SETTINGS
from delaylevel.dispatcher.record import WindowMessage
from delaylevel.errors import BrokerError

MESSAGE = WindowMessage("k", 1, 10, "t", "", 0, "id", "key", "", 0, {}, b"value")


class Core:
    """A fake core of a producer. Its flush may return before the callbacks, as the real one may."""

    def __init__(self, results: list[Any]) -> None:
        self._results = results
        self._callbacks: list[Any] = []
        self.threads: list[threading.Thread] = []

    def send_async(self, built: Any, callback: Any) -> None:
        self._callbacks.append(callback)

    def flush(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        self.threads.append(threading.Timer(0.05, self._call_back, [callbacks]))
        self.threads[-1].start()

    def _call_back(self, callbacks: list[Any]) -> None:
        for callback, result in zip(callbacks, self._results, strict=True):
            callback(result, None)

    def close(self) -> None:
        pass


class Client:
    """A fake client with one producer."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def create_producer(self, topic: str, **settings: Any) -> pulsar.Producer:
        producer = pulsar.Producer.__new__(pulsar.Producer)
        producer._producer = self._core
        return producer


@pytest.fixture
def own(request: pytest.FixtureRequest) -> Iterator[OwnTopic]:
    core = Core(request.param)
    found = OwnTopic(Client(core), "held", PRODUCER_SETTINGS)
    yield found
    found.close()
    for thread in core.threads:
        thread.join()


@pytest.mark.parametrize("own", [[pulsar.Result.Ok] * 3], indirect=True)
def test_store_waits_for_callbacks_that_follow_the_flush(own: OwnTopic) -> None:
    for _ in range(2):
        own.store((MESSAGE, {}, until_ms) for until_ms in (None, 20, None))


@pytest.mark.parametrize(
    "own", [[pulsar.Result.Ok, pulsar.Result.TopicTerminated, pulsar.Result.Ok]], indirect=True
)
def test_a_refused_message_is_an_error(own: OwnTopic) -> None:
    with pytest.raises(BrokerError, match=r"held did not confirm \(TopicTerminated\)"):
        own.store((MESSAGE, {}, until_ms) for until_ms in (None, 20, None))
