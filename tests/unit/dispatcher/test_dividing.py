"""Tests of the division of due batches by their targets."""

from __future__ import annotations

import random

import numpy as np

from delaylevel.cluster.targets.pool import TargetKey
from delaylevel.dispatcher.publishing.targets import BatchDivider
from delaylevel.dispatcher.record import DueBatch, WindowMessage

TARGET = "persistent://public/default/orders"


class Queue:
    """A delay queue that divides batches."""

    def divide(self, batch: DueBatch, parts: list[list[int]]) -> list[DueBatch]:
        return [batch_of([batch.messages[each] for each in part]) for part in parts]


def batch_of(messages: list[WindowMessage]) -> DueBatch:
    zeros = np.zeros(len(messages), dtype=np.int64)
    return DueBatch(0, zeros, zeros, [tuple(each) for each in messages])


def message(number: int, text: str = "", key: str = "", target: str = TARGET) -> WindowMessage:
    properties = {"text": text} if text else {}
    return WindowMessage("", number, 0, target, "", 0, "", key, "", 0, properties, b"")


def divide(messages: list[WindowMessage]) -> dict[TargetKey, list[int]]:
    divider = BatchDivider(Queue(), None)  # type: ignore[arg-type]
    parts = divider.by_target(batch_of(messages))
    return {key: [each.id for each in part.messages] for key, part in parts}


def test_messages_of_one_target_stay_together() -> None:
    assert divide([message(n, "short", "key") for n in range(5)]) == {
        TargetKey(TARGET): [0, 1, 2, 3, 4]
    }


def test_targets_and_large_texts_have_their_own_parts() -> None:
    chosen = random.Random(1)
    messages = [
        message(
            number,
            "x" * chosen.choice((0, 1000, 5000)),
            "k" * chosen.choice((0, 5000)),
            chosen.choice((TARGET, TARGET + "2")),
        )
        for number in range(50)
    ]
    for count in range(1, 50):
        found = divide(messages[:count])
        assert sorted(number for part in found.values() for number in part) == list(range(count))
        for key, numbers in found.items():
            for each in (messages[number] for number in numbers):
                large = len(each.key) > 4096 or len(each.properties.get("text", "")) > 4096
                assert (key.topic, key.alone) == (each.target, large)
