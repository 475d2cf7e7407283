"""Statistics of all partitions of a topic, also while one of the brokers is dead.

A broker asks the others for the statistics of the partitions that they own. If one of them has just
died, there is no answer for half a minute (seen with 4.0.8), and in the end those partitions may be
left out. So after a few seconds the partitions are asked one by one: a dead owner is known at once
by its redirects. A partition without an answer is not one that does not exist.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from delaylevel.errors import BrokerError, BrokerUnreachableError, NotFoundError
from delaylevel.model.topic_name import TopicName

from .http import Rest

# The broker needs some milliseconds for each partition.
_ALL_S = 5.0
# After a request for all partitions that took longer, they are asked one by one for this time.
_ONE_BY_ONE_S = 30.0
_ONE_S = 10.0
_THREADS = 8


class PartitionReports:
    """The requests for the statistics of partitioned topics; any number of threads may use it.

    Args:
        rest: HTTP client of the admin interface.
        count: function that returns the number of partitions of a topic.
    """

    def __init__(
        self,
        rest: Rest,
        count: Callable[[TopicName], int],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rest = rest
        self._count = count
        self._now_s = now_s
        self._one_by_one_until_s = 0.0

    def read(self, topic: TopicName, query: Mapping[str, str]) -> dict[int, Any]:
        """Return the broker's values, by partition; partitions that do not exist are left out.

        Args:
            query: parameters of the requests.

        Raises:
            BrokerUnreachableError: the broker of a partition does not answer.
            BrokerError: other reasons, e.g. NotFoundError for a topic that does not exist.
        """
        found: dict[int, Any] = {}
        partitions = None
        if self._now_s() >= self._one_by_one_until_s:
            try:
                found, partitions = self._all(topic, query)
            except BrokerUnreachableError:
                self._one_by_one_until_s = self._now_s() + _ONE_BY_ONE_S
        if partitions is None:
            partitions = self._count(topic)
            if not partitions:
                raise NotFoundError(f"{topic.full} has no partitions", status=404)
        missing = [index for index in range(partitions) if index not in found]
        if missing:
            found.update(self._each(topic, missing, query))
        return found

    def _all(self, topic: TopicName, query: Mapping[str, str]) -> tuple[dict[int, Any], int]:
        """Return the values in one answer, and the number of partitions."""
        path = f"{topic.rest_path}/partitioned-stats"
        value = self._rest.get_soon(path, _ALL_S, {"perPartition": "true", **query})
        found = {}
        for name, stats in value["partitions"].items():
            index = TopicName.parse(name).partition_index
            if index is not None and stats:
                found[index] = stats
        metadata = value.get("metadata") or {}
        return found, int(metadata.get("partitions", 0))

    def _each(
        self, topic: TopicName, partitions: list[int], query: Mapping[str, str]
    ) -> dict[int, Any]:
        """Request the values one by one, at the same time."""

        def ask(index: int) -> Any:
            path = f"{topic.partition(index).rest_path}/stats"
            try:
                return self._rest.get_soon(path, _ONE_S, query)
            except NotFoundError:
                return None
            except BrokerError as error:
                return error

        with ThreadPoolExecutor(_THREADS, "delaylevel-partitions") as threads:
            answers = dict(zip(partitions, threads.map(ask, partitions), strict=True))
        for answer in answers.values():
            if isinstance(answer, BrokerError):
                raise answer
        return {index: answer for index, answer in answers.items() if answer}
