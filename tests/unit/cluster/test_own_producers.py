"""Tests of the producers of our own topics on a scripted client."""

from __future__ import annotations

from collections.abc import Callable

import pulsar

from delaylevel.cluster.own_producers import OwnProducers
from delaylevel.model.message import ParkedMessage
from support.fakes import FakeClient

DEAD = "persistent://public/default/orders-delay-level-DLQ-partition-0"


def test_messages_that_are_stored_in_chunks_count_until_they_are_confirmed() -> None:
    client, jobs = FakeClient(), list[Callable[[], None]]()
    own: OwnProducers[str] = OwnProducers(client, DEAD, start=jobs.append)
    message = ParkedMessage(1, 1, -1, 0, "", "", 0, {}, b"large")
    for name in ("first", "second"):
        own.send(name, DEAD, message, {}, None)
    assert not list(own.poll())
    client.outcomes[DEAD] = pulsar.Result.MessageTooBig
    jobs.pop()()  # the opening
    assert not list(own.poll())
    assert own.load == (2, 10)
    client.outcomes.clear()
    (store,) = jobs
    store()
    assert [(each.item, each.outcome.value) for each in own.poll()] == [
        ("first", "stored"),
        ("second", "stored"),
    ]
    assert own.load == (0, 0)
