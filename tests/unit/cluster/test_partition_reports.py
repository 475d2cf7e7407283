"""Tests of the statistics of partitioned topics while a broker does not answer for its own."""

from __future__ import annotations

from typing import Any

import pytest

from delaylevel.cluster.rest.admin import PartitionReports
from delaylevel.errors import BrokerUnreachableError, NotFoundError
from delaylevel.model.topic_name import TopicName

TOPIC = TopicName.parse("public/default/orders")


class Broker:
    """The answers of brokers to requests for statistics.

    Attributes:
        hangs: True if the statistics of all partitions do not come in time.
        away: partitions whose broker is dead.
        gone: partitions that do not exist.
        asked: the ends of the requested paths.
    """

    def __init__(self) -> None:
        self.hangs = False
        self.away: set[int] = set()
        self.gone: set[int] = set()
        self.asked: list[str] = []
        self.time_s = 100.0

    def within(self, timeout_s: float) -> Broker:
        return self

    def get(self, path: str, **query: str) -> Any:
        self.asked.append(path.rpartition("/orders")[2])
        if path.endswith("partitioned-stats"):
            if self.hangs:
                raise BrokerUnreachableError("no answer in time")
            left = {0, 1, 2} - self.away - self.gone
            found = {TOPIC.partition(index).full: {"number": index} for index in left}
            # The broker names the topic itself if it has the statistics of no partition.
            return {"metadata": {"partitions": 3}, "partitions": found or {TOPIC.full: {}}}
        index = int(path.removesuffix("/stats").rpartition("-")[2])
        if index in self.away:
            raise BrokerUnreachableError("connection refused", address="dead:8080")
        if index in self.gone:
            raise NotFoundError("no such partition", status=404)
        return {"number": index}

    @property
    def reports(self) -> PartitionReports:
        rest: Any = self
        return PartitionReports(rest, lambda topic: 3, now_s=lambda: self.time_s)


ALL = {index: {"number": index} for index in range(3)}


def test_partitions_are_asked_one_by_one_for_a_while_after_an_answer_that_did_not_come() -> None:
    broker = Broker()
    broker.hangs = True
    reports = broker.reports
    for _ in range(3):
        assert reports.read(TOPIC, {}) == ALL
    assert broker.asked.count("/partitioned-stats") == 1
    broker.hangs = False
    broker.time_s += 31
    broker.asked.clear()
    assert reports.read(TOPIC, {}) == ALL
    assert broker.asked == ["/partitioned-stats"]


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("away", [{1}, {0, 1, 2}])
def test_a_partition_without_an_answer_is_an_error(hangs: bool, away: set[int]) -> None:
    """It may exist: a topic of which no partition is served is not a topic that does not exist."""
    broker = Broker()
    broker.hangs, broker.away = hangs, away
    with pytest.raises(BrokerUnreachableError) as caught:
        broker.reports.read(TOPIC, {})
    assert caught.value.address == "dead:8080"


@pytest.mark.parametrize("hangs", [False, True])
def test_a_partition_that_does_not_exist_is_left_out(hangs: bool) -> None:
    broker = Broker()
    broker.hangs, broker.gone = hangs, {2}
    assert broker.reports.read(TOPIC, {}) == {0: ALL[0], 1: ALL[1]}
