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
from support.levels_broker import LEVELS, at_once, described, narrow, run, set_policy  # noqa: F401

OTHER = Levels(
    PartitionStrategy(partition_by=timedelta(minutes=10), maximum_delay=timedelta(minutes=40))
)


def names(admin: Admin, namespace: str) -> set[str]:
    return {topic.local for topic in admin.list_partitioned_topics(namespace)}


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


QUOTA = "backlogQuota"


@pytest.mark.parametrize(
    ("policy", "query", "value", "remedy", "words"),
    [
        (
            QUOTA,
            "?backlogQuotaType=destination_storage",
            {"limitSize": 5000, "policy": "consumer_backlog_eviction"},
            {"limitSize": -1, "policy": "producer_exception"},
            "throws unacknowledged messages away beyond 5,000 bytes",
        ),
        (
            QUOTA,
            "?backlogQuotaType=message_age",
            {"limitSize": -1, "limitTime": 3600, "policy": "consumer_backlog_eviction"},
            {"limitSize": -1, "limitTime": -1, "policy": "producer_exception"},
            "throws unacknowledged messages away beyond 1h00m",
        ),
        (
            QUOTA,
            "?backlogQuotaType=message_age",
            {"limitSize": -1, "limitTime": 1800, "policy": "producer_request_hold"},
            {"limitSize": -1, "limitTime": 3600, "policy": "producer_request_hold"},
            "blocks producers once a message is 30m00s old",
        ),
        (
            "subscriptionExpirationTime",
            "",
            20,
            0,
            "not used for 20m00s are deleted",
        ),
    ],
)
def test_an_unsafe_namespace_is_refused_with_the_remedy(
    admin: Admin,
    namespace: str,
    policy: str,
    query: str,
    value: object,
    remedy: object,
    words: str,
) -> None:
    set_policy(admin, namespace, policy, value, query)
    with pytest.raises(UnsafeNamespaceError) as caught:
        topics.create(admin, described(namespace))
    assert len(caught.value.problems) == 1
    assert words in caught.value.problems[0]
    assert "pulsar-admin namespaces set-" in caught.value.problems[0]
    assert namespace in caught.value.problems[0]
    assert caught.value.problems[0] in str(caught.value)
    assert names(admin, namespace) == set()

    set_policy(admin, namespace, policy, remedy, query)
    topics.create(admin, described(namespace))


def test_a_namespace_s_ttl_is_overridden_on_each_topic(admin: Admin, namespace: str) -> None:
    set_policy(admin, namespace, "messageTTL", 1)
    wanted = topics.create(admin, described(namespace))
    for member in wanted.members():
        url = f"{admin.admin_url}/admin/v2/{member.topic.rest_path}/messageTTL?applied=true"
        assert json.loads(urllib3.request("GET", url).data) == 0


def test_create_list_and_describe_by_command(
    admin: Admin, client: pulsar.Client, namespace: str, run: Callable[..., Result]
) -> None:
    options = (
        "--unit",
        "2s",
        "--max-delay",
        "10s",
        "--then",
        "500ms:2s:100ms",
        "--overflow",
        "recirculate",
        "--window-partitions",
        "2",
    )
    made = run("create", f"{namespace}/orders", *options, "-o", "json")
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

    again = run(
        "create", f"{namespace}/orders", *options, "--target", f"{namespace}/more", "-o", "json"
    )
    assert json.loads(again.stdout)["targets"] == [
        f"persistent://{namespace}/more",
        f"persistent://{namespace}/orders",
    ]
    assert "exists already" in again.stderr
    listed = json.loads(run("list", namespace, "-o", "jsonl").stdout)
    assert (listed["topic"], listed["backlog_entries"]) == (value["topic"], 1)
    assert listed["next_hand_off_ms"] is None or listed["next_hand_off_ms"] > 0

    shown = json.loads(run("describe", f"{namespace}/orders", "-o", "json").stdout)
    assert shown["backlog_entries"] == 1
    assert (shown["window_entries"], shown["log_entries"], shown["dispatchers"]) == (0, 0, [])
    assert len(shown["rows"]) == 7 + 2 + 4 + 1
    (row,) = [row for row in shown["rows"] if row["backlog_entries"]]
    assert (row["level"], row["partition"]) == (0, 2)
    assert row["oldest_hand_off_ms"] == row["oldest_publish_ms"] + 3 * 2000 - 500
    table = run("describe", f"{namespace}/more-or-less")
    assert table.exit_code == 1
    table = run("describe", value["topic"])
    assert table.exit_code == 0
    assert "OLDEST HAND OFF" in table.stdout
    assert "RELEASE LOG" in table.stdout
    assert "13 empty partitions" in table.stderr
    assert run("describe", value["topic"], "-o", "wide").stdout.count("-partition-") == 14
    assert "PARKED" in run("list", namespace).stdout


def test_refusals_of_the_command(namespace: str, run: Callable[..., Result]) -> None:
    business = f"{namespace}/orders"
    for args, code, words in (
        (("create", business, "--unit", "fortnight"), 2, "no unit"),
        (("create", business, "--then", "hour"), 2, "no level"),
        (("create", business, "--then", "hour:2h"), 2, "--then UNIT:MAX, a longest delay"),
        (("create", business, "--max-delay", "1h"), 2, "finer --unit"),
        (("create", business, "--unit", "minute", "--max-delay", "30d"), 2, "these levels fit"),
        (("create", f"{business}-delay-level"), 2, "name the business topic"),
        (("create", "non-persistent://a/b/c"), 2, "only persistent"),
        (("create", business, "--final-window", "magic"), 2, "'tracker'"),
        (("create", business, "--window-partitions", "65"), 2, "1<=x<=64"),
        (("list", "default"), 2, "tenant/namespace"),
        (("list", "public/no-such"), 1, "does not exist"),
        (("describe", business), 1, "levels create"),
    ):
        result = run(*args)
        assert (result.exit_code, words in result.stderr) == (code, True), (args, result.output)
    empty = run("list", namespace)
    assert (empty.exit_code, empty.stdout) == (0, "")
    assert "No level topics" in empty.stderr
    assert json.loads(run("list", namespace, "-o", "json").stdout) == []
