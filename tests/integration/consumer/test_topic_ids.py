"""Tests of handled IDs in a topic of a real broker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from delaylevel import DelayLevelClient
from delaylevel.cluster.connection.settings import Connection
from delaylevel.consumer import Deduplication, HandledIds, TopicIdStore, handled_ids
from delaylevel.consumer.retry import Verdict
from support.world import QUIET, RealWorld, eventually

Open = Callable[..., HandledIds]


def message(number: object) -> Any:
    return SimpleNamespace(id=f"m-{number}", identity=f"m-{number}")


def save(handled: HandledIds, *numbers: object) -> None:
    """Save IDs without waiting for each, then wait for all."""
    for number in numbers:
        save_one(handled, number, lambda: None)
    assert handled.flush()


def save_one(
    handled: HandledIds, number: object, saved: Callable[[], object] | None = None
) -> None:
    """Save an ID; without a function for it, wait until the broker has confirmed it."""
    each, event = message(number), threading.Event()
    assert handled.begin(each) is Verdict.HANDLE
    handled.save(each, saved or event.set)
    assert saved or event.wait(60)


def known(handled: HandledIds, *numbers: object) -> list[bool]:
    """Return which IDs are those of handled messages."""
    found = []
    for each in map(message, numbers):
        found.append(handled.begin(each) is Verdict.DUPLICATE)
        handled.release(each)
    return found


@pytest.fixture
def opened(world: RealWorld) -> Iterator[Open]:
    """``opened(topic="orders", client=None, **options)``: handled IDs in a topic."""
    made: list[HandledIds] = []

    def make(topic: str = "orders", client: Any = None, **options: Any) -> HandledIds:
        store = options.pop("store", None) or TopicIdStore(timeout_s=20)
        deduplication = Deduplication(store=store, **options)
        handled = deduplication.open(client or world.client(), world.topic(topic), "billing")
        made.append(handled)
        return handled

    yield make
    for handled in made:
        handled.close()


def records(world: RealWorld) -> int:
    """Return the number of records that the durable subscription has not acknowledged."""
    partition = world.name("orders-billing-handled").partition(0)
    return int(world.admin.partition_stats(partition).subscriptions["delaylevel"].backlog_entries)


def test_ids_survive_a_restart_without_admin_access(opened: Open, connection: Connection) -> None:
    with DelayLevelClient(**connection.client_kwargs(), logger=QUIET) as client:
        for start in (0, 1500, 3000):
            handled = opened(client=client)
            assert all(known(handled, *range(start)))
            assert not any(known(handled, *range(start, start + 1500)))
            save(handled, *range(start, start + 1500))
            handled.close()


def test_a_long_log_is_rewritten_and_keeps_every_id(
    opened: Open, world: RealWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handled_ids, "_MOST_RECORDS", 20)
    monkeypatch.setattr(handled_ids, "_MOST_IDS", 64)
    one, other = opened(capacity=400), opened(capacity=400)
    for number in range(150):
        save_one(one if number % 3 else other, number)
    eventually(lambda: records(world) < 60, "the records to be acknowledged")
    # Those that run learn the IDs of each other.
    for handled in (one, other, opened(capacity=400)):
        eventually(lambda handled=handled: all(known(handled, *range(150))), "all IDs")
        assert len(handled) <= 400


def test_a_refusing_topic_lets_messages_be_acknowledged(
    opened: Open,
    world: RealWorld,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handled = opened()
    save(handled, 1)
    name = world.name("orders-billing-handled").partition(0)
    world.admin.terminate(name)
    acknowledged = threading.Event()
    save_one(handled, 2, acknowledged.set)
    assert acknowledged.wait(60)
    assert handled.unsaved == 1
    assert known(handled, 1, 2) == [True, True]
    save_one(handled, 3)  # at once: the topic refused a moment ago
    assert handled.unsaved == 2
    assert not handled.flush(0.1)
    assert "copies of these messages may be handled again after a restart" in caplog.text
    monkeypatch.setattr(handled_ids, "_FLUSH_S", 0.1)  # it refuses them at the end, too
    handled.close()
    assert "2 IDs of handled messages could not be stored" in caplog.text
