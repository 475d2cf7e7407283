"""Tests of a dispatcher's share of the partitions, and of what is away: a broker, or its disk."""

from __future__ import annotations

import random
import tempfile
import threading
from collections import Counter
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from delaylevel.cluster.port import ClientStats, PartitionStats, SubscriptionStats
from delaylevel.dispatcher import Dispatcher, DispatchSettings, assignment, owner, service
from delaylevel.dispatcher.assignment import GroupState, Membership, assign
from delaylevel.dispatcher.fetcher import BATCHES_AHEAD
from delaylevel.dispatcher.service import ServedTopic
from delaylevel.dispatcher.stats import OwnerStats, SharedOwnerStats
from delaylevel.errors import (
    BrokerError,
    BrokerUnreachableError,
    LevelTopicError,
    UpgradeRequiredError,
)
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import ALL, SUBSCRIPTION, FinalWindow, Pauses
from delaylevel.model.topic_name import TopicName
from delaylevel.structures.segments import file as spill_file
from delaylevel.structures.segments.file import SpillError
from delaylevel.structures.segments.pending import PendingSegments
from delaylevel.testing import MemoryPulsar
from delaylevel.topics.roster import DescriptionCache
from support.fakes import SmallDisk, describe
from support.seeds import seeds

UNUSED: Any = None


def dispatcher_in(directory: Path) -> Dispatcher:
    return Dispatcher(UNUSED, UNUSED, [], DispatchSettings(directory))


def served(membership: Any, name: str = "orders", **more: Any) -> ServedTopic:
    """Return a level topic with three window partitions."""
    description = describe(topic=name, final_window=FinalWindow.TRACKER, window_partitions=3)
    return ServedTopic(DescriptionCache(lambda: description, description), membership, **more)


@pytest.mark.parametrize("before", [None, 0o777])
def test_a_folder_is_its_own_users_and_deleted_once_its_process_does_not_run(
    before: int | None, tmp_path: Path
) -> None:
    """The first process of each container has the same ID; another one may have made the folder."""
    dispatcher = dispatcher_in(tmp_path)
    old = tmp_path / "dispatcher-1"  # of a process that has ended, and not of the present one
    found: list[Any] = []

    def tick() -> None:
        old.mkdir()
        dispatcher_in(tmp_path)
        found.extend((old.exists(), dispatcher._directory.stat().st_mode & 0o777))
        dispatcher.stop()

    if before is not None:
        dispatcher._directory.mkdir(before)
        dispatcher._directory.chmod(before)
    dispatcher.run(tick)
    assert found == [False, 0o700]
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_dispatcher_that_starts_are_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one starts before the folder is locked."""
    dispatcher, lock = dispatcher_in(tmp_path), service.locked
    found: list[bool] = []

    def late(folder: Path) -> AbstractContextManager[None]:
        monkeypatch.setattr(service, "locked", lock)
        dispatcher_in(tmp_path)
        return lock(folder)

    def tick() -> None:
        dispatcher_in(tmp_path)
        found.append(dispatcher._directory.exists())
        dispatcher.stop()

    monkeypatch.setattr(service, "locked", late)
    dispatcher.run(tick)
    assert found == [True]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_used_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "spill").write_bytes(b"")
    with pytest.raises(SpillError, match="choose another directory"):
        dispatcher_in(tmp_path / "spill").run()


@pytest.mark.parametrize(("member", "unowned"), [("me-2", [0, 2]), ("other", [])])
def test_a_partition_that_a_further_process_has_lost_is_without_owner(
    member: str, unowned: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group is not read again while its members stay."""
    dispatcher, topic = dispatcher_in(tmp_path), served(SimpleNamespace(name="me"))
    topic.group = GroupState(("me", member), dict.fromkeys(range(3), member))
    reported = {(topic.description.topic, 1): OwnerStats()}
    monkeypatch.setattr(dispatcher.processes, "names", ["me", "me-2"])
    monkeypatch.setattr(dispatcher.processes, "stats", lambda: reported)
    dispatcher._topics.append(topic)
    (group,) = dispatcher.groups()
    assert group.unowned == unowned


@pytest.mark.parametrize("takes_long", [False, True])
def test_each_lost_partition_is_acquired_again_without_the_admin_interface(
    takes_long: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If each attempt takes as long as the client tries, a look makes one."""
    tried: list[int] = []
    answers: list[Any] = [BrokerUnreachableError("no answer")] * (3 if takes_long else 2)
    answers.append(GroupState(("me",), dict.fromkeys(range(3), "other")))

    def acquire(_: Dispatcher, topic: ServedTopic, index: int) -> None:
        tried.append(index)
        if index == 1 or takes_long:
            raise BrokerUnreachableError("its broker is away")

    def read_group() -> GroupState:
        if isinstance(answers[0], Exception):
            raise answers.pop(0)
        return answers[0]

    monkeypatch.setattr(service, "_RETRY_S", 0.0)
    monkeypatch.setattr(service, "_PATIENCE_S", 0.0 if takes_long else 60.0)
    monkeypatch.setattr(Dispatcher, "_acquire", acquire)
    topic = served(SimpleNamespace(name="me", read_group=read_group), probe_s=float("inf"))
    ended: Any = SimpleNamespace(
        failure=BrokerError("lost"), stats=SharedOwnerStats(), ended=threading.Event()
    )
    ended.ended.set()
    topic.owners.update({1: ended, 2: ended})
    dispatcher = dispatcher_in(tmp_path)
    for _ in tuple(answers[1:]):
        with pytest.raises(BrokerUnreachableError, match="its broker"):
            dispatcher._reassign(topic)
    expected = [1, 2, 1] if takes_long else [1, 2, 2, 1]
    assert tried == expected, "and not partition 0, which it did not have"
    dispatcher._reassign(topic)
    assert (tried, topic.lost) == (expected, set()), "another dispatcher has them"


def test_a_level_topic_whose_broker_does_not_answer_keeps_no_other_from_being_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, hanging, looks = threading.Event(), threading.Semaphore(0), Counter[str]()
    dispatcher, ticks, given_up = dispatcher_in(tmp_path), list[int](), list[str]()

    def reassign(_: Dispatcher, topic: ServedTopic) -> None:
        name = topic.description.topic.rpartition("/")[2]
        looks[name] += 1
        if name == "later":
            raise UpgradeRequiredError("a later format")
        if name != "orders":
            hanging.release()
            assert go_on.wait(30)

    def tick() -> None:
        if not ticks:
            assert all(hanging.acquire(timeout=60) for _ in range(20))
        ticks.append(looks["orders"])
        if ticks[-1] > ticks[0] + 20:
            dispatcher.stop()
            go_on.set()

    monkeypatch.setattr(service, "_LOOK_S", 0.01)
    monkeypatch.setattr(Dispatcher, "_reassign", reassign)
    for name in (*map("away-{}".format, range(20)), "orders", "later"):
        membership = SimpleNamespace(name="a", close=lambda name=name: given_up.append(name))
        dispatcher._topics.append(served(membership, name))
    dispatcher.run(tick)
    assert given_up[0] == "later", "it is left to dispatchers of a later version"


# -- shares


class Broker:
    """Statistics of a level topic with three window partitions, the first of which has an owner.

    The broker of the ``dead`` ones does not answer; ``readers`` are those of the first journal
    partition.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *dead: int) -> None:
        self.dead = dead
        self.readers: dict[str, SubscriptionStats] = {}
        patch.setattr(assignment, "open_idle_reader", self._open_reader)

    def join(self, name: str, delivery: Delivery = Delivery.AT_LEAST_ONCE) -> Membership:
        admin: Any = self
        return Membership(None, admin, served(None).description, delivery, name)

    def _open_reader(self, client: Any, topic: str, prefix: str) -> Any:
        name = f"{prefix}reader-x"
        self.readers[name] = SubscriptionStats(0, consumers=(ClientStats("x"),))
        return SimpleNamespace(close=lambda: self.readers.pop(name))

    def partition_stats(self, name: TopicName) -> PartitionStats:
        if "-log" in name.full:
            return PartitionStats(0, self.readers)
        if name.partition_index in self.dead:
            raise BrokerUnreachableError("no answer")
        owner = SubscriptionStats(0, consumers=(ClientStats("other"),))
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


def test_a_dispatcher_whose_reader_is_lost_enters_its_group_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = Broker(monkeypatch)
    first, other = broker.join("a"), broker.join("b", Delivery.EFFECTIVELY_ONCE)
    assert first.read_group().members == ("a",)
    broker.readers.clear()
    assert not first.is_still(("a",))
    first.read_group()
    assert first.read_group().members == ("a",)
    with pytest.raises(LevelTopicError, match="dispatcher a serves"):
        other.read_group()


@pytest.mark.parametrize(("dead", "acquired"), [((), [1, 2]), ((1,), [2]), ((0, 1), [2])])
def test_partitions_of_a_dead_broker_are_not_acquired_and_the_others_are(
    monkeypatch: pytest.MonkeyPatch, dead: tuple[int, ...], acquired: list[int]
) -> None:
    group = Broker(monkeypatch, *dead).join("me").read_group()
    assert assign(group, "me", (), 3)[1] == acquired
    with pytest.raises(BrokerUnreachableError):  # then nothing is known
        Broker(monkeypatch, 0, 1, 2).join("me").read_group()


def test_the_end_of_a_pause_is_logged_once_and_seen_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic, woken = served(UNUSED), list[int]()
    topic.pauses = Pauses(((ALL, 5),))
    owner: Any = SimpleNamespace(events=SimpleNamespace(wake=lambda: woken.append(0)))
    topic.owners[0] = owner
    for _ in range(3):
        topic.watch_pauses()
    assert woken == [0]
    assert caplog.text.count("nothing is paused any more") == 1


@pytest.mark.parametrize("seed", seeds(20))
def test_members_come_to_equal_shares_with_the_fewest_moves(seed: int) -> None:
    rng, owners = random.Random(seed), dict[int, str]()
    partitions = rng.randrange(1, 13)
    for count in rng.choices(range(1, 6), k=5):
        members = tuple("abcde"[:count])
        owners = {index: name for index, name in owners.items() if name in members}
        before, least = dict(owners), partitions // count
        for me in rng.choices(members, k=40):
            mine = [index for index, name in owners.items() if name == me]
            group = GroupState(members, dict(owners))
            revoked, acquired, probed = assign(group, me, mine, partitions)
            assert {owners[index] for index in probed} <= {*members} - {me}
            for index in revoked:
                assert owners.pop(index) == me
            for index in acquired:
                assert owners.setdefault(index, me) == me
        shares = [list(owners.values()).count(name) for name in members]
        assert sum(shares) == partitions
        assert {*shares} <= {least, least + 1}
        kept = sum(owners[index] == name for index, name in before.items())
        had = Counter(before.values())
        assert kept >= sum(min(had[name], least) for name in members)


def test_shares_are_left_to_processes_that_are_about_to_join() -> None:
    def acquired(members: str, *joining: str) -> int:
        return len(assign(GroupState((*members,), {}), "a", (), 4, joining)[1])

    assert (acquired("a"), acquired("a", "a", "a-2"), acquired("ab", "a", "a-2", "a-3")) == (
        4,
        2,
        1,
    )


@pytest.mark.parametrize(
    ("members", "owned", "own", "rests"),
    [
        (("a", "a-2"), 3, 2, True),
        (("a", "a-2"), 3, 1, False),
        (("a",), 3, 3, False),  # the other process has not joined yet
        (("a", "a-2", "b"), 3, 1, False),
        (("a", "a-2"), 2, 2, False),  # read before the other process had its share
        (None, 0, 0, False),  # never read
    ],
)
def test_a_process_rests_once_all_partitions_have_owners_and_it_has_its_share(
    members: tuple[str, ...] | None, owned: int, own: int, rests: bool
) -> None:
    topic = served(SimpleNamespace(name="a"))
    if members is not None:
        topic.group = GroupState(members, dict.fromkeys(range(owned), "somebody"))
    topic.owners = dict.fromkeys(range(own), UNUSED)
    assert topic.is_alone(("a", "a-2")) is rests


BUDGET, SIZE, BATCH = 1 << 20, 1_000, 1_000


@pytest.mark.parametrize("free", [0, 500_000])
@pytest.mark.parametrize("is_open", [True, False], ids=["owner", "takeover"])
def test_a_full_disk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, is_open: bool
) -> None:
    """Messages of 6 MB for a window with 1 MiB come out once, and the next ones are not read."""
    disk = SmallDisk(free)
    most, states = 0, set()

    class Measured(PendingSegments):
        def __init__(self, _: Path | None, **options: Any) -> None:
            path = Path(tempfile.mkdtemp(dir=tmp_path))
            super().__init__(path, **{**options, "budget_bytes": BUDGET})

        def append(self, *args: Any, **options: Any) -> None:
            nonlocal most
            super().append(*args, **options)
            most = max(most, self.memory_bytes)

    def note(self: SharedOwnerStats, **values: object) -> None:
        states.add(values.get("state"))
        change(self, **values)

    change = SharedOwnerStats.set
    monkeypatch.setattr(owner, "PendingSegments", Measured)
    monkeypatch.setattr(spill_file, "append_to", disk)
    monkeypatch.setattr(SharedOwnerStats, "set", note)
    with MemoryPulsar() as memory:
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, final_window="tracker"
        )
        due_ms = [random.Random(7).randrange(60_000, 600_000) for _ in range(6 * BATCH)]
        bodies = [b"%6d" % number + bytes(SIZE) for number in range(len(due_ms))]
        for body, each in zip(bodies, due_ms, strict=True):
            after = timedelta(milliseconds=each)
            producer.send_async(body, None, deliver_after=after, partition_key="k")
        producer.flush()
        if is_open:
            memory.advance(timedelta(seconds=599))
        else:
            memory.clock.advance(timedelta(minutes=20))  # all is due before anybody reads it
            memory.advance(timedelta())
            assert memory.delivered("orders")  # although not everything could be read
        memory.advance(timedelta(minutes=20))
        assert sorted(message.data or b"" for message in memory.delivered("orders")) == bodies
    assert states >= {"disk full", "releasing"}
    assert most <= BUDGET + (BATCHES_AHEAD + 1) * BATCH * (SIZE + 500)
