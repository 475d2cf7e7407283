"""Tests of the statistics of partitioned topics while a broker does not answer for its own."""

from __future__ import annotations

from typing import Any

import pytest

from delaylevel.cluster.rest.admin import PartitionReports
from delaylevel.errors import BrokerUnreachableError, NotFoundError
from delaylevel.model.topic_name import TopicName

TOPIC = TopicName.parse("public/default/orders")
ALL = {index: {"number": index} for index in range(3)}


class Brokers:
    """The answers of brokers to requests for statistics of three partitions.

    Attributes:
        hangs: True if the statistics of all partitions do not come in time.
        away: partitions whose broker is dead.
        gone: partitions that do not exist.
        together: the number of requests for all partitions.
    """

    def __init__(self, hangs: bool, away: set[int] | None = None, gone: set[int] | None = None):
        self.hangs, self.away, self.gone = hangs, away or set(), gone or set()
        self.together, self.time_s = 0, 100.0
        rest: Any = self
        self.reports = PartitionReports(rest, lambda topic: 3, now_s=lambda: self.time_s)

    def within(self, timeout_s: float) -> Brokers:
        return self

    def get(self, path: str, **query: str) -> Any:
        if path.endswith("partitioned-stats"):
            self.together += 1
            if self.hangs:
                raise BrokerUnreachableError("no answer in time")
            left = ALL.keys() - self.away - self.gone
            found = {TOPIC.partition(index).full: ALL[index] for index in left}
            # The broker names the topic itself if it has the statistics of no partition.
            return {"metadata": {"partitions": 3}, "partitions": found or {TOPIC.full: {}}}
        index = int(path.removesuffix("/stats").rpartition("-")[2])
        if index in self.away:
            raise BrokerUnreachableError("connection refused", address="dead:8080")
        if index in self.gone:
            raise NotFoundError("no such partition", status=404)
        return ALL[index]


def test_partitions_are_asked_one_by_one_for_a_while_after_an_answer_that_did_not_come() -> None:
    brokers = Brokers(hangs=True)
    for _ in range(3):
        assert brokers.reports.read(TOPIC, {}) == ALL
    assert brokers.together == 1
    brokers.time_s += 31
    assert brokers.reports.read(TOPIC, {}) == ALL
    assert brokers.together == 2


@pytest.mark.parametrize("hangs", [False, True])
def test_only_a_partition_that_does_not_exist_is_left_out(hangs: bool) -> None:
    """One without an answer may exist: a topic of which no partition is served is not missing."""
    assert Brokers(hangs, gone={2}).reports.read(TOPIC, {}) == {0: ALL[0], 1: ALL[1]}
    for away in ({1}, {0, 1, 2}):
        with pytest.raises(BrokerUnreachableError) as caught:
            Brokers(hangs, away).reports.read(TOPIC, {})
        assert caught.value.address == "dead:8080"
