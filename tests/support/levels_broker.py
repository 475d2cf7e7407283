"""Helpers that the tests of levels broker share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import urllib3

from delaylevel.cluster.rest.admin import Admin
from delaylevel.model.level_topic import (
    FinalWindow,
    LevelTopicDescription,
)
from delaylevel.model.strategy import Levels, PartitionStrategy

LEVELS = Levels(
    [
        PartitionStrategy(partition_by=timedelta(minutes=10), maximum_delay=timedelta(minutes=30)),
        PartitionStrategy(partition_by=timedelta(minutes=5), maximum_delay=timedelta(minutes=10)),
    ]
)


def described(namespace: str, *, levels: Levels = LEVELS, **changes: Any) -> LevelTopicDescription:
    values: dict[str, Any] = {
        "targets": (f"{namespace}/orders",),
        "final_window": FinalWindow.BROKER,
        **changes,
    }
    return LevelTopicDescription(f"{namespace}/orders-delay-level", levels, **values)


def set_policy(admin: Admin, namespace: str, policy: str, value: object, query: str = "") -> None:
    answer = urllib3.request(
        "POST", f"{admin.admin_url}/admin/v2/namespaces/{namespace}/{policy}{query}", json=value
    )
    assert answer.status == 204, answer.data


def at_once(calls: list[Callable[[], object]]) -> list[object]:
    """Run all calls at the same time; return the result or the exception of each."""
    start = threading.Barrier(len(calls))
    results: list[object] = [None] * len(calls)

    def run(index: int) -> None:
        start.wait()
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
