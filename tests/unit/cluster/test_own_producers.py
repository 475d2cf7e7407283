"""Tests of the producers of our own topics on a scripted client."""

from __future__ import annotations

from collections.abc import Callable

import pulsar

from delaylevel.cluster.own_producers import OwnProducers
from delaylevel.cluster.threads import HostLoop
from delaylevel.model.envelope import DUE, REASON
from delaylevel.model.message import ParkedMessage
from support.fakes import FakeClient

DEAD = "persistent://public/default/orders-delay-level-DLQ-partition-0"
MESSAGE = ParkedMessage(1, 1, -1, 0, "", "", 0, {}, b"large")


def test_dead_letters_that_are_too_large_count_until_a_smaller_form_is_stored() -> None:
    client, jobs = FakeClient(), list[Callable[[], None]]()
    own: OwnProducers[str] = OwnProducers(client, DEAD, HostLoop(jobs.append))
    for name in ("first", "second"):
        own.send(name, DEAD, MESSAGE, {DUE: "1", REASON: "r" * 80}, None)
    assert not list(own.poll())
    client.outcomes[DEAD] = pulsar.Result.MessageTooBig
    jobs.pop()()  # the opening
    assert not list(own.poll())
    own.flush()
    assert not list(own.poll())
    assert own.load == (2, 10)
    client.outcomes.clear()
    jobs.pop()()  # the opening of another producer, for letters that are alone in their batch
    assert [(each.item.item, each.outcome.value) for each in own.poll()] == [
        ("first", "stored"),
        ("second", "stored"),
    ]
    assert own.load == (0, 0)
    assert not jobs
    stored = [sent.properties for producer in client.producers for sent in producer.sent][2:]
    assert stored == [{DUE: "1", REASON: "r" * 60}] * 2
