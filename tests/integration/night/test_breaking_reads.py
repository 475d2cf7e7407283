"""Tests of reads whose connection breaks, or that end too early, on a broker behind a proxy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.locks import PartitionLock
from delaylevel.cluster.reader import read_range
from delaylevel.cluster.threads import in_thread
from delaylevel.dispatcher.assignment import window_sources
from delaylevel.dispatcher.journal import topic as journal_topic
from delaylevel.dispatcher.journal.records import LowWatermark
from delaylevel.dispatcher.journal.topic import Journal
from delaylevel.errors import BrokerError
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.position import EARLIEST, Position
from support.dispatch_world import LEVELS
from support.proxy import Proxy
from support.world import QUIET, MakeLevelTopic, RealWorld

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


def test_a_journal_that_was_not_read_to_its_end_is_an_error(
    world: RealWorld, level_topic: MakeLevelTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    description = level_topic(LEVELS, final_window=FinalWindow.TRACKER)
    window, source = window_sources(description, 0)
    with contextlib.ExitStack() as opened:
        lock = PartitionLock(world.plain_client, world.admin, [window, source], "test")
        opened.callback(lock.close)
        journal = Journal(world.plain_client, world.admin, source, lock)
        opened.callback(journal.close)
        assert not list(journal.read())
        journal.claim()
        for number in range(5):
            journal.append(LowWatermark(number))
        assert len(list(journal.read())) == 5

        def read_some(*arguments: Any) -> Any:
            return islice(read_range(*arguments), 3)

        monkeypatch.setattr(journal_topic, "read_range", read_some)
        with pytest.raises(BrokerError, match="was delivered only up to"):
            list(journal.read())
