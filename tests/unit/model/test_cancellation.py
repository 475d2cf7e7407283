"""Tests of cancellations: their envelope, and the partition where they meet their message."""

from __future__ import annotations

import pytest

from delaylevel.model.cancellation import PAYLOAD, cancellation, cancellation_partition
from fakes import describe

WANTED = describe(window_partitions=4)
WINDOW = WANTED.window_topic.full.removeprefix("persistent://")
OTHER = describe(topic="_other-delay-level", window_partitions=4).window_topic.full[
    len("persistent://") :
]


def test_a_cancellation_has_the_properties_of_its_message_and_its_kind() -> None:
    target = WANTED.targets[0]
    assert cancellation(1_800_000_000_000, target, "a").parked_properties({}) == {
        "delaylevel.due": "1800000000000",
        "delaylevel.target": target,
        "delaylevel.id": "a",
        "delaylevel.kind": "cancel",
    }
    assert PAYLOAD == b"cancel"


@pytest.mark.parametrize("partition", range(4))
@pytest.mark.parametrize("position", ["17:4:-1", "17:4:0", "17:4:1023"])
def test_a_message_sent_to_the_window_directly_is_in_the_partition_of_its_id(
    partition: int, position: str
) -> None:
    own = f"{WINDOW}-partition-{partition}:{position}"
    assert cancellation_partition(WANTED, "", own) == partition
    assert cancellation_partition(WANTED, "key", own) == WANTED.window_partition("key", own)


@pytest.mark.parametrize(
    "own",
    [
        "order-1",
        "",
        ":::",
        "1:2:3",
        f"{WINDOW}-partition-1",
        f"{WINDOW}-partition-1:2:3",
        f"{WINDOW}-partition-4:1:2:3",
        f"{WINDOW}-partition-01:1:2:3",
        f"{WINDOW}-partition-١:1:2:3",
        f"{WINDOW}-partition-²:1:2:3",
        f"{WINDOW}-partition--1:1:2:3",
        f"{WINDOW}-partition-:1:2:3",
        f"{WINDOW}-log-partition-1:1:2:3",
        f"persistent://{WINDOW}-partition-1:1:2:3",
        f"{OTHER}-partition-1:1:2:3",
        f"{WANTED.topic.removeprefix('persistent://')}-partition-1:1:2:3",
    ],
)
def test_any_other_message_is_found_by_its_key_or_id(own: str) -> None:
    assert cancellation_partition(WANTED, "", own) == WANTED.window_partition("", own)
    assert cancellation_partition(WANTED, "k", own) == WANTED.window_partition("k", own)
