"""Tests of the warning about subscriptions on our topics that are not ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from delaylevel.cluster.port import ConsumerStats, PartitionStats, SubscriptionStats
from delaylevel.errors import PermissionDeniedError
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.subscriptions import (
    CHECK_EVERY_S,
    WARN_EVERY_S,
    ForeignSubscriptionWatch,
    read_foreign_subscriptions,
)
from support.fakes import describe

DURABLE = SubscriptionStats(0)
READER = SubscriptionStats(0, durable=False)
OURS = {
    "delaylevel": DURABLE,
    "delaylevel-0123456789ab-reader-x": READER,
    "delaylevel-dispatcher~host:1:abc~-reader-y": READER,
    "__compaction": DURABLE,
    "pulsar.dedup": DURABLE,
}


class Statistics:
    """An admin interface that reports subscriptions of the window topic's partition 0."""

    def __init__(self, **subscriptions: SubscriptionStats) -> None:
        self.subscriptions: Mapping[str, SubscriptionStats] = {**OURS, **subscriptions}
        self.failure: Exception | None = None
        self.requests = 0

    def partitioned_stats(self, topic: TopicName) -> Mapping[int, PartitionStats]:
        self.requests += 1
        if self.failure is not None:
            raise self.failure
        if topic.local.endswith("-window-log"):
            raise PermissionDeniedError("no", status=403)
        found = self.subscriptions if topic.local.endswith("-window") else OURS
        return {0: PartitionStats(0, found), 1: PartitionStats(0, found)}


class Times:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def look(caplog: pytest.LogCaptureFixture) -> Callable[..., Callable[[float], list[str]]]:
    """``warnings = look(admin)``; ``warnings(after_s)`` looks later, and returns new warnings."""

    def make(admin: Any) -> Callable[[float], list[str]]:
        times = Times()
        watch = ForeignSubscriptionWatch(admin, now_s=times, start=lambda work: work())

        def warnings(after_s: float) -> list[str]:
            times.now_s += after_s
            caplog.clear()
            watch.look(describe())
            return [record.getMessage() for record in caplog.records]

        return warnings

    return make


def test_a_durable_subscription_with_a_name_like_ours_is_foreign() -> None:
    consumer = ConsumerStats("c", "10.0.0.1:99")
    admin: Any = Statistics(
        **{"delaylevel-reports": SubscriptionStats(3, consumers=(consumer,)), "reader x": READER}
    )
    first, second = read_foreign_subscriptions(admin, describe())
    assert (first.name, first.durable, first.consumers) == (
        "delaylevel-reports",
        True,
        ("10.0.0.1:99",),
    )
    assert (second.name, second.durable, second.consumers) == ("reader x", False, ())
    assert "--subscription 'reader x' --force" in second.removal
    assert "messages before they are due, and keeps them stored" in str(first)
    assert "keeps" not in str(second)


def test_the_same_subscriptions_are_named_once_an_hour_and_new_ones_at_once(look: Any) -> None:
    admin = Statistics(billing=DURABLE)
    warnings = look(admin)
    (first,) = warnings(0)
    assert "subscription billing of" in first
    requests = admin.requests
    assert warnings(CHECK_EVERY_S - 1) == []
    assert admin.requests == requests  # too early for a check
    assert warnings(CHECK_EVERY_S) == []
    assert admin.requests > requests
    admin.subscriptions = {**admin.subscriptions, "audit": DURABLE}
    (second,) = warnings(CHECK_EVERY_S)
    assert "audit" in second
    (third,) = warnings(WARN_EVERY_S)
    assert "audit" in third
    admin.subscriptions = OURS
    assert warnings(2 * WARN_EVERY_S) == []


@pytest.mark.parametrize("failure", [PermissionDeniedError("no", status=403), ValueError("broken")])
def test_a_failing_admin_interface_only_means_no_warning(look: Any, failure: Exception) -> None:
    admin = Statistics(billing=DURABLE)
    admin.failure = failure
    warnings = look(admin)
    assert warnings(0) == []
    admin.failure = None
    assert len(warnings(CHECK_EVERY_S)) == 1
