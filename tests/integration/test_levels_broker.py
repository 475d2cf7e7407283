"""Tests of level topics on a real broker: creation, refusal, search, status, and safety."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pulsar
import pytest
import urllib3
from click.testing import CliRunner, Result

from delaylevel import topics
from delaylevel.cli.main import cli
from delaylevel.cluster.reader import entry_times
from delaylevel.cluster.rest.admin import Admin
from delaylevel.errors import (
    InvalidInputError,
    LevelTopicError,
    NotFoundError,
    StrategyMismatchError,
    UnsafeNamespaceError,
)
from delaylevel.model.level_topic import (
    DESCRIPTION_PROPERTY,
    MEMBER_PROPERTY,
    PLAN_PROPERTY,
    SUBSCRIPTION,
    FinalWindow,
    LevelTopicDescription,
    Mover,
    Role,
)
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.status import status
from support.levels_broker import LEVELS, at_once, described, narrow, run, set_policy  # noqa: F401
from support.world import eventually

OTHER = Levels(
    PartitionStrategy(partition_by=timedelta(minutes=10), maximum_delay=timedelta(minutes=40))
)


def names(admin: Admin, namespace: str) -> set[str]:
    return {topic.local for topic in admin.list_partitioned_topics(namespace)}


def test_all_member_topics_are_created(admin: Admin, namespace: str) -> None:
    wanted = described(namespace)
    assert topics.find(admin, wanted.topic) is None
    assert topics.create(admin, wanted) == wanted
    assert topics.find(admin, wanted.topic) == wanted

    assert names(admin, namespace) == {
        "orders-delay-level",
        "orders-delay-level-5m",
        "orders-delay-level-held",
        "orders-delay-level-DLQ",
    }
    for member in wanted.members():
        metadata = admin.partitioned_metadata(member.topic)
        assert metadata.partitions == member.partitions
        assert metadata.properties[MEMBER_PROPERTY] == wanted.topic
        assert (DESCRIPTION_PROPERTY in metadata.properties) == (member.topic == wanted.name)
        stats = admin.partitioned_stats(member.topic)
        assert set(stats) == set(range(member.partitions))
        assert all(item.subscriptions[SUBSCRIPTION].durable for item in stats.values())
        policies = admin.topic_policies(member.topic)
        assert policies.message_ttl_s == 0
        assert policies.delete_while_inactive is False


def test_a_tracker_has_a_window_and_a_journal(
    admin: Admin, client: pulsar.Client, namespace: str
) -> None:
    wanted = described(
        namespace,
        final_window=FinalWindow.TRACKER,
        window_partitions=3,
        mover=Mover.FUNCTION,
        hold_pause_ms=500,
    )
    assert topics.create(admin, wanted) == wanted
    for topic in (wanted.window_topic, wanted.journal_topic):
        assert admin.partitioned_metadata(topic).partitions == 3
        assert topics.describe(admin, topic.partition(1).full) == wanted
        stats = admin.partitioned_stats(topic)
        assert [stats[index].subscriptions[SUBSCRIPTION].durable for index in range(3)] == [
            True
        ] * 3
        policies = admin.topic_policies(topic)
        assert (policies.message_ttl_s, policies.delete_while_inactive) == (0, False)

    client.create_producer(wanted.window_topic.partition(2).full).send(b"waits")
    at = status(admin, wanted, 0)
    assert (at.window_entries, at.log_entries, at.dispatchers, at.problems) == (1, 0, (), ())
    roles = [Role.HELD, Role.DEAD_LETTER, *[Role.WINDOW] * 3, *[Role.JOURNAL] * 3, Role.OUTCOMES]
    assert [row.role for row in at.others] == roles

    admin.delete(wanted.journal_topic)
    assert len(status(admin, wanted, 0).problems) == 3
    topics.create(admin, wanted)
    assert status(admin, wanted, 0).problems == ()


def test_messages_published_before_the_first_consumer_are_kept(
    admin: Admin, client: pulsar.Client, namespace: str
) -> None:
    wanted = topics.create(admin, described(namespace))
    producer = client.create_producer(wanted.level_topic(1).partition(0).full)
    producer.send(b"parked")
    consumer = client.subscribe(wanted.level_topic(1).partition(0).full, SUBSCRIPTION)
    assert consumer.receive(60_000).data() == b"parked"


def test_a_second_creation_changes_nothing(
    admin: Admin, client: pulsar.Client, namespace: str
) -> None:
    wanted = topics.create(admin, described(namespace))
    partition = wanted.name.partition(0)
    client.create_producer(partition.full).send(b"parked")
    before = [admin.properties(member.topic) for member in wanted.members()]

    assert topics.create(admin, wanted) == wanted

    assert [admin.properties(member.topic) for member in wanted.members()] == before
    assert admin.partition_stats(partition).subscriptions[SUBSCRIPTION].backlog_entries == 1


def test_an_interrupted_creation_is_finished(admin: Admin, namespace: str) -> None:
    wanted = described(namespace)
    admin.create_partitioned(
        wanted.name, 2, {MEMBER_PROPERTY: wanted.topic, PLAN_PROPERTY: wanted.to_json()}
    )
    assert topics.find(admin, wanted.topic) is None
    with pytest.raises(LevelTopicError, match="not finished"):
        topics.describe(admin, wanted.topic)
    (found,) = topics.list_level_topics(admin, namespace)
    assert (found.topic, found.description) == (wanted.topic, None)
    assert "not finished" in str(found.problem)
    with pytest.raises(StrategyMismatchError, match="left unfinished"):
        topics.create(admin, described(namespace, hold_pause_ms=1))

    assert topics.create(admin, wanted) == wanted
    assert admin.subscriptions(wanted.name) == [SUBSCRIPTION]


def test_missing_parts_are_repaired(admin: Admin, namespace: str) -> None:
    wanted = topics.create(admin, described(namespace))
    admin.delete(wanted.held_topic)
    admin.delete_subscription(wanted.level_topic(1).partition(0), SUBSCRIPTION)
    problems = status(admin, wanted, 0).problems
    assert len(problems) == 2
    assert any("-held-partition-0 does not exist" in problem for problem in problems)
    assert any("-5m-partition-0 has no subscription" in problem for problem in problems)

    topics.create(admin, wanted)

    assert status(admin, wanted, 0).problems == ()


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


def test_new_targets_are_added(admin: Admin, namespace: str) -> None:
    first = topics.create(admin, described(namespace))
    more = topics.create(admin, described(namespace, targets=(f"{namespace}/invoices",)))
    both = (f"persistent://{namespace}/invoices", f"persistent://{namespace}/orders")
    assert more.targets == both
    assert topics.create(admin, first).targets == both
    more.check_target(both[0])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"levels": OTHER}, "10m for 40m"),
        ({"mover": Mover.FUNCTION}, "mover function"),
        ({"final_window": FinalWindow.TRACKER}, "final window tracker"),
        ({"hold_pause_ms": 1234}, "hold pause 1s234ms"),
    ],
)
def test_another_strategy_is_refused_and_both_are_shown(
    admin: Admin, namespace: str, change: dict[str, Any], word: str
) -> None:
    made = topics.create(admin, described(namespace))
    before = names(admin, namespace)

    with pytest.raises(StrategyMismatchError) as caught:
        topics.create(admin, described(namespace, **change))

    assert word in caught.value.configured
    assert str(LEVELS) in caught.value.described
    assert word not in caught.value.described
    assert caught.value.configured in str(caught.value)
    assert caught.value.described in str(caught.value)
    assert topics.find(admin, made.topic) == made
    assert names(admin, namespace) == before


@pytest.mark.parametrize("suffix", ["", "-5m", "-held", "-DLQ"])
def test_a_topic_that_is_not_ours_is_left_alone(admin: Admin, namespace: str, suffix: str) -> None:
    wanted = described(namespace)
    foreign = wanted.name.with_suffix(suffix)
    admin.create_partitioned(foreign, 2, {"mine": "yes"})

    with pytest.raises(LevelTopicError, match="does not describe itself"):
        topics.create(admin, wanted)

    assert admin.partitioned_metadata(foreign).properties == {"mine": "yes"}
    assert admin.subscriptions(foreign) == []
    assert len(admin.list_partitioned_topics(namespace)) == 1


def test_a_topic_without_partitions_is_not_ours(
    admin: Admin, client: pulsar.Client, namespace: str
) -> None:
    wanted = described(namespace)
    client.create_producer(wanted.topic).close()
    for refused in (topics.create, lambda admin, wanted: topics.find(admin, wanted.topic)):
        with pytest.raises(LevelTopicError, match="without partitions"):
            refused(admin, wanted)


def test_a_member_of_another_level_topic_is_not_ours(admin: Admin, namespace: str) -> None:
    first = topics.create(admin, described(namespace))
    clash = replace(first, topic=first.held_topic.full)
    with pytest.raises(LevelTopicError, match="belongs to the level topic"):
        topics.create(admin, clash)


def test_impossible_names(admin: Admin, namespace: str) -> None:
    for targets in (f"{namespace}/orders-delay-level-held", f"{namespace}/orders-delay-level"):
        with pytest.raises(InvalidInputError, match="cannot be its target"):
            topics.create(admin, described(namespace, targets=(targets,)))
    with pytest.raises(InvalidInputError, match="-partition-"):
        topics.create(
            admin, LevelTopicDescription(f"{namespace}/a-partition-1-x", LEVELS, ("orders",))
        )
    with pytest.raises(NotFoundError, match="namespaces create public/no-such"):
        topics.create(admin, described("public/no-such"))
    assert names(admin, namespace) == set()


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


def test_all_problems_are_named_at_once(admin: Admin, namespace: str) -> None:
    set_policy(admin, namespace, "subscriptionExpirationTime", 20)
    quota = {"limitSize": 5000, "policy": "consumer_backlog_eviction"}
    set_policy(admin, namespace, QUOTA, quota)
    with pytest.raises(UnsafeNamespaceError) as caught:
        topics.create(admin, described(namespace))
    assert len(caught.value.problems) == 2


def test_a_namespace_s_ttl_is_overridden_on_each_topic(admin: Admin, namespace: str) -> None:
    set_policy(admin, namespace, "messageTTL", 1)
    wanted = topics.create(admin, described(namespace))
    for member in wanted.members():
        url = f"{admin.admin_url}/admin/v2/{member.topic.rest_path}/messageTTL?applied=true"
        assert json.loads(urllib3.request("GET", url).data) == 0


def test_a_quota_that_only_blocks_by_size_is_noted(admin: Admin, namespace: str) -> None:
    quota = {"limitSize": 5000, "policy": "producer_exception"}
    set_policy(admin, namespace, QUOTA, quota)
    wanted = topics.create(admin, described(namespace))
    assert ["holds 5,000 bytes" in line for line in topics.notes(admin, wanted)] == [True]


def test_a_level_topic_is_found_by_every_name(admin: Admin, namespace: str) -> None:
    wanted = topics.create(admin, described(namespace))
    business = f"{namespace}/orders"
    for name in (
        business,
        f"persistent://{business}",
        wanted.topic,
        wanted.level_topic(1).full,
        wanted.level_topic(1).partition(0).full,
        wanted.held_topic.full,
        wanted.dead_letter_topic.partition(0).full,
    ):
        assert topics.describe(admin, name) == wanted
    with pytest.raises(LevelTopicError, match="levels create"):
        topics.describe(admin, f"{namespace}/other")


def test_a_level_topic_of_another_name_is_searched_for(admin: Admin, namespace: str) -> None:
    wanted = topics.create(
        admin, LevelTopicDescription(f"{namespace}/waiting", LEVELS, (f"{namespace}/orders",))
    )
    business = f"{namespace}/orders"
    with pytest.raises(LevelTopicError):
        topics.describe(admin, business)
    assert topics.describe(admin, business, search=True) == wanted
    topics.create(admin, replace(wanted, topic=f"{namespace}/waiting-too"))
    with pytest.raises(LevelTopicError, match="several"):
        topics.describe(admin, business, search=True)


def test_a_list_has_level_topics_only_including_damaged_ones(admin: Admin, namespace: str) -> None:
    assert topics.list_level_topics(admin, namespace) == []
    wanted = topics.create(admin, described(namespace))
    broken = replace(wanted, topic=f"{namespace}/broken")
    topics.create(admin, broken)
    admin.set_properties(broken.name, {DESCRIPTION_PROPERTY: '{"version":99}'})
    admin.create_partitioned(TopicName.parse(f"{namespace}/plain"), 3)

    found = topics.list_level_topics(admin, namespace)

    assert [item.topic for item in found] == [broken.topic, wanted.topic]
    assert [item.description for item in found] == [None, wanted]
    assert "format 99" in str(found[0].problem)


def test_status_has_backlog_and_hand_offs_and_moves_nothing(
    admin: Admin, client: pulsar.Client, namespace: str
) -> None:
    wanted = topics.create(admin, described(namespace))
    partition = wanted.name.partition(1)
    producer = client.create_producer(partition.full, batching_enabled=False)
    sent = []
    for _ in range(3):
        producer.send(b"x")
        last = admin.last_message_id(partition)
        assert last is not None
        sent += [at for _, at in entry_times(client, partition.full, last, last)]
        before = time.time_ns() // 1_000_000
        eventually(lambda before=before: time.time_ns() // 1_000_000 > before + 1, "a millisecond")
    producer.close()
    client.create_producer(wanted.held_topic.full).send(b"held")
    for _ in range(2):
        client.create_producer(wanted.dead_letter_topic.full).send(b"dead")
    after_ms = LEVELS[0].hand_off_after_ms(1)

    at = status(admin, wanted, now_ms=sent[0])

    assert at.problems == ()
    assert [(row.level, row.level_name, row.partition) for row in at.partitions] == [
        (0, "10m", 0),
        (0, "10m", 1),
        (1, "5m", 0),
    ]
    row = at.partitions[1]
    assert row.topic == partition.full
    assert row.backlog_entries == at.backlog_entries == 3
    assert row.storage_bytes > 0
    assert row.oldest_publish_ms == sent[0]
    assert row.oldest_hand_off_ms == sent[0] + after_ms
    assert at.next_hand_off_ms == sent[0] + after_ms
    assert at.behind_ms == 0
    empty = at.partitions[0]
    assert (empty.backlog_entries, empty.oldest_publish_ms, empty.oldest_hand_off_ms) == (
        0,
        None,
        None,
    )
    assert (at.held_entries, at.dead_letter_entries) == (1, 2)
    assert [row.role for row in at.others] == [Role.HELD, Role.DEAD_LETTER]
    assert not at.mover_alive

    late = status(admin, wanted, now_ms=sent[1] + after_ms - 1)
    assert late.partitions[1].oldest_hand_off_ms == sent[0] + after_ms
    assert late.behind_ms == sent[1] - 1 - sent[0]

    consumers = [
        client.subscribe(
            [wanted.level_topic(level.index).full for level in LEVELS],
            SUBSCRIPTION,
            consumer_name="mover-1",
            receiver_queue_size=1,
        )
    ]
    alive = status(admin, wanted, now_ms=sent[0])
    assert alive.mover_alive
    assert alive.consumers == ("mover-1",)
    assert alive.partitions[1].backlog_entries == 3
    for consumer in consumers:
        consumer.close()


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
    level_topic = TopicName.parse(value["topic"])
    client.create_producer(level_topic.partition(2).full).send(b"x")

    again = run(
        "create", f"{namespace}/orders", *options, "--target", f"{namespace}/more", "-o", "json"
    )
    assert json.loads(again.stdout)["targets"] == [
        f"persistent://{namespace}/more",
        f"persistent://{namespace}/orders",
    ]
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
    assert "BACKLOG" in run("list", namespace).stdout


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


def test_the_exit_code_without_a_broker_is_3() -> None:
    args = ["--admin-url", "http://127.0.0.1:1", "levels", "list"]
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 3
    assert "http://127.0.0.1:1" in result.stderr
