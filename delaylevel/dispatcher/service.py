"""The dispatcher: serves the window topics of one or more level topics, beside its like."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from delaylevel.cluster.failures import translate_errors
from delaylevel.cluster.partition_lock import PartitionLock
from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import AlreadyRunningError, BrokerError, LevelTopicError
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.topic_name import TopicName
from delaylevel.topics import registry as topics
from delaylevel.topics.deduplication import without_deduplication
from delaylevel.topics.stats import window_stats

from .assignment import Membership, Reassignment, assign
from .owner import OwnerSettings, PartitionOwner, window_sources
from .stats import OwnerStats

log = logging.getLogger(__name__)

_LOOK_S = 1.0
# How often a partition of another dispatcher is asked for, so that one that stands still loses it.
_KNOCK_S = 3.0
# After a failure, a partition is left to others for a while.
_RETRY_S = 2.0
# A level topic's targets may grow while it is served.
_DESCRIBE_S = 5.0


@dataclass(frozen=True)
class DispatchSettings:
    """How a dispatcher works.

    Attributes:
        delivery: batched, or unbatched through broker deduplication on every target.
        checkpoint_ms: how often the low-water mark is written down and acknowledged.
        memory_bytes: the most memory for payloads that are pending, of each level topic.
        remember: how many ids of one target and source partition are remembered.
        directory: for what does not fit in memory; each process has a folder of its own there.
        name: of this dispatcher among others; made from host and process where None.
    """

    directory: Path
    delivery: Delivery = Delivery.AT_LEAST_ONCE
    checkpoint_ms: int = 1_000
    memory_bytes: int = 256 << 20
    remember: int = 2_000_000
    name: str | None = None


@dataclass(eq=False)
class _Family:
    """One level topic that is served."""

    description: LevelTopicDescription
    membership: Membership
    described_s: float
    pumps: dict[int, PartitionOwner] = field(default_factory=dict)
    rest_until_s: dict[int, float] = field(default_factory=dict)
    knock_s: float = 0.0
    knocked: int = 0


class Dispatcher:
    """Releases what is due from the window topics of level topics, until it is stopped.

    Several may run, on one machine or many: they share out the window partitions, and take over
    those of one that has died or stands still.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        admin: the admin interface.
        level_topics: business topics or level topics, by name.
        settings: how it works.
        clock: says what is due.

    Raises:
        LevelTopicError: one is missing, or has another final window than ``tracker``; or, with
            effectively-once delivery, a target without broker deduplication.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        level_topics: Sequence[str],
        settings: DispatchSettings,
        clock: Clock | None = None,
    ) -> None:
        self._client = client
        self._admin = admin
        self._settings = settings
        self._clock = clock or SystemClock()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._families: list[_Family] = []
        self._directory = settings.directory / f"dispatcher-{os.getpid()}"
        described = [served(admin, name) for name in dict.fromkeys(level_topics)]
        if settings.delivery is Delivery.EFFECTIVELY_ONCE:
            for description in described:
                check_deduplication(admin, description)
        sweep(settings.directory)
        for description in described:
            membership = Membership(client, admin, description, settings.name)
            self._families.append(_Family(description, membership, time.monotonic()))

    @property
    def descriptions(self) -> tuple[LevelTopicDescription, ...]:
        """The level topics that are served."""
        return tuple(family.description for family in self._families)

    def figures(self) -> Mapping[tuple[str, int], OwnerStats]:
        """Return the figures of every window partition that this process owns.

        Returns:
            By (level topic, index of the window partition).
        """
        with self._lock:
            pumps = [
                (family.description.topic, index, pump)
                for family in self._families
                for index, pump in family.pumps.items()
            ]
        return {(topic, index): pump.figures.now() for topic, index, pump in pumps}

    def run(self, tick: Callable[[], None] | None = None) -> None:
        """Serve until `stop` is called; then give everything back.

        Args:
            tick: called about once a second in this thread.
        """
        try:
            while not self._stopping.is_set():
                for family in self._families:
                    try:
                        with translate_errors():
                            self._look(family)
                    except BrokerError as error:
                        log.warning("%s: %s", family.description.topic, error)
                if tick is not None:
                    tick()
                self._stopping.wait(_LOOK_S)
        finally:
            self._give_back([(f, p) for f in self._families for p in list(f.pumps.values())])
            for family in self._families:
                family.membership.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    def stop(self) -> None:
        """Ask `run` to end; safe in a signal handler and from any thread."""
        self._stopping.set()

    def _look(self, family: _Family) -> None:
        """See who is there, and take or give back partitions."""
        now = time.monotonic()
        for index, pump in list(family.pumps.items()):
            if not pump.is_alive():
                with self._lock:
                    del family.pumps[index]
                family.rest_until_s[index] = now + _RETRY_S
        if now - family.described_s > _DESCRIBE_S:
            family.described_s = now
            family.description = served(self._admin, family.description.topic)
        standing = family.membership.standing()
        partitions = family.description.window_partitions
        moves = assign(standing, family.membership.name, family.pumps.keys(), partitions)
        self._give_back([(family, family.pumps[index]) for index in moves.give])
        for index in moves.take:
            if now >= family.rest_until_s.get(index, 0.0):
                self._take(family, index)
        self._knock(family, moves, now)

    def _knock(self, family: _Family, moves: Reassignment, now: float) -> None:
        if not moves.knock or now < family.knock_s:
            return
        family.knock_s = now + _KNOCK_S
        family.knocked += 1
        index = moves.knock[family.knocked % len(moves.knock)]
        if now >= family.rest_until_s.get(index, 0.0):
            self._take(family, index)

    def _take(self, family: _Family, index: int) -> None:
        sources = window_sources(family.description, index)
        try:
            claim = PartitionLock(self._client, self._admin, sources, "dispatch")
        except AlreadyRunningError:
            return
        topic = TopicName.parse(family.description.topic)
        directory = self._directory / f"{topic.namespace_path}/{topic.local}".replace("/", "+")
        settings = self._settings
        pump = PartitionOwner(
            self._client,
            self._admin,
            lambda: family.description,
            index,
            claim,
            directory / str(index),
            OwnerSettings(
                delivery=settings.delivery,
                checkpoint_ms=settings.checkpoint_ms,
                memory_bytes=max(
                    settings.memory_bytes // family.description.window_partitions, 1 << 20
                ),
                remember=settings.remember,
            ),
            self._clock,
        )
        with self._lock:
            family.pumps[index] = pump
        pump.start()

    def _give_back(self, pumps: Sequence[tuple[_Family, PartitionOwner]]) -> None:
        for _, pump in pumps:
            pump.stop()
        for family, pump in pumps:
            pump.join()
            with self._lock:
                family.pumps.pop(pump.partition, None)


def served(admin: TopicAdmin, name: str) -> LevelTopicDescription:
    """Return a level topic that a dispatcher can serve, by its name or its business topic's.

    Raises:
        LevelTopicError: it is missing, or its final window is not ``tracker``.
    """
    description = topics.describe(admin, name)
    if description.final_window is not FinalWindow.TRACKER:
        raise LevelTopicError(
            f"level topic {description.topic} has the final window "
            f"{description.final_window.value!r}: the broker itself delivers what is due, and "
            "there is nothing to dispatch"
        )
    return description


@dataclass(frozen=True)
class Ownership:
    """How one window partition stands.

    Attributes:
        partition: its index.
        owner: the name of the dispatcher's consumer; None for nobody.
        address: where it is connected from.
        backlog_entries: entries that are not acknowledged.
        oldest_publish_ms: when the oldest of them was published.
    """

    partition: int
    owner: str | None
    address: str | None
    backlog_entries: int
    oldest_publish_ms: int | None


def owners(admin: TopicAdmin, name: str) -> list[Ownership]:
    """Return how each window partition of a level topic stands, by index.

    Raises:
        LevelTopicError: the level topic is missing, or its final window is not ``tracker``.
    """
    return [
        Ownership(
            partition.index,
            partition.owner.name if partition.owner else None,
            partition.owner.address if partition.owner else None,
            partition.backlog_entries,
            partition.oldest_publish_ms,
        )
        for partition in window_stats(admin, served(admin, name)).reported
    ]


def check_deduplication(admin: TopicAdmin, description: LevelTopicDescription) -> None:
    """Raise LevelTopicError unless the broker deduplicates on every target that exists."""
    without = without_deduplication(admin, description)
    if without:
        names = ", ".join(map(str, without))
        raise LevelTopicError(
            f"effectively-once needs deduplication, which is off for {names}. "
            f"Turn it on with `pulsar-admin topicPolicies set-deduplication --enable {without[0]}` "
            "(or for the namespace: `pulsar-admin namespaces set-deduplication --enable "
            f"{without[0].namespace_path}`), or dispatch with --delivery at-least-once"
        )


def sweep(directory: Path) -> None:
    """Delete what dispatchers that no longer run have left behind."""
    for each in directory.glob("dispatcher-*"):
        pid = each.name.rpartition("-")[2]
        if not pid.isdigit() or _alive(int(pid)):
            continue
        shutil.rmtree(each, ignore_errors=True)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


__all__ = ["DispatchSettings", "Dispatcher", "check_deduplication", "served"]
