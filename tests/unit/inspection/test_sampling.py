"""Tests of the estimated number of messages, on partitions with unequal batches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from delaylevel.cluster.port import LedgerInfo
from delaylevel.inspection import sampling
from delaylevel.model.envelope import DUE, TARGET
from delaylevel.model.level_topic import Role
from delaylevel.model.message import RawMessage
from delaylevel.model.position import EARLIEST, Position
from delaylevel.model.topic_name import TopicName

DUE_MS = 1_800_000_000_000
PAYLOAD = b"x" * 100
PROPERTIES = {DUE: str(DUE_MS), TARGET: "persistent://public/default/orders", "a": "b"}
# In a batch, such a message has the size of its metadata (4 bytes), that of its payload (2), a
# sequence ID (3), its properties with the headers of protobuf, and its payload.
MESSAGE_BYTES = 9 + sum(6 + len(name + value) for name, value in PROPERTIES.items()) + len(PAYLOAD)
ENTRY_BYTES = 64


def stored(entry: int, size: int) -> Any:
    """Return a message of a batch of this size."""
    return SimpleNamespace(
        message_id=lambda: size,
        publish_timestamp=lambda: DUE_MS - 86_400_000 + entry,
        properties=lambda: PROPERTIES,
        partition_key=lambda: "",
        ordering_key=lambda: "",
        event_timestamp=lambda: 0,
        data=lambda: PAYLOAD,
    )


class Partitions:
    """Snapshot of partitions with these batches, whose broker has just opened them."""

    target = None

    def __init__(self, batches: list[list[int]]) -> None:
        self._batches: Mapping[TopicName, list[int]] = {
            TopicName.parse("_orders-delay-level").partition(number): sizes
            for number, sizes in enumerate(batches)
        }
        self.ranges = [
            SimpleNamespace(
                source=SimpleNamespace(name=name, topic=name.full, role=Role.LEVEL),
                start=EARLIEST,
                end=Position(7, len(sizes)),
            )
            for name, sizes in self._batches.items()
        ]
        self.admin = SimpleNamespace(messages_in=lambda topic: {}, contents=self._contents)

    def _contents(self, partition: TopicName) -> tuple[list[LedgerInfo], int]:
        sizes = self._batches[partition]
        size = len(sizes) * ENTRY_BYTES + sum(sizes) * MESSAGE_BYTES
        return [LedgerInfo(7, len(sizes), size=size)], 0

    def read(
        self, item: Any, start: Position | None = None, queue: int = 0
    ) -> Iterator[RawMessage]:
        first = 0 if start is None else max(0, start.entry)
        for entry, size in enumerate(self._batches[item.source.name][first:], first):
            for index in range(size):
                yield stored(entry, size), 7, entry, index

    def select(self, source: Any, found: list[Any]) -> list[Any]:
        return found

    def cancelling(self, source: Any, found: list[Any]) -> list[Any]:
        return []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("largest", [0, 1000], ids=["random", "the first is the largest"])
def test_the_estimate_is_true_for_unequal_batches(
    seed: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker has forgotten its counters: only entries and bytes are known."""
    monkeypatch.setattr(sampling, "batch_size", lambda size: size)
    chosen = random.Random(seed)
    batches = [
        [*([largest] if largest else []), *(chosen.choice((1, 1, 1, 3, 90)) for _ in range(150))]
        for _ in range(12)
    ]
    random.seed(seed)
    found = sampling.sample(Partitions(batches))  # type: ignore[arg-type]
    assert found is not None
    total = sum(map(sum, batches))
    assert sum(one.total for one in found) == pytest.approx(total, rel=0.05)
    for one, sizes in zip(found, batches, strict=True):
        assert one.total == pytest.approx(sum(sizes), rel=0.1)
