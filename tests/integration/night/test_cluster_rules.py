"""Tests of rules of namespaces that forbid what our clients do: before and after the creation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from delaylevel.cluster.connection.settings import Connection
from delaylevel.dispatcher import DispatchSettings
from delaylevel.doctor import State, examine
from delaylevel.errors import UnsafeNamespaceError
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.topic_name import TopicName
from delaylevel.run import LocalService
from delaylevel.testing.embedded import delete_namespace, new_namespace
from delaylevel.topics import registry
from support.background import Serving
from support.processes import BRIEF, UNIT
from support.world import QUIET, RealWorld

pytestmark = pytest.mark.broker

BODIES = {b"1", b"2"}
# Policies of a namespace that policies of our own topics lift.
LIFTED: dict[str, Any] = {
    "subscriptionTypesEnabled": ["Shared", "Key_Shared"],
    "maxConsumersPerTopic": 1,
    "maxConsumersPerSubscription": 1,
    "maxSubscriptionsPerTopic": 1,
    "maxProducersPerTopic": 1,
}


@dataclass
class Place:
    """A namespace with a level topic and its rules."""

    world: RealWorld
    folder: Path

    @property
    def quick(self) -> Connection:
        return self.world.connection.model_copy(update={"operation_timeout_seconds": 2})

    def create(self, target: TopicName | None = None, **values: Any) -> LevelTopicDescription:
        target = target or self.world.name("orders")
        if not self.world.admin.topic_exists(target):
            self.world.admin.create_partitioned(target, 0)
            self.world.admin.create_subscription(target, "app")
        return registry.create(
            self.world.admin,
            LevelTopicDescription(
                self.world.topic("orders-delay-level"),
                BRIEF,
                (target.full,),
                final_window=FinalWindow.TRACKER,
                window_partitions=1,
                **values,
            ),
        )

    def park(self, delay: timedelta = 2 * UNIT, target: TopicName | None = None) -> None:
        with self.world.client().create_producer(
            (target or self.world.name("orders")).full,
            enable_delay_level_topic=True,
            delay_level_topic=self.world.topic("orders-delay-level"),
            create_level_topic=False,
        ) as producer:
            for body in BODIES:
                producer.send(body, deliver_after=delay)

    def arrived(self) -> bool:
        # A rule may forbid a reader of the target.
        count = self.world.admin.partition_stats(self.world.name("orders")).messages_in
        return count == len(BODIES)

    @contextmanager
    def serving(self, *more: str) -> Iterator[LocalService]:
        service = LocalService(
            lambda: self.quick.open_service_client(logger=QUIET),
            self.world.admin,
            [self.world.topic("orders-delay-level"), *more],
            DispatchSettings(directory=self.folder / "spill"),
            trigger_ms=100,
        )
        with Serving(service):
            yield service

    def failed(self) -> dict[str, str]:
        """Return what each check of ``doctor`` says that fails."""
        topic = self.world.topic("orders-delay-level")
        found = examine(self.quick, topic)
        return {item.check: item.says for item in found if item.state is State.FAILED}


@pytest.fixture
def place(world: RealWorld, tmp_path: Path) -> Place:
    return Place(world, tmp_path)


@pytest.fixture
def other(connection: Connection, tmp_path: Path) -> Iterator[Place]:
    elsewhere = new_namespace(connection)
    with ExitStack() as stack:
        stack.callback(delete_namespace, connection, elsewhere)
        yield Place(RealWorld(connection, stack, elsewhere), tmp_path / "other")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("rule", LIFTED)
def test_a_rule_that_policies_of_our_topics_lift(place: Place, rule: str, when: str) -> None:
    created = when == "after"
    if created:
        place.create()
        place.park()
    place.world.set_policy(rule, LIFTED[rule])
    if rule == "maxProducersPerTopic":
        # The application has a producer of the target, and the dispatcher needs another one.
        with pytest.raises(UnsafeNamespaceError, match="set-max-producers") as refused:
            place.create()
        assert "policy of namespace" in str(refused.value)
        if created:
            assert "target limits" in place.failed()
        # The remedy for a target that allows one producer.
        path = place.world.name("orders").rest_path
        place.world.rest.post(f"{path}/maxProducers", 0)
    if not created:
        place.create()
        place.park()
    with place.serving():
        place.world.eventually(place.arrived, "all messages")
        assert place.failed() == {}


def test_a_rule_that_comes_later_stops_only_its_topics_until_it_is_lifted(
    place: Place, other: Place
) -> None:
    for each in (place, other):
        each.create()
    place.park()
    place.world.set_policy("encryptionRequired", True)
    with place.serving(other.world.topic("orders-delay-level")) as service:
        other.park()
        other.world.eventually(other.arrived, "the messages of the other namespace")

        def said() -> str:
            return " ".join(check.text for check in service.start_checks() if not check.ok)

        place.world.eventually(lambda: "delaylevel doctor" in said(), "the failure")
        assert not place.arrived()
        found = place.failed()
        assert "encryption required" in found["encryption"]
        assert "producer" in found["openings"]
        place.world.set_policy("encryptionRequired", False)
        place.world.eventually(place.arrived, "all messages once the rule is lifted", 90)
        assert place.failed() == {}


def test_messages_of_a_target_whose_rules_forbid_them_are_held_until_these_are_lifted(
    place: Place, other: Place
) -> None:
    elsewhere, target = other.world.namespace, other.world.name("orders")
    description = place.create(target, hold_pause_ms=500)
    place.park(target=target)
    other.world.set_policy("encryptionRequired", True)
    with place.serving():

        def held() -> set[str]:
            found = place.world.stored(description.held_topic.full)
            return {message.properties["delaylevel.reason"] for message in found}

        place.world.eventually(held, "the held messages")
        assert held() == {f"producers have to encrypt (policy of namespace {elsewhere})"}
        assert elsewhere in place.failed()["encryption"]
        other.world.set_policy("encryptionRequired", False)
        place.world.eventually(other.arrived, "all messages", 90)


def test_doctor_changes_nothing_and_takes_no_lock(place: Place) -> None:
    description = place.create()
    place.park(UNIT / 2)
    admin = place.world.admin

    def state() -> dict[TopicName, Any]:
        names = [member.topic.partition(0) for member in description.members()]
        return {
            name: (
                sorted(admin.partition_stats(name).subscriptions),
                admin.mark_delete_position(name, "delaylevel"),
            )
            for name in names
        }

    before = state()
    assert place.failed().keys() == {"mover", "dispatcher"}
    assert state() == before
    with place.serving() as service:
        place.world.eventually(place.arrived, "all messages")
        assert place.failed() == {}
        assert service.movers.stats()[description.topic].failures == 0
        place.world.eventually(lambda: not place.world.backlog(description), "acknowledgements")
