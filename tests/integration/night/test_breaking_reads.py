"""Tests of reads whose connection breaks, or that end too early, on a broker behind a proxy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.reader import read_range
from delaylevel.cluster.threads import in_thread
from delaylevel.model.position import EARLIEST, Position
from support.proxy import Proxy
from support.world import QUIET, RealWorld

MESSAGES = 20


@pytest.fixture
def through_proxy(proxy: Proxy) -> Iterator[pulsar.Client]:
    client = pulsar.Client(f"pulsar://127.0.0.1:{proxy.port}", logger=QUIET)
    yield client
    client.close()


def test_a_read_goes_on_if_the_connection_breaks_while_the_client_asks_for_more(
    world: RealWorld,
    proxy: Proxy,
    through_proxy: pulsar.Client,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = f"persistent://{namespace}/log"
    producer = world.plain_client.create_producer(topic)
    first = producer.send(b"0")
    ask = pulsar.Reader.has_message_available
    asked: list[bool] = []

    def break_connection() -> None:
        time.sleep(0.1)
        proxy.cut()
        proxy.restore()

    def ask_without_answer(reader: Any) -> bool:
        if not asked:
            proxy.hold_answers()
            for number in range(1, MESSAGES):
                producer.send(b"%d" % number)
            in_thread(break_connection)
        asked.append(ask(reader))
        return asked[-1]

    monkeypatch.setattr(pulsar.Reader, "has_message_available", ask_without_answer)
    end = Position(first.ledger_id(), first.entry_id() + MESSAGES)
    found = [int(item.value or b"") for item in read_range(through_proxy, topic, EARLIEST, end)]
    assert found == list(range(MESSAGES))
    assert asked[:1] == [False]  # the client says so, and there are more messages
    producer.close()
