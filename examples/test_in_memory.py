"""Tests of the other examples, in memory and with a clock that the test moves.

pip install pytest pytest-timeout, then pytest examples.
"""

from __future__ import annotations

import importlib
import warnings
from datetime import timedelta

import pytest

from delaylevel import WrapWarning
from delaylevel.testing import MemoryPulsar
from examples.schedule_and_cancel import Reminders
from examples.wrap_a_producer import remind


def arrived(memory_pulsar: MemoryPulsar, topic: str) -> list[bytes]:
    return [message.data for message in memory_pulsar.delivered(topic)]


def test_a_wrapped_producer_delays_messages(memory_pulsar: MemoryPulsar) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WrapWarning)
        remind(memory_pulsar.client(), "order-17")
    memory_pulsar.advance(timedelta(days=2, hours=23))
    assert arrived(memory_pulsar, "orders") == [b"received order-17"]
    memory_pulsar.advance(timedelta(hours=1))
    assert arrived(memory_pulsar, "orders") == [b"received order-17", b"pay order-17"]


def test_a_reminder_is_taken_back_or_comes_later(memory_pulsar: MemoryPulsar) -> None:
    reminders = Reminders(memory_pulsar.client())
    reminders.schedule("order-17", timedelta(days=3))
    reminders.schedule("order-18", timedelta(days=3))
    memory_pulsar.advance(timedelta(days=1))
    assert reminders.paid("order-17") == "accepted"
    reminders.later("order-18", timedelta(days=4))
    memory_pulsar.advance(timedelta(days=3, hours=23))
    assert arrived(memory_pulsar, "bills") == []
    memory_pulsar.advance(timedelta(hours=1))
    assert arrived(memory_pulsar, "bills") == [b"pay order-18"]


def test_an_order_is_charged_when_the_bank_answers_again(
    memory_pulsar: MemoryPulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = importlib.import_module("examples.listener_with_retries")
    memory_pulsar.listen(shop.app)
    charge = shop.bank.charge
    failures = iter([ConnectionError, ConnectionError])

    def answer(order: str) -> None:
        for failure in failures:
            raise failure("the bank does not answer")
        charge(order)

    monkeypatch.setattr(shop.bank, "charge", answer)
    producer = memory_pulsar.client().create_producer("orders")
    producer.send(b"order-17")
    producer.send(b"")
    memory_pulsar.advance(timedelta(seconds=20))
    assert shop.bank.charged == []
    memory_pulsar.advance(timedelta(minutes=6))
    assert shop.bank.charged == ["order-17"]
    (rejected,) = memory_pulsar.delivered("orders-billing-DLQ")
    assert "without contents" in rejected.properties["delaylevel.reason"]
