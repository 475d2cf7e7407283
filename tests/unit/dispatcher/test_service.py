"""Tests of the dispatcher's folder for spill files, and of partitions that it has lost."""

from __future__ import annotations

import os
import stat
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from delaylevel.cluster.port import ConsumerStats, PartitionStats, SubscriptionStats
from delaylevel.dispatcher import Dispatcher, DispatchSettings, assignment, service
from delaylevel.dispatcher.assignment import GroupState, Membership, assign
from delaylevel.dispatcher.service import ServedTopic
from delaylevel.dispatcher.stats import SharedOwnerStats
from delaylevel.errors import (
    BrokerError,
    BrokerUnreachableError,
    LevelTopicError,
    UpgradeRequiredError,
)
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow
from delaylevel.model.topic_name import TopicName
from delaylevel.structures.segments.pending import SpillError
from delaylevel.topics.roster import DescriptionCache
from support.fakes import describe

UNUSED: Any = None


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("before", [None, 0o755, 0o777])
def test_only_the_user_can_enter_the_folder_of_a_process(
    tmp_path: Path, before: int | None
) -> None:
    """Create the folder, or tighten one that appeared after the start."""
    directory = tmp_path / "spill"
    dispatcher = Dispatcher(UNUSED, UNUSED, [], DispatchSettings(directory))
    folder = directory / f"dispatcher-{os.getpid()}"
    if before is not None:
        folder.mkdir(parents=True)
        folder.chmod(before)
    found: list[int] = []

    def tick() -> None:
        found.append(mode(folder))
        dispatcher.stop()

    umask = os.umask(0)
    try:
        dispatcher.run(tick)
    finally:
        os.umask(umask)
    assert found == [0o700]
    assert not folder.exists()


def test_a_directory_that_cannot_be_used_is_an_error_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "spill"
    path.write_bytes(b"")
    dispatcher = Dispatcher(UNUSED, UNUSED, [], DispatchSettings(path))
    with pytest.raises(SpillError, match="choose another directory"):
        dispatcher.run()


class Group:
    """The membership in a group that cannot be read while the admin interface is away."""

    name = "me"
    away = True

    def read_group(self) -> GroupState:
        if self.away:
            raise BrokerUnreachableError("no answer")
        return GroupState(("me",), dict.fromkeys(range(3), "other"))


def test_each_lost_partition_is_acquired_again_without_the_admin_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def acquire(dispatcher: Dispatcher, topic: ServedTopic, index: int) -> None:
        tried.append(index)
        if index == 1:
            raise BrokerUnreachableError("its broker is away")

    monkeypatch.setattr(service, "_RETRY_S", 0.0)
    monkeypatch.setattr(Dispatcher, "_acquire", acquire)
    description = describe(final_window=FinalWindow.TRACKER, window_partitions=3)
    group: Any = Group()
    served = ServedTopic(DescriptionCache(lambda: description, description), group)
    for index in (1, 2):
        served.owners[index] = cast(
            Any,
            SimpleNamespace(
                failure=BrokerError("lost"), stats=SharedOwnerStats(), is_alive=lambda: False
            ),
        )
    dispatcher = Dispatcher(UNUSED, UNUSED, [], DispatchSettings(tmp_path))
    for _ in range(2):
        with pytest.raises(BrokerUnreachableError, match="its broker"):
            dispatcher._reassign(served)
    assert tried == [1, 2, 1, 2], "and not partition 0, which it did not have"
    group.away = False
    tried.clear()
    served.probe_s = float("inf")
    dispatcher._reassign(served)
    assert not tried, "another dispatcher has them"
    assert not served.lost


def test_a_level_topic_whose_broker_does_not_answer_keeps_no_other_from_being_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_LOOK_S", 0.01)
    monkeypatch.setattr(Dispatcher, "_revoke", lambda *_: None)
    go_on, hanging = threading.Event(), threading.Semaphore(0)
    dispatcher = Dispatcher(UNUSED, UNUSED, [], DispatchSettings(tmp_path))
    looks: Counter[str] = Counter()
    given_up: list[str] = []

    def reassign(_: Dispatcher, topic: ServedTopic) -> None:
        name = topic.description.topic.rpartition("/")[2]
        looks[name] += 1
        if "away" in name:
            hanging.release()
            assert go_on.wait(30)
        if "later" in name:
            raise UpgradeRequiredError("a later format")

    def serve(name: str) -> None:
        description = describe(topic=name, final_window=FinalWindow.TRACKER)
        membership: Any = SimpleNamespace(name="a", close=lambda: given_up.append(name))
        topic = ServedTopic(DescriptionCache(UNUSED, description), membership)
        dispatcher._topics.append(topic)

    def add(_: Dispatcher, name: str) -> None:
        raise UpgradeRequiredError("a later format")

    monkeypatch.setattr(Dispatcher, "add", add)  # it is tried again
    monkeypatch.setattr(Dispatcher, "_reassign", reassign)
    for number in range(20):
        serve(f"away-{number}")
    serve("orders")
    serve("later")
    ticks: list[int] = []

    def tick() -> None:
        ticks.append(looks["orders"])
        if len(ticks) == 1:
            assert all(hanging.acquire(timeout=60) for _ in range(20))
        if ticks[-1] > ticks[0] + 20:
            assert all(looks[f"away-{number}"] == 1 for number in range(20))
            dispatcher.stop()
            go_on.set()

    dispatcher.run(tick)
    assert given_up[0] == "later", "it is left to dispatchers of a later version"
    assert list(dispatcher.refused.values()) == ["a later format"]


class Broker:
    """Statistics of a level topic with three window partitions, the first of which has an owner.

    Attributes:
        dead: the window partitions whose broker does not answer.
        readers: subscriptions of the first journal partition.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *dead: int) -> None:
        self.dead = dead
        self.readers: dict[str, SubscriptionStats] = {}
        patch.setattr(assignment, "open_idle_reader", self._open_reader)

    def join(self, name: str, delivery: Delivery = Delivery.AT_LEAST_ONCE) -> Membership:
        description = describe(final_window=FinalWindow.TRACKER, window_partitions=3)
        admin: Any = self
        return Membership(None, admin, description, delivery, name)

    def _open_reader(self, client: Any, topic: str, prefix: str) -> Any:
        name = f"{prefix}reader-x"
        self.readers[name] = SubscriptionStats(0, consumers=(ConsumerStats("x"),))
        return SimpleNamespace(close=lambda: self.readers.pop(name))

    def partition_stats(self, name: TopicName) -> PartitionStats:
        if "-log" in name.full:
            return PartitionStats(0, self.readers)
        if name.partition_index in self.dead:
            raise BrokerUnreachableError("no answer")
        owner = SubscriptionStats(0, consumers=(ConsumerStats("other"),))
        return PartitionStats(0, {SUBSCRIPTION: owner} if name.partition_index == 0 else {})

    def partitioned_stats(self, name: TopicName) -> dict[int, PartitionStats]:
        return {index: self.partition_stats(name.partition(index)) for index in range(3)}


def test_dispatchers_of_one_level_topic_have_one_delivery_guarantee(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = Broker(monkeypatch)
    first, second = (broker.join(name, Delivery.EFFECTIVELY_ONCE) for name in ("a~b", "d"))
    other = broker.join("c")
    first.read_group()
    with pytest.raises(LevelTopicError, match=r"dispatcher a~b serves .* the same --delivery"):
        other.read_group()
    assert second.read_group().members == ("a~b", "d"), "the refused one is not a member"
    first.close()
    second.close()
    assert other.read_group().members == ("c",), "it serves once they have stopped"


@pytest.mark.parametrize(("dead", "acquired"), [((), (1, 2)), ((1,), (2,)), ((0, 1), (2,))])
def test_partitions_of_a_dead_broker_are_not_acquired_and_the_others_are(
    monkeypatch: pytest.MonkeyPatch, dead: tuple[int, ...], acquired: tuple[int, ...]
) -> None:
    group = Broker(monkeypatch, *dead).join("me").read_group()
    assert assign(group, "me", (), 3)[1] == [*acquired]


def test_a_group_whose_partitions_are_all_at_a_dead_broker_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(BrokerUnreachableError):
        Broker(monkeypatch, 0, 1, 2).join("me").read_group()


@pytest.mark.parametrize(
    ("members", "joining", "acquired"),
    [
        (("a",), (), (0, 1, 2, 3)),
        (("a",), ("a", "a-2"), (0, 1)),
        (("a", "b"), ("a", "a-2", "a-3"), (0,)),
    ],
)
def test_shares_are_left_to_processes_that_are_about_to_join(
    members: tuple[str, ...], joining: tuple[str, ...], acquired: tuple[int, ...]
) -> None:
    assert assign(GroupState(members, {}), "a", (), 4, joining)[1] == [*acquired]


def test_a_process_rests_once_all_partitions_have_owners_and_it_has_its_share() -> None:
    description = describe(final_window=FinalWindow.TRACKER, window_partitions=4)
    membership: Any = SimpleNamespace(name="a")
    descriptions = DescriptionCache(UNUSED, description)
    topic = ServedTopic(descriptions, membership, processes=("a", "a-2"))
    owners = dict.fromkeys(range(4), "somebody")

    def rests(members: tuple[str, ...], owners: dict[int, str], own: int) -> bool:
        topic.group = GroupState(members, owners)
        topic.owners = dict.fromkeys(range(own), UNUSED)
        return topic.is_alone

    assert not topic.is_alone, "the group was never read"
    assert rests(("a", "a-2"), owners, 2)
    assert not rests(("a", "a-2"), owners, 1)
    assert not rests(("a",), owners, 4), "another process has not joined yet"
    assert not rests(("a", "a-2", "b"), owners, 2)
    # It was read before the other process had acquired its second partition.
    assert not rests(("a", "a-2"), {index: owners[index] for index in range(3)}, 2)
