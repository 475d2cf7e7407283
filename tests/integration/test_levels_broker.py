"""Tests of level topics on a real broker: creation, refusal, search, status, and safety."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import pulsar
import pytest
import urllib3
from click.testing import Result

from delaylevel import topics
from delaylevel.cluster.rest.admin import Admin
from delaylevel.errors import (
    StrategyMismatchError,
    UnsafeNamespaceError,
)
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from support.levels_broker import at_once, described, set_policy

OTHER = Levels(
    PartitionStrategy(partition_by=timedelta(minutes=10), maximum_delay=timedelta(minutes=40))
)


def test_of_two_concurrent_strategies_one_wins(admin: Admin, namespace: str) -> None:
    wanted = [described(namespace), described(namespace, levels=OTHER)] * 2

    results = at_once([lambda item=item: topics.create(admin, item) for item in wanted])  # type: ignore[misc]

    found = topics.find(admin, wanted[0].topic)
    assert found in wanted
    for item, result in zip(wanted, results, strict=True):
        if item == found:
            assert result == found
        else:
            assert isinstance(result, StrategyMismatchError)


def test_concurrent_creations_lose_no_target(admin: Admin, namespace: str) -> None:
    targets = [f"{namespace}/target-{number}" for number in range(6)]
    wanted = [described(namespace, targets=(target,)) for target in targets]

    results = at_once([lambda item=item: topics.create(admin, item) for item in wanted])  # type: ignore[misc]

    assert [item for item in results if isinstance(item, Exception)] == []
    found = topics.find(admin, wanted[0].topic)
    assert found is not None
    assert found.targets == tuple(sorted(f"persistent://{target}" for target in targets))
    assert len(admin.list_partitioned_topics(namespace)) == 4


@pytest.mark.parametrize(
    ("policy", "value", "remedy", "words"),
    [
        (
            "backlogQuota",
            {"limitSize": 5000, "policy": "consumer_backlog_eviction"},
            {"limitSize": -1, "policy": "producer_exception"},
            "throws unacknowledged messages away beyond 5,000 bytes",
        ),
        ("subscriptionExpirationTime", 20, 0, "not used for 20m00s are deleted"),
    ],
)
def test_an_unsafe_namespace_is_refused_with_the_remedy(
    admin: Admin, namespace: str, policy: str, value: object, remedy: object, words: str
) -> None:
    set_policy(admin, namespace, policy, value)
    with pytest.raises(UnsafeNamespaceError) as caught:
        topics.create(admin, described(namespace))
    (problem,) = caught.value.problems
    assert words in problem
    assert f"{namespace}" in problem
    assert "pulsar-admin namespaces set-" in problem
    assert admin.list_partitioned_topics(namespace) == []
    set_policy(admin, namespace, policy, remedy)
    topics.create(admin, described(namespace))


def test_a_namespace_s_ttl_is_overridden_on_each_topic(admin: Admin, namespace: str) -> None:
    set_policy(admin, namespace, "messageTTL", 1)
    wanted = topics.create(admin, described(namespace))
    for member in wanted.members():
        url = f"{admin.admin_url}/admin/v2/{member.topic.rest_path}/messageTTL?applied=true"
        assert json.loads(urllib3.request("GET", url).data) == 0


def test_create_list_and_describe_by_command(
    admin: Admin, client: pulsar.Client, namespace: str, invoke: Callable[..., Result]
) -> None:
    options = (
        *("--unit", "2s", "--max-delay", "10s", "--then", "500ms:2s:100ms"),
        *("--overflow", "recirculate", "--window-partitions", "2"),
    )
    made = invoke("levels", "create", f"{namespace}/orders", *options, "-o", "json")
    assert made.exit_code == 0, made.output
    value = json.loads(made.stdout)
    assert value["topic"] == f"persistent://{namespace}/_orders-delay-level"
    assert value["partitions"] == 4 + 3
    assert value["levels"][1] == {"unit_ms": 500, "maximum_ms": 2000, "lead_ms": 100}
    assert value["overflow"] == "recirculate"
    assert (value["final_window"], value["window_partitions"]) == ("tracker", 2)
    assert "delaylevel run" in made.stderr
    assert "exists already" not in made.stderr
    level_topic = TopicName.parse(value["topic"])
    client.create_producer(level_topic.partition(2).full).send(b"x")

    again = invoke(
        "levels",
        "create",
        f"{namespace}/orders",
        *options,
        "--target",
        f"{namespace}/more",
        "-o",
        "json",
    )
    assert json.loads(again.stdout)["targets"] == [
        f"persistent://{namespace}/more",
        f"persistent://{namespace}/orders",
    ]
    assert "exists already" in again.stderr
    listed = json.loads(invoke("levels", "list", namespace, "-o", "jsonl").stdout)
    assert (listed["topic"], listed["backlog_entries"]) == (value["topic"], 1)
    assert listed["next_hand_off_ms"] is None or listed["next_hand_off_ms"] > 0

    shown = json.loads(invoke("levels", "describe", f"{namespace}/orders", "-o", "json").stdout)
    assert shown["backlog_entries"] == 1
    assert (shown["window_entries"], shown["log_entries"], shown["dispatchers"]) == (0, 0, [])
    assert len(shown["rows"]) == 7 + 2 + 4 + 1
    (row,) = [row for row in shown["rows"] if row["backlog_entries"]]
    assert (row["level"], row["partition"]) == (0, 2)
    assert row["oldest_hand_off_ms"] == row["oldest_publish_ms"] + 3 * 2000 - 500
    table = invoke("levels", "describe", f"{namespace}/more-or-less")
    assert table.exit_code == 1
    table = invoke("levels", "describe", value["topic"])
    assert table.exit_code == 0
    assert "OLDEST HAND OFF" in table.stdout
    assert "RELEASE LOG" in table.stdout
    assert "13 empty partitions" in table.stderr
    assert (
        invoke("levels", "describe", value["topic"], "-o", "wide").stdout.count("-partition-") == 14
    )
    assert "PARKED" in invoke("levels", "list", namespace).stdout
