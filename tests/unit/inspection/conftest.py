"""Pending messages in memory, in every part of a level topic, and what is known about each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from delaylevel.inspection import Inspector
from delaylevel.testing import MemoryPulsar
from support.fakes import days_and_hours

MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000


@dataclass(frozen=True)
class Sent:
    """A message as it was sent."""

    due_ms: int
    size: int
    key: str
    amount: str | None
    body: bytes


class Pending:
    """A level topic over DAY and HOUR, with messages due from seconds to weeks from now."""

    def __init__(self, memory: MemoryPulsar, messages: int = 300, **options: Any) -> None:
        self.memory = memory
        self.sent: list[Sent] = []
        choose = random.Random(5)
        client = memory.client()
        client.subscribe("orders", "app")
        options = {"final_window": "broker", "partition_strategy": days_and_hours(30), **options}
        with client.create_producer("orders", enable_delay_level_topic=True, **options) as made:
            for number in range(messages):
                longest = (HOUR, DAY, 10 * DAY, 25 * DAY)[number % 4]
                body = b"x" * choose.randrange(2000)
                due_ms = memory.clock.now_ms() + choose.randrange(1000, longest)
                amount = choose.choice([None, "1.5", "20", "many"])
                self.sent.append(Sent(due_ms, len(body), f"k{number % 7}", amount, body))
                properties = {"number": str(number), **({"amount": amount} if amount else {})}
                key = self.sent[-1].key
                made.send_async(body, None, properties, partition_key=key, deliver_at=due_ms)

    @property
    def now_ms(self) -> int:
        return self.memory.clock.now_ms()

    @property
    def dues(self) -> list[int]:
        """All due times, in order."""
        return sorted(one.due_ms for one in self.sent)

    def look(self, **options: Any) -> Inspector:
        memory = self.memory
        return Inspector(memory.client(), memory.admin, "orders", clock=memory.clock, **options)


@pytest.fixture
def filled() -> Iterator[Callable[..., Pending]]:
    """``filled(300, final_window="tracker")``: pending messages in a Pulsar in memory."""
    with ExitStack() as stack:
        yield lambda *arguments, **options: Pending(
            stack.enter_context(MemoryPulsar()), *arguments, **options
        )
