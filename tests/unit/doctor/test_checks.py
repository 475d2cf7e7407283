"""Tests of the doctor: it finds each fault of a cluster in memory, and no other."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pulsar
import pytest
from click.testing import CliRunner

from delaylevel import topics
from delaylevel.cli.main import cli
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.port import (
    BrokerSettings,
    DelayedDelivery,
    NamespacePolicies,
    PartitionStats,
    SchemaVersion,
    SubscriptionStats,
    TopicPolicies,
)
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.rules import OURS
from delaylevel.doctor import CHECKS, Finding, State, checks, examine
from delaylevel.errors import (
    AdminError,
    BrokerUnreachableError,
    NotFoundError,
    PermissionDeniedError,
)
from delaylevel.functions import health
from delaylevel.functions.deployment import source_topics
from delaylevel.model.clock import Clock
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import (
    DESCRIPTION_PROPERTY,
    SUBSCRIPTION,
    FinalWindow,
    LevelTopicDescription,
    Mover,
)
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.topics import lifecycle

DAYS = Levels(PartitionStrategy(maximum_delay=timedelta(days=4)))
TRACKER = LevelTopicDescription(
    "orders-delay-level", DAYS, ("orders",), final_window=FinalWindow.TRACKER
)
BROKER = replace(TRACKER, final_window=FinalWindow.BROKER)
FUNCTION = replace(TRACKER, mover=Mover.FUNCTION)
NAME, DAY = TRACKER.name, TRACKER.level_topic(0)
TARGET = TopicName.parse("orders")
DENIED = PermissionDeniedError("no", status=403, reason="superusers only")
NOW_MS = 1_800_000_000_000

# From GET brokers/configuration/runtime of a 4.0.8 broker; all values are strings.
CONFIGURATION = {
    "delayedDeliveryEnabled": "true",
    "delayedDeliveryMaxDelayInMillis": "0",
    "delayedDeliveryTickTimeMillis": "1000",
    "isDelayedDeliveryDeliverAtTimeStrict": "false",
    "managedLedgerMaxUnackedRangesToPersist": "10000",
}
FACTORY = "delayedDeliveryTrackerFactoryClassName"
BUCKET = {FACTORY: "org.apache.pulsar.broker.delayed.BucketDelayedDeliveryTrackerFactory"}
IN_MEMORY = {FACTORY: "org.apache.pulsar.broker.delayed.InMemoryDelayedDeliveryTrackerFactory"}
STRICT = {"isDelayedDeliveryDeliverAtTimeStrict": "true"}
TWICE = {"dispatcherDispatchMessagesInSubscriptionThread": "true"}
FORGETS = "brokerDeduplicationProducerInactivityTimeoutMinutes"
# From GET {topic}/delayedDelivery?applied=true of a 4.0.8 broker.
POLICY = DelayedDelivery(active=True, tick_ms=1000, max_delay_ms=0)
# A part of a cursor in GET {topic}/internalStats of a 4.0.8 broker.
CURSOR = {"markDeletePosition": "12:-1", "state": "Open"}


class Cluster:
    """A healthy level topic in memory, and a broker whose answers a test replaces by name.

    An answer is a value, an exception, or a function.
    """

    def __init__(self, description: LevelTopicDescription, **answers: Any) -> None:
        self.memory = MemoryPulsar(clock=ManualClock(NOW_MS))
        self.admin, self.client = self.memory.admin, self.memory.client()
        self.description = topics.create(self.admin, description)
        self.delivery = Delivery.AT_LEAST_ONCE
        self.clock: Clock = self.memory.clock
        kind = pulsar.ConsumerType.Shared
        self.app = self.client.subscribe("orders", "app", consumer_type=kind)
        served = [DAY, description.held_topic]
        if description.final_window is FinalWindow.TRACKER:
            served.append(description.window_topic)
        self.movers = [self.client.subscribe(topic.full, SUBSCRIPTION) for topic in served]
        self.answers: dict[str, Any] = {
            "version": "4.0.11",
            "clock_ms": NOW_MS,
            "runtime_configuration": CONFIGURATION,
            "delayed_delivery": POLICY,
            "internal_stats": {"cursors": {}},
            **answers,
        }

    def __getattr__(self, name: str) -> Any:
        if name not in self.answers:
            return getattr(self.admin, name)
        answer = self.answers[name]

        def told(*values: Any, **options: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer(*values, **options) if callable(answer) else answer

        return told

    def findings(self, topic: str | None = "orders") -> dict[str, Finding]:
        found = list(examine(Connection(), topic, delivery=self.delivery, clock=self.clock))
        assert len({each.check for each in found}) == len(found)
        return {each.check: each for each in found}

    def wrong(self) -> dict[str, str]:
        """Return the words and remedies of each check with a problem or a warning."""
        wrong = {
            each.check: f"{each.says} -> {'; '.join(each.remedies)}"
            for each in self.findings().values()
            if each.problems or each.warnings
        }
        if self.description.mover is Mover.FUNCTION:
            del wrong["mover"]  # no worker of Functions answers
        return wrong


Make = Callable[..., Cluster]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(description: LevelTopicDescription = TRACKER, **answers: Any) -> Cluster:
        made = Cluster(description, **answers)
        answering = contextlib.nullcontext(made)
        monkeypatch.setattr(Admin, "from_connection", lambda *_, **__: answering)
        monkeypatch.setattr(Connection, "open_client", lambda *_, **__: made.memory.client())
        return made

    monkeypatch.setattr(checks, "require_reachable", lambda _: None)
    return make


@pytest.mark.parametrize("description", [TRACKER, BROKER], ids=["tracker", "broker"])
def test_a_healthy_level_topic_has_no_findings(
    cluster: Make, description: LevelTopicDescription
) -> None:
    found = cluster(description).findings()
    assert list(found) == list(CHECKS)
    assert {each.state for each in found.values()} == {State.OK}
    delays = "early by up to 1.0s" if description is BROKER else "not used"
    assert found["delayed delivery"].says.startswith(delays)


def pause(cluster: Cluster) -> None:
    lifecycle.pause(cluster.admin, NAME.full, "orders", cluster.memory.clock)


def publish(topic: TopicName) -> Callable[[Cluster], object]:
    return lambda cluster: cluster.client.create_producer(topic.full).send(b"x")


def ahead(cluster: Cluster) -> None:
    cluster.clock = ManualClock(NOW_MS)
    cluster.memory.clock.advance(timedelta(days=1))
    publish(DAY)(cluster)


def member_gone(cluster: Cluster) -> None:
    cluster.admin.delete(TRACKER.dead_letter_topic)
    cluster.admin.set_topic_policies(TRACKER.dead_letter_topic, OURS)


def subscription_gone(cluster: Cluster) -> None:
    cluster.admin.delete_subscription(TRACKER.journal_topic, SUBSCRIPTION)


def policies_gone(cluster: Cluster) -> None:
    cluster.admin.set_topic_policies(NAME, TopicPolicies(message_ttl_s=60))


def target_gone(cluster: Cluster) -> None:
    cluster.app.close()
    cluster.admin.delete(TARGET)


def gone(cluster: Cluster) -> None:
    cluster.client.close()
    client = cluster.memory.client()
    lifecycle.delete(client, cluster.admin, cluster.description)


def no_mover(cluster: Cluster) -> None:
    cluster.movers[0].close()
    cluster.movers[1].close()


def one_mover(cluster: Cluster) -> None:
    cluster.movers[0].close()
    cluster.client.subscribe(DAY.partition(0).full, SUBSCRIPTION)


def waiting(topic: TopicName) -> Callable[[Cluster], None]:
    """Leave a message in a partition whose mover or dispatcher is connected."""

    def plant(cluster: Cluster) -> None:
        publish(topic.partition(0))(cluster)
        cluster.memory.clock.advance(timedelta(days=3))
        cluster.answers["clock_ms"] = cluster.memory.clock.now_ms()

    return plant


@pytest.mark.parametrize(
    ("plant", "check", "words"),
    [
        (lambda it: it.admin.expand(NAME, 5), "partitions", "5 partitions instead of"),
        (lambda it: it.admin.expand(NAME, 5), "partitions", "with up to 6d by DAY finishes it"),
        (member_gone, "partitions", "does not exist"),
        (subscription_gone, "subscriptions", "has no subscription"),
        (
            lambda it: it.client.subscribe(TRACKER.journal_topic.full, "spy"),
            "subscriptions",
            "spy",
        ),
        (policies_gone, "topic policies", "message_ttl_s"),
        (target_gone, "targets", "does not exist"),
        (gone, "level topic", "levels create persistent://public/default/orders"),
        (no_mover, "mover", "no mover is connected: 4 of 4 partitions have no consumer"),
        (one_mover, "mover", f"no mover reads {DAY.partition(1)}: 2 of 4 partitions"),
        (lambda it: it.movers[2].close(), "dispatcher", "no dispatcher is connected: 4 of 4"),
        (waiting(TRACKER.window_topic), "dispatcher", "may have stopped"),
        (pause, "pauses", "orders is paused since"),
        (waiting(DAY), "hand-offs", "2d00h behind"),
        (ahead, "producer clocks", "ahead"),
        (publish(TRACKER.held_topic), "held", "1 entries are held"),
        (publish(TRACKER.dead_letter_topic), "dead letters", "1 entries are dead letters"),
    ],
)
def test_a_planted_fault_is_found_and_nothing_else(
    cluster: Make, plant: Callable[[Cluster], None], check: str, words: str
) -> None:
    ill = cluster()
    plant(ill)
    wrong = ill.wrong()
    assert wrong.keys() == {check}
    assert words in wrong[check]


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (member_gone, "partitions"),
        (subscription_gone, "subscriptions"),
        (policies_gone, "topic policies"),
    ],
)
def test_a_remedy_that_is_a_command_can_be_typed_as_it_is(
    cluster: Make, plant: Callable[[Cluster], None], check: str
) -> None:
    hours = PartitionStrategy(
        partition_by="HOUR", maximum_delay=timedelta(hours=36), lead=timedelta(minutes=9)
    )
    levels = Levels([*DAYS.strategies, hours])
    ill = cluster(replace(TRACKER, levels=levels, window_partitions=2, hold_pause_ms=7_000))
    plant(ill)
    remedies = {problem.remedy for problem in ill.findings()[check].problems}
    (command,) = re.findall("`delaylevel (.*?)`", "".join(remedies))
    answer = CliRunner().invoke(cli, shlex.split(command))
    assert answer.exit_code == 0, answer.output
    assert not ill.findings()[check].problems


def policy(name: TopicName, **values: Any) -> dict[str, Any]:
    """Return the answer of a broker with a policy of one topic."""
    found = replace(POLICY, **values)
    return {"delayed_delivery": lambda topic: found if topic == name else POLICY}


def fixed(name: TopicName) -> dict[str, Any]:
    return policy(name, fixed_delay_ms=60_000)  # the field of PIP-437


def configured(values: Mapping[str, str], **answers: Any) -> dict[str, Any]:
    return {"runtime_configuration": {**CONFIGURATION, **values}, **answers}


def clock(ahead_ms: int) -> dict[str, Any]:
    return {"clock_ms": NOW_MS + ahead_ms}


def target_stats(**subscriptions: Any) -> dict[str, Any]:
    found = {name: SubscriptionStats(0, **values) for name, values in subscriptions.items()}
    return {"partition_stats": PartitionStats(0, found)}


def holes(number: int, of: TopicName = TARGET, limit: int = 10_000) -> dict[str, Any]:
    def stats_of(name: TopicName) -> dict[str, Any]:
        cursor = {**CURSOR, "totalNonContiguousDeletedMessagesRange": number}
        return {"cursors": {"app": cursor, SUBSCRIPTION: cursor} if name == of else {}}

    setting = {"managedLedgerMaxUnackedRangesToPersist": str(limit)}
    return configured(setting, internal_stats=stats_of)


def schemas(*types: str) -> dict[str, Any]:
    return {"schemas": [SchemaVersion(name, "{}", at) for at, name in enumerate(types)]}


NEEDED_MS = DAYS[0].hand_off_after_ms(DAYS[0].partitions - 1)
LEVEL = DAY.partition(0)
HELD = FUNCTION.held_topic
OFF = {"delayedDeliveryEnabled": "false"}
SHORT = {"delayedDeliveryMaxDelayInMillis": "1000"}
NO_POLICY: dict[str, Any] = {"delayed_delivery": None}


@pytest.mark.parametrize(
    ("description", "answers"),
    [
        (TRACKER, clock(-5_999)),  # the broker tells its time in whole seconds
        (TRACKER, clock(5_000)),
        *[(TRACKER, {"version": version}) for version in ("3.0.0", "4.1.0-SNAPSHOT", "x")],
        (BROKER, configured(OFF)),
        (TRACKER, configured(OFF, **NO_POLICY)),
        (BROKER, policy(TARGET, tick_ms=2_000)),
        (FUNCTION, policy(TARGET, max_delay_ms=1)),
        (FUNCTION, policy(DAY, max_delay_ms=NEEDED_MS)),
        (TRACKER, fixed(DAY)),  # readers of a level topic ignore delivery times
        (BROKER, configured(TWICE)),
        (BROKER, target_stats(b={"type": "Shared"}, c={"type": "None"})),
        (TRACKER, target_stats(a={"type": "Failover"})),
        (TRACKER, schemas("KEY_VALUE", "JSON")),
        (TRACKER, holes(1000)),
        (TRACKER, holes(50_000, limit=1_000_000)),
    ],
)
def test_what_a_level_topic_can_live_with(
    cluster: Make, description: LevelTopicDescription, answers: dict[str, Any]
) -> None:
    assert cluster(description, **answers).wrong() == {}


#: What each check says, and its remedy.
WRONG: dict[str, list[tuple[LevelTopicDescription, dict[str, Any], str]]] = {
    "clock": [
        (TRACKER, clock(-7_000), "6.0s ahead of .* -> .*NTP"),
        (TRACKER, clock(5_001), "5.0s behind .* -> .*NTP"),
    ],
    "broker": [(TRACKER, {"version": "2.11.4"}, "Pulsar 2.11.4 -> upgrade")],
    "delayed delivery": [
        (
            BROKER,
            configured(OFF, **NO_POLICY),
            f"{TARGET} does not delay .* -> .*{TARGET} --enable",
        ),
        (
            BROKER,
            configured(SHORT, **NO_POLICY),
            f"{TARGET} refuses delays of more than 1.0s",
        ),
        (BROKER, policy(TARGET, tick_ms=2_001), "a precision of only 2.0"),
        (BROKER, policy(TARGET, max_delay_ms=1), f"{TARGET} refuses delays of more"),
        (FUNCTION, policy(HELD, max_delay_ms=FUNCTION.hold_pause_ms - 1), "-held refuses delays"),
        (
            FUNCTION,
            policy(DAY, max_delay_ms=NEEDED_MS - 1),
            f"{DAY} refuses delays .* -> `pulsar-admin topicPolicies set-delayed-delivery {DAY} "
            f"--enable --time 1000ms --maxDelay {NEEDED_MS}ms`, or delayedDeliveryMaxDelayInMillis",
        ),
        (TRACKER, fixed(TARGET), f"{TARGET} delays .* by 1m00s .*come that late"),
        (BROKER, fixed(TARGET), "ignores the delivery times.*-> .*-delay 0"),
        (FUNCTION, fixed(DAY), f"{DAY} .*ignores the delivery times"),
    ],
    "broker faults": [
        (FUNCTION, configured(TWICE, version="x"), "twice.* -> .*--value false"),
        (FUNCTION, configured(TWICE), "twice.* -> .*--value false"),
    ],
    "target subscriptions": [
        (
            BROKER,
            target_stats(a={"type": "Failover"}),
            rf"a of {TARGET} \(Failover\) gets ",
        ),
    ],
    "target schemas": [(TRACKER, schemas("JSON", "KEY_VALUE"), "KeyValue.*-> .*Java")],
    "ack holes": [
        (BROKER, holes(1001), f"app of {TARGET} has 1,001.*-> .*a finer last level"),
        (TRACKER, holes(1001, LEVEL), f"{SUBSCRIPTION} of {LEVEL} has 1,001"),
        (TRACKER, holes(50_001, limit=1_000_000), "brokers dispatch hardly anything"),
    ],
}


@pytest.mark.parametrize(
    ("check", "description", "answers", "said"),
    [(check, *row) for check, rows in WRONG.items() for row in rows],
)
def test_a_problem_of_the_brokers_answers_has_a_remedy(
    cluster: Make, check: str, description: LevelTopicDescription, answers: Any, said: str
) -> None:
    wrong = cluster(description, **answers).wrong()
    assert wrong.keys() == {check}
    assert re.search(said, wrong[check])


@pytest.mark.parametrize(
    ("settings", "states"),
    [
        (STRICT, {"4.2.0": "ok", "4.2.1": "failed", "4.2.2.3-vendor": "failed", "4.2.3": "ok"}),
        (BUCKET, {"3.0.14": "failed", "4.0.8": "failed", "4.1.7": "failed", "4.2.3": "ok"}),
        (
            IN_MEMORY,
            {"4.0.0": "ok", "4.0.1": "warning", "4.0.11": "ok", "4.1.7": "warning", "4.2.2": "ok"},
        ),
    ],
)
def test_a_release_with_a_known_fault(
    cluster: Make, settings: dict[str, str], states: dict[str, str]
) -> None:
    for version, state in {**states, "unknown": "warning"}.items():
        asked = cluster(BROKER, **configured(settings, version=version))
        found = asked.findings()["broker faults"]
        assert found.state == state, version
        if state != "ok":
            assert "apache/pulsar#2" in found.says
            assert "--final-window tracker" in found.remedies[0]


def test_without_a_superuser_the_brokers_own_settings_are_not_checked(cluster: Make) -> None:
    asked = cluster(BROKER, runtime_configuration=DENIED, **NO_POLICY)
    found = asked.findings()
    skipped = {each.check for each in found.values() if each.state is State.SKIPPED}
    assert skipped == {"delayed delivery", "broker faults"}
    assert found["broker faults"].says.startswith("not checked: only superusers")
    assert "no superuser" in found["admin rights"].says
    assert asked.wrong() == {}


@pytest.mark.parametrize(
    ("error", "state", "says"),
    [
        (DENIED, State.SKIPPED, "not checked: the token has no permission"),
        (AdminError("GET a: 500", status=500, reason=""), State.SKIPPED, "not checked: GET a: 500"),
        (AdminError("no", status=406, reason="no"), State.FAILED, "no"),
    ],
)
def test_a_failed_request_is_skipped_or_fails_but_never_raises(
    cluster: Make, error: Exception, state: State, says: str
) -> None:
    found = cluster(clock_ms=error).findings()
    assert found["clock"].state is state
    assert found["clock"].says.startswith(says)
    assert bool(found["clock"].remedies) == (state is State.FAILED)
    assert {each.state for name, each in found.items() if name != "clock"} == {State.OK}
    assert cluster(partitioned_metadata=error).findings()["level topic"].state is state


def test_a_missing_namespace_is_a_finding_with_its_remedy(cluster: Make) -> None:
    missing = NotFoundError("Namespace does not exist", status=404)
    found = cluster(list_partitioned_topics=missing).findings("another")["level topic"]
    assert (found.state, "pulsar-admin namespaces create" in found.says) == (State.FAILED, True)


def test_a_broker_that_is_away_is_one_problem_and_not_that_of_every_check(cluster: Make) -> None:
    away = BrokerUnreachableError("the broker at b:8080 does not answer", address="b:8080")
    asked = cluster(clock_ms=away, schemas=away, topic_policies=away, internal_stats=away)
    assert asked.wrong().keys() == {"clock"}
    found = asked.findings()
    skipped = {name: each.says for name, each in found.items() if each.state is State.SKIPPED}
    assert {"target schemas", "topic policies", "ack holes"} <= skipped.keys()
    assert all("b:8080" in says for says in skipped.values())
    assert "--admin-url" not in "".join(found["clock"].remedies)


def test_a_dispatcher_that_is_effectively_once_needs_deduplication(cluster: Make) -> None:
    stats = PartitionStats(0, {"app": SubscriptionStats(0)}, deduplication=True)
    for description, deduplication, minutes, said in (
        (TRACKER, True, "360", None),
        (TRACKER, True, "30", f"away for 30m00s.* -> set {FORGETS}=360"),
        (TRACKER, False, "360", f"{TARGET} has deduplication disabled -> .*{TARGET} --enable"),
        (BROKER, True, "360", "needs the final window tracker"),
    ):
        answer = replace(stats, deduplication=deduplication)
        asked = cluster(description, **configured({FORGETS: minutes}, partition_stats=answer))
        asked.delivery = Delivery.EFFECTIVELY_ONCE
        wrong = asked.wrong()
        assert wrong.keys() == ({"deduplication"} if said else set())
        assert said is None or re.search(said, wrong["deduplication"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"cleanupSubscription": True}, "deleting it would delete the parked messages"),
        ({"inputSpecs": {}}, "does not read .*-held"),
    ],
)
def test_a_running_function_that_others_changed_is_a_problem(
    cluster: Make, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    inputs = {topic: {} for topic in source_topics(FUNCTION)}
    config = {"inputSpecs": inputs, "cleanupSubscription": False, **changes}
    instances = [{"instanceId": 0, "status": {"running": True}}]
    worker = SimpleNamespace(config=lambda _: config, status=lambda _: {"instances": instances})
    monkeypatch.setattr(health, "FunctionsWorker", lambda _: contextlib.nullcontext(worker))
    found = cluster(FUNCTION).findings()["mover"]
    assert found.state is (State.FAILED if words else State.OK)
    assert re.search(words, found.says)
    assert found.remedies == ((f"`delaylevel mover deploy {FUNCTION.topic}`",) if words else ())


def test_what_cannot_be_known_is_said(cluster: Make) -> None:
    stats = PartitionStats(0, {"app": SubscriptionStats(0)}, deduplication=True)
    asked = cluster(runtime_configuration=DENIED, partition_stats=stats)
    asked.delivery = Delivery.EFFECTIVELY_ONCE
    assert "assumed: only superusers" in asked.findings()["deduplication"].says
    gone(asked)
    nothing = asked.findings(None)
    assert nothing["level topic"].says == "not checked: there is no level topic in public/default"


def test_a_replicated_member_topic_is_reported(cluster: Make) -> None:
    both = NamespacePolicies(replication_clusters=frozenset({"east", "west"}))
    settings = BrokerSettings(cluster="east", topic_policies=True, subscription_expiration_min=0)
    for clusters, count in (({"east", "west"}, len(tuple(TRACKER.members()))), ({"east"}, 0)):
        own = replace(OURS, replication_clusters=frozenset(clusters))
        asked = cluster(namespace_policies=both, broker_settings=settings, topic_policies=own)
        problems = asked.findings()["topic policies"].problems
        assert len(problems) == count
        assert all("replication_clusters" in each.says for each in problems)


def test_a_level_topic_that_needs_a_later_version_has_another_remedy(cluster: Make) -> None:
    asked = cluster()
    later = {**json.loads(asked.description.to_json()), "version": 2}
    asked.admin.set_properties(NAME, {DESCRIPTION_PROPERTY: json.dumps(later)})
    for topic in ("orders", None):
        found = asked.findings(topic)["level topic"]
        assert "format 2" in found.says
        assert "docs/operations.md" in found.remedies[0]
