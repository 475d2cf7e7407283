"""The dispatcher: it serves the window topics of level topics, together with other dispatchers."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from delaylevel.cluster.failures import translate_errors
from delaylevel.cluster.locks import PartitionLock
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.rules import advised
from delaylevel.cluster.scheduler import NEVER, Scheduler, Task
from delaylevel.cluster.targets.pool import TargetClients
from delaylevel.cluster.threads import BackgroundWork
from delaylevel.errors import (
    AlreadyRunningError,
    BrokerError,
    LevelTopicError,
    UpgradeRequiredError,
)
from delaylevel.model.clock import Clock, SteadyClock, SystemClock
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import (
    ALL,
    DEFAULT_WINDOW_PARTITIONS,
    NO_PAUSES,
    FinalWindow,
    LevelTopicDescription,
    Pauses,
)
from delaylevel.structures.segments.file import make_spill_folder
from delaylevel.topics import registry as topics
from delaylevel.topics.roster import RESTING_S, DescriptionCache
from delaylevel.topics.status import (
    ADDRESS_PROPERTY,
    NAME_PROPERTY,
    StatusCache,
    reported,
)
from delaylevel.topics.targets import require_on_targets

from .assignment import (
    GroupState,
    Membership,
    ServedGroup,
    assign,
    share_of,
    window_sources,
)
from .host import Host
from .owner import FAILURES, DispatchSettings, OwnerTask, PartitionOwner
from .processes import JOINING_S, Processes
from .stats import OwnerStats

log = logging.getLogger(__name__)

_LOOK_S = 1.0
# Time between two looks at a group without other commands, in which each process has its share. All
# that can happen there is that another one joins. With many level topics, the time is longer, so
# that the looks at all of them together do not cost more.
_ALONE_S = 3.0
_LOOKS_PER_S = 2
_LONGEST_ALONE_S = 15.0
# Time between two attempts to acquire a partition of another dispatcher. If that dispatcher hangs,
# the broker then takes the partition from it.
_PROBE_S = 3.0
# Time for which a partition is left to others after a failure.
_RETRY_S = 2.0
# A look acquires no more partitions after a failure that has taken so long. While a broker is away,
# the client tries for 30 s each time, and the process would seem to hang, and not end when asked.
_PATIENCE_S = 5.0
_ALL = -1


#: Name of the logger of pauses, which is quiet in all processes of a command but one.
PAUSES = f"{__name__}.pauses"


@dataclass(eq=False)
class ServedTopic:
    """A level topic that is served, and the partitions of it that this process owns."""

    descriptions: DescriptionCache
    membership: Membership
    owners: dict[int, OwnerTask] = field(default_factory=dict)
    retry_s: dict[int, float] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)  # their owners failed since the group was read
    group: GroupState | None = None
    group_s: float = 0.0
    probe_s: float = 0.0
    probes: int = 0
    pauses: Pauses = NO_PAUSES  # those that the owners know
    # Texts of the present failures, and the log of all, by partition; -1 for the level topic's.
    failures: dict[int, str] = field(default_factory=dict)
    warnings: dict[int, RepeatedWarning] = field(default_factory=dict)
    task: Task | None = None
    looked_s: float = field(default_factory=time.monotonic)
    given_up: UpgradeRequiredError | None = None  # why another version has to serve it
    # Why the last attempt to acquire a partition was refused, by partition.
    refusals: dict[int, str] = field(default_factory=dict)

    @property
    def description(self) -> LevelTopicDescription:
        """The latest description of the level topic."""
        return self.descriptions.latest()

    @property
    def resting_s(self) -> float:
        """Age up to which the description will do while nothing is released, in s."""
        # Messages that wait for the end of a pause are released once it is seen.
        return 0.0 if self.description.pauses.paused else RESTING_S

    def is_alone(self, processes: Collection[str]) -> bool:
        """Return True if only processes of this command are members, and this one has its share."""
        me, partitions = self.membership.name, self.description.window_partitions
        if self.group is None or {*self.group.members} != {me, *processes}:
            return False
        # While processes join, the group may have been read before another one had its share.
        is_complete = len(self.group.owners) == partitions
        return is_complete and len(self.owners) == share_of(self.group.members, me, partitions)

    def watch_pauses(self) -> None:
        """Log pauses that have begun or ended, and let the owners look at them at once."""
        if self.description.pauses == self.pauses:
            return
        self.pauses = self.description.pauses
        text = "nothing is paused any more: what waits is released"
        if self.pauses.paused:
            names = ("all targets" if name == ALL else name for name, _ in self.pauses.paused)
            text = f"paused: due messages wait for {', '.join(names)}"
        logging.getLogger(PAUSES).warning("%s: %s", self.description.topic, text)
        for owner in self.owners.values():
            owner.events.wake()

    @property
    def problem(self) -> str:
        """The text of a present failure; empty for none."""
        return next(iter(self.failures.values()), "")

    def failed(self, error: Exception, partition: int = _ALL) -> None:
        """Log that the group, or a partition of it, cannot be used now."""
        name = self.description.topic
        if partition != _ALL:
            name = f"window partition {self.description.window_topic.partition(partition).full}"
        self.failures[partition] = text = advised(self.description, error)
        self.warnings.setdefault(partition, RepeatedWarning(log, name)).failed(text)

    def works(self, partition: int = _ALL) -> None:
        """Log the end of the failure, if there was one."""
        if self.failures.pop(partition, None) is not None:
            self.warnings[partition].over()

    def watch_owner(self, index: int, owner: OwnerTask) -> None:
        """Log the failure of an owner, and the end of the failure once it releases messages."""
        if not owner.ended.is_set():
            if index in self.failures and owner.stats.now().state == "releasing":
                self.works(index)
        elif isinstance(owner.failure, FAILURES):
            self.failed(owner.failure, index)


def served(admin: TopicAdmin, name: str, *, search: bool = False) -> LevelTopicDescription:
    """Return the description of a level topic that a dispatcher can serve."""
    description = topics.describe(admin, name, search=search)
    check_dispatched(description)
    return description


def check_dispatched(description: LevelTopicDescription) -> None:
    """Raise LevelTopicError if a level topic has no window for a dispatcher."""
    if description.final_window is not FinalWindow.TRACKER:
        raise LevelTopicError(
            f"level topic {description.topic} has the final window "
            f"{description.final_window.value!r}: the broker itself delivers its messages, and "
            "there is nothing to dispatch"
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; OSError if another dispatcher, in any container, has it."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def sweep(directory: Path) -> None:
    """Delete the files of dispatchers that no longer run."""
    # Not by process ID: containers that share a volume all have the same one.
    for each in directory.glob("dispatcher-*"):
        with suppress(OSError), locked(each):
            shutil.rmtree(each, ignore_errors=True)


class Dispatcher:
    """Service that publishes the messages of window topics when they are due.

    Several dispatchers may run, on one machine or many. They share the window partitions, and take
    over those of a dispatcher that has died or hangs.

    Args:
        client: a ``pulsar.Client``, not closed here.
        level_topics: names of business topics or level topics.
        target_client: function that returns a new client of the same cluster. Each target then has
            a connection of its own, and a throttled one delays no other. By default a
            :class:`delaylevel.DelayLevelClient` makes more of its kind, and all targets share the
            connection of any other client.
        scheduler: that of the process, which is not closed here; its own one by default.
        processes: further processes that share the work, started and watched by this one.

    A level topic that only a later version can serve is given up.

    Raises:
        LevelTopicError: a level topic is missing, or its final window is not ``tracker``; or, with
            effectively-once delivery, a target is without broker deduplication.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        level_topics: Sequence[str],
        settings: DispatchSettings,
        clock: Clock | None = None,
        target_client: Callable[[], Any] | None = None,
        scheduler: Scheduler | None = None,
        processes: Processes | None = None,
    ) -> None:
        self._client = client
        self.processes = processes or Processes(None, 1)
        self._names = settings.processes  # all of this command; empty for one process
        # Of this process, in the groups of its level topics.
        self.name = settings.name or f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        self._begun_s = time.monotonic()
        # The clients of targets are closed after the producers, which close in the background.
        self._opened = ExitStack()
        target_client = target_client or getattr(client, "another", None)
        clients = self._opened.enter_context(closing(TargetClients(client, target_client)))
        self._client_of = clients.of
        self._background = BackgroundWork()
        self._scheduler = scheduler or Scheduler()
        self._opened.callback(self._background.join)
        if scheduler is None:
            self._opened.callback(self._scheduler.close)
        self._admin = admin
        self._settings = settings
        self._clock = SteadyClock(clock or SystemClock())
        # The broker's statistics of the levels, of held messages and of dead letters.
        self.members = StatusCache(partial(reported, admin, clock=self._clock))
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._topics: list[ServedTopic] = []
        # Messages released from partitions that were given back since, by level topic.
        self._released: Counter[str] = Counter()
        self._advertised: dict[str, str] = {}
        self._looked_s = time.monotonic()
        self._is_running = False
        self._directory = settings.directory / f"dispatcher-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        sweep(settings.directory)
        for name in level_topics:
            self.add(name)

    @property
    def descriptions(self) -> tuple[LevelTopicDescription, ...]:
        """The descriptions of the level topics that are served."""
        with self._lock:
            return tuple(topic.description for topic in self._topics)

    def descriptions_of(self, level_topic: str) -> DescriptionCache | None:
        """Return this process's copy of the description of a level topic; None if not served."""
        with self._lock:
            found = (t.descriptions for t in self._topics if t.description.topic == level_topic)
            return next(found, None)

    def stats(self) -> Mapping[tuple[str, int], OwnerStats]:
        """Return the statistics of the window partitions of all processes, by (topic, index)."""
        with self._lock:
            owners = {
                (topic.description.topic, index): owner
                for topic in self._topics
                for index, owner in topic.owners.items()
            }
        return self.processes.stats() | {key: owner.stats.now() for key, owner in owners.items()}

    def released(self) -> Counter[str]:
        """Return the number of messages that all processes have ever released, by level topic."""
        total = self.processes.released()
        with self._lock:
            total += self._released
            for topic in self._topics:
                for owner in topic.owners.values():
                    total[topic.description.topic] += owner.stats.now().released
            return total

    def add(self, level_topic: str) -> None:
        """Serve one more level topic; call it in the thread of `run`, or before."""
        description = served(self._admin, level_topic, search=True)
        if self.descriptions_of(description.topic) is not None:
            return
        if self._settings.delivery is Delivery.EFFECTIVELY_ONCE:
            require_on_targets(self._admin, description)
        topic = self._join(description)
        with self._lock:
            self._topics.append(topic)
        if self._is_running:
            self._begin(topic)

    def remove(self, level_topic: str) -> None:
        """Give up a level topic, by its full name; call it in the thread of `run`."""
        for topic in [each for each in self._topics if each.description.topic == level_topic]:
            self._end(topic)
            self._revoke([(topic, index) for index in topic.owners])
            topic.membership.close()
            with self._lock:
                self._topics.remove(topic)

    def _join(self, description: LevelTopicDescription) -> ServedTopic:
        """Return a level topic, whose group of dispatchers is entered when it is read."""
        settings = self._settings
        membership = Membership(
            self._client, self._admin, description, settings.delivery, self.name
        )

        def read_again() -> LevelTopicDescription:
            found = topics.describe(self._admin, description.topic)
            check_dispatched(found)
            return found

        descriptions = DescriptionCache(read_again, description)
        return ServedTopic(descriptions, membership)

    @property
    def silent_s(self) -> float:
        """Time since one of the processes last looked at all its level topics, in s."""
        with self._lock:
            looked_s = min((topic.looked_s for topic in self._topics), default=self._looked_s)
        silent_s = time.monotonic() - min(looked_s, self._looked_s)
        return max(silent_s, self.processes.silent_s)

    def groups(self) -> tuple[ServedGroup, ...]:
        """Return the level topics that are served, with the owners of their partitions."""
        stats: dict[str, dict[int, OwnerStats]] = {}
        for (level_topic, index), each in sorted(self.stats().items(), key=itemgetter(0)):
            stats.setdefault(level_topic, {})[index] = each
        starting = self.processes.starting
        with self._lock:
            return tuple(
                ServedGroup(
                    topic.description,
                    topic.membership.name,
                    self._present(topic.group, stats.get(topic.description.topic, {})),
                    time.monotonic() - topic.group_s,
                    {index: task.owner.host for index, task in topic.owners.items()},
                    stats.get(topic.description.topic, {}),
                    topic.problem,
                    starting,
                    dict(topic.refusals),
                )
                for topic in self._topics
            )

    def _present(self, group: GroupState | None, here: Collection[int]) -> GroupState | None:
        """Return a group with its present owners; ``here`` are the partitions of this command."""
        # Without other commands it is read rarely, and never while only an owner in a further
        # process is lost. The processes report every second.
        if group is None or not {*group.members} <= {*self.processes.names}:
            return group
        return replace(group, owners={k: name for k, name in group.owners.items() if k in here})

    def advertise(self, url: str) -> None:
        """Publish the address of the HTTP service with every partition acquired from now on."""
        self._advertised = {ADDRESS_PROPERTY: url}
        self.processes.url = url

    def run(self, tick: Callable[[], None] | None = None) -> None:
        """Serve until `stop` is called, with a tick each second; then give up all partitions."""
        try:
            # Other dispatchers see the folder under its name only when it is locked.
            folder = self._directory.with_name(f"new-{self._directory.name}")
            make_spill_folder(folder)
            with suppress(OSError):  # no room for the folder, or a file system without locks
                self._opened.enter_context(locked(folder))
            with suppress(OSError):
                folder.rename(self._directory)
            self._is_running = True
            self._begun_s = time.monotonic()
            self._start_processes()
            for topic in self._topics:
                self._begin(topic)
            while not self._stopping.is_set():
                for topic in tuple(self._topics):
                    if topic.given_up is not None:
                        # Dispatchers of a later version take over the partitions.
                        name = topic.description.topic
                        log.warning("level topic %s is given up: %s", name, topic.given_up)
                        self.remove(name)
                self.processes.look()
                self._looked_s = time.monotonic()
                if tick is not None:
                    tick()
                self._stopping.wait(_LOOK_S)
        finally:
            self.processes.request_stop()
            # No look may acquire a partition any more while all are given up.
            for topic in self._topics:
                self._end(topic)
            self._revoke([(topic, index) for topic in self._topics for index in topic.owners])
            for topic in self._topics:
                topic.membership.close()
            self._opened.close()
            shutil.rmtree(self._directory, ignore_errors=True)
            self.processes.join()

    def stop(self) -> None:
        """Request the end of `run`; safe in a signal handler and from any thread."""
        self._stopping.set()

    def _start_processes(self) -> None:
        windows = (topic.description.window_partitions for topic in self._topics)
        names = self.processes.start(self.name, max(windows, default=DEFAULT_WINDOW_PARTITIONS))
        if len(names) > 1:
            self._names = names

    def _begin(self, topic: ServedTopic) -> None:
        """Look at a level topic now and then: a task, so that none waits for another's broker."""
        task = Task(partial(self._look, topic), topic.description.topic, self._scheduler)
        topic.task = task
        topic.descriptions.ask = task.wake
        task.wake()

    def _end(self, topic: ServedTopic) -> None:
        """Look at a level topic no more."""
        if topic.task is not None:
            topic.task.end()

    def _look(self, topic: ServedTopic) -> float:
        """Look at a level topic; return the time of the next look."""
        try:
            with translate_errors():
                self._reassign(topic)
        except UpgradeRequiredError as error:
            topic.given_up = error
            return NEVER
        except BrokerError as error:
            topic.failed(error)
        else:
            if not topic.descriptions.failing:
                topic.works()
        topic.looked_s = time.monotonic()
        next_s = topic.looked_s + _LOOK_S
        if topic.problem or not topic.is_alone(self._names):
            return next_s
        # Owners that end, and those that need a fresh description, wake the task.
        read_s = topic.descriptions.next_read_s(topic.resting_s)
        return max(next_s, min(read_s, topic.group_s + self._alone_s))

    @property
    def _alone_s(self) -> float:
        """Time between two looks at a group whose only member has all partitions, in s."""
        return max(_ALONE_S, min(len(self._topics) / _LOOKS_PER_S, _LONGEST_ALONE_S))

    def _reassign(self, topic: ServedTopic) -> None:
        """Read the group, and acquire or revoke partitions."""
        now = time.monotonic()
        for index, owner in list(topic.owners.items()):
            ended = owner.ended.is_set()
            topic.watch_owner(index, owner)
            if ended:
                self._forget(topic, index)
                topic.retry_s[index] = now + _RETRY_S
                topic.lost.add(index)
        try:
            topic.descriptions.current(topic.resting_s)
            topic.watch_pauses()
            if topic.is_alone(self._names):
                assert topic.group is not None
                members = topic.group.members
                if now >= topic.group_s + self._alone_s and topic.membership.is_still(members):
                    topic.group_s = time.monotonic()
                if now < topic.group_s + self._alone_s:
                    return
            group = topic.membership.read_group()
        except UpgradeRequiredError:
            raise
        except BrokerError:
            # The broker decides who owns a partition, so those that this process had are safe to
            # acquire again without knowing the group.
            self._acquire_due(topic, sorted(topic.lost), now)
            raise
        topic.group, topic.group_s = group, time.monotonic()
        topic.lost.intersection_update(group.unknown)
        revoke, acquire, probe = assign(
            group,
            topic.membership.name,
            topic.owners.keys(),
            topic.description.window_partitions,
            self._names if now < self._begun_s + JOINING_S else (),
        )
        self._revoke([(topic, index) for index in revoke])
        if probe and now >= topic.probe_s:
            topic.probe_s = now + _PROBE_S
            topic.probes += 1
            acquire.append(probe[topic.probes % len(probe)])
        self._acquire_due(topic, acquire, now)

    def _acquire_due(self, topic: ServedTopic, partitions: Sequence[int], now: float) -> None:
        """Acquire what is not left to others after a failure; raise the first error at the end."""
        failure: BrokerError | None = None
        last_s = topic.retry_s
        for index in sorted(partitions, key=lambda each: last_s.get(each, 0.0)):
            if now >= last_s.get(index, 0.0):
                try:
                    self._acquire(topic, index)
                except UpgradeRequiredError:
                    raise
                except BrokerError as error:
                    failure = failure or error
                    last_s[index] = time.monotonic()  # the others come before it
                    if last_s[index] > now + _PATIENCE_S:
                        break
        if failure is not None:
            raise failure

    def _acquire(self, topic: ServedTopic, index: int) -> None:
        sources = window_sources(topic.description, index)
        try:
            properties = {NAME_PROPERTY: topic.membership.name, **self._advertised}
            lock = PartitionLock(self._client, self._admin, sources, "dispatch", properties)
        except AlreadyRunningError as error:
            topic.refusals[index] = str(error)
            return
        topic.refusals.pop(index, None)
        # A topic's name may be longer than that of a file.
        digest = hashlib.sha256(topic.description.topic.encode()).hexdigest()[:16]
        descriptions, start = topic.descriptions, self._background.start
        owner = PartitionOwner(
            Host(self._client, self._admin, descriptions, self._clock, start=start),
            index,
            lock,
            self._directory / f"{digest}-{index}",
            self._settings,
            self._client_of,
        )
        assert topic.task is not None
        task = OwnerTask(owner, self._clock, self._scheduler, topic.task.wake)
        with self._lock:
            topic.owners[index] = task
        topic.lost.discard(index)
        task.wake()

    def _revoke(self, partitions: Sequence[tuple[ServedTopic, int]]) -> None:
        """Stop owners, all at the same time, and wait for their end."""
        for topic, index in partitions:
            topic.owners[index].stop()
        for topic, index in partitions:
            topic.owners[index].ended.wait()
            topic.watch_owner(index, topic.owners[index])
            self._forget(topic, index)

    def _forget(self, topic: ServedTopic, index: int) -> None:
        """Remove an owner that has ended."""
        with self._lock:
            owner = topic.owners.pop(index)
            self._released[topic.description.topic] += owner.stats.now().released
