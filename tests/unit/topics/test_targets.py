"""Tests of names that nobody can use, and of business topics that nobody subscribes to."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest

from delaylevel import PartitionStrategy, topics
from delaylevel.cluster.targets.receivers import NO_RECEIVER
from delaylevel.errors import AdminError, InvalidInputError, LevelTopicError
from delaylevel.model.level_topic import LONGEST_NAME
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar
from delaylevel.topics.targets import keep, unsubscribed
from support.fakes import describe

ORDERS = TopicName.parse("orders")
UNUSABLE = [".", "..", "a\nb", "a\tb", "\x00", "a\x7fb", "a\u0085b", "a\u2028b", "a\udc80b"]
USABLE = ["...", ".a", "a'b", 'a"b', "a$b", "100%", "größe", "日" * 100, "a\u00a0b", "-", "a;b"]
PLACE = len("persistent://public/default/")
LONG_TARGET = "t" * (LONGEST_NAME - PLACE)
LONG_TOPIC = "l" * (LONGEST_NAME - PLACE - len("-window-log"))


@pytest.fixture
def memory() -> MemoryPulsar:
    return MemoryPulsar(retention=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(({"targets": ("orders", name)}, "cannot be used: (it|the admin)") for name in UNUSABLE),
        *(({"topic": name}, "cannot be used: (it|the admin)") for name in UNUSABLE),
        # Messages carry these names with them.
        ({"targets": (f"{LONG_TARGET}t",)}, "may have 600, .* shorten it"),
        ({"topic": f"{LONG_TOPIC}l"}, "may have 600, .* shorten it"),
        # A message whose target is a member topic would circulate for ever.
        ({"targets": ("orders-delay-level",)}, "cannot be its target"),
        ({"targets": ("orders-delay-level-held",)}, "cannot be its target"),
        ({"topic": "a-partition-1-x"}, "'-partition-' is for partitions"),
    ],
)
def test_a_name_that_nobody_can_use_is_refused_with_the_reason(
    memory: MemoryPulsar, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInputError, match=words):
        topics.create(memory.admin, describe(**changes))
    assert memory.admin.list_partitioned_topics("public/default") == []


@pytest.mark.parametrize("name", [*USABLE, LONG_TARGET])
def test_other_names_are_usable(memory: MemoryPulsar, name: str) -> None:
    wanted = describe(topic=f"_{name[:150]}-delay-level", targets=(name,))
    assert topics.create(memory.admin, wanted) == wanted


def test_missing_topic_is_created_and_kept(memory: MemoryPulsar) -> None:
    missing = str(unsubscribed(memory.admin, ORDERS))
    assert "orders does not exist" in missing
    assert "`delaylevel levels set orders --keep-target`" in missing
    for _ in range(2):
        keep(memory.admin, ORDERS)
        assert memory.admin.partitioned_metadata(ORDERS).partitions == 0
        assert unsubscribed(memory.admin, ORDERS) is None


def test_subscription_keeps_a_topic(memory: MemoryPulsar) -> None:
    memory.client().create_producer("orders").close()
    assert "orders has no subscription" in str(unsubscribed(memory.admin, ORDERS))
    memory.client().subscribe("orders", "app")
    assert unsubscribed(memory.admin, ORDERS) is None


def test_broker_without_policies_for_topics_is_named(
    memory: MemoryPulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AdminError("disabled", status=405)

    monkeypatch.setattr(memory.admin, "set_topic_policies", refuse)
    with pytest.raises(LevelTopicError, match="subscribe to it"):
        keep(memory.admin, ORDERS)


def test_warning_about_a_topic_without_receivers_has_the_remedies(
    memory: MemoryPulsar, caplog: pytest.LogCaptureFixture
) -> None:
    minutes = PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(minutes=5))
    producer = memory.client().create_producer(
        "orders", enable_delay_level_topic=True, partition_strategy=minutes
    )
    producer.send(b"later", deliver_after=timedelta(minutes=3))
    with caplog.at_level(logging.WARNING):
        memory.advance(timedelta(minutes=4))
    (line,) = {
        item.getMessage() for item in caplog.records if "cannot be written" in item.getMessage()
    }
    assert f"({NO_RECEIVER}): its messages are not delivered now. Subscribe to it." in line
    assert "`delaylevel levels set orders --keep-target`" in line
