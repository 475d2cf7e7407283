"""The local service: the movers and the dispatcher of level topics, in one process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.failures import translate_errors
from delaylevel.cluster.logs import silent
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.scheduler import Lanes
from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.dispatcher.processes import Processes
from delaylevel.dispatcher.service import PAUSES, check_dispatched, partition_owners
from delaylevel.dispatcher.stats import OwnerStats
from delaylevel.dispatcher.status import DispatchCollector, start_checks
from delaylevel.errors import BrokerError, InvalidInputError
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.delivery import Delivery, ForwardReport
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Mover
from delaylevel.mover.reporting import MoverCollector, lock_check
from delaylevel.mover.service import MoverService, check_movable
from delaylevel.prometheus import Collector
from delaylevel.topics import roster
from delaylevel.topics.status import LevelTopicStatus
from delaylevel.web.reports import ProbeCheck, Reporter, reporters_of

# Time for which the broker's statistics of what waits are used again.
_MEMBERS_S = 1.0
# The longest time without progress: no partition taken over, no message released.
_PATIENCE_S = 60.0
# The first values that a partition reports after its takeover may be older than it.
_CHECKPOINTS = 2


@dataclass(frozen=True)
class OnceReport:
    """The result of one run.

    Attributes:
        moved: numbers of messages that were handed off, by outcome.
        released: number of messages that the dispatcher has published.
    """

    moved: ForwardReport
    released: int


class ReleaseOnce:
    """Stops a dispatcher when it has released everything that was due at the start.

    Window partitions of other dispatchers are left to them.
    """

    def __init__(
        self, dispatcher: Dispatcher, admin: TopicAdmin, clock: Clock | None = None
    ) -> None:
        self._dispatcher = dispatcher
        self._admin = admin
        self._until_ms = (clock or SystemClock()).now_ms()
        self._checkpoints: dict[tuple[str, int], int] = {}
        self._missing: list[str] = []
        self._progress = (-1, -1)
        self._progress_s = time.monotonic()
        self._failed = False

    def look(self) -> None:
        """Stop the dispatcher if everything is released, or if there is no progress."""
        found = self._dispatcher.stats()
        self._missing = [
            f"{description.window_topic.partition(index)}"
            for description in self._dispatcher.descriptions
            for index in self._unfinished(description.topic, description.window_partitions, found)
        ]
        ended = sum(sum(s.held.values()) + s.dead + s.dropped + s.expired for s in found.values())
        progress = (-len(self._missing), self._dispatcher.released().total() + ended)
        now_s = time.monotonic()
        if progress > self._progress:
            self._progress, self._progress_s = progress, now_s
        self._failed = bool(self._missing) and now_s - self._progress_s > _PATIENCE_S
        if self._failed or not self._missing:
            self._dispatcher.stop()

    def check(self) -> None:
        """Raise BrokerError if there was no progress."""
        if self._failed:
            raise BrokerError(
                f"nothing was released for {_PATIENCE_S:.0f} s, although messages may be due in "
                f"{', '.join(self._missing)}. The log has the reason"
            )

    def _unfinished(
        self, topic: str, partitions: int, found: Mapping[tuple[str, int], OwnerStats]
    ) -> list[int]:
        mine = {index for index in range(partitions) if (topic, index) in found}
        left = [index for index in mine if not self._finished((topic, index), found[topic, index])]
        if len(mine) < partitions:
            owners = {each.partition: each.owner for each in partition_owners(self._admin, topic)}
            left += [i for i in range(partitions) if i not in mine and owners.get(i) is None]
        return sorted(left)

    def _finished(self, key: tuple[str, int], stats: OwnerStats) -> bool:
        if stats.state in ("recovering", "stopped"):
            self._checkpoints.pop(key, None)
            return False
        since = self._checkpoints.setdefault(key, stats.checkpoints)
        if stats.checkpoints < since + _CHECKPOINTS or stats.in_flight:
            return False
        return stats.next_due_ms is None or stats.next_due_ms > self._until_ms


log = logging.getLogger(__name__)


class LocalService:
    """Service that moves and releases the messages of level topics, without Spark.

    Several processes may serve the same level topics: one moves the messages of a level topic, all
    share its window partitions, and each takes over from one that ends, dies or hangs.

    Args:
        open_client: function that returns a new ``pulsar.Client`` of the cluster. The movers, the
            dispatcher and each target have connections of their own.
        level_topics: names of business topics or level topics.
        settings: settings of the dispatcher.
        namespace: ``tenant/namespace`` whose level topics are all served, also later ones.
        trigger_ms: time between two passes of a mover, in ms; by default a fifth of the lead.
        moves: False to leave moving to others, and to refuse level topics without a window.
        processes: further processes of the dispatcher.

    Attributes:
        movers: the service that moves, as a tuple; empty if it does not move.

    Raises:
        LevelTopicError: none of the level topics can be served: it is missing, or a Function moves
            its messages. If others can be served, this one is reported and tried again.
        InvalidInputError: effectively-once delivery with the final window ``broker``.
    """

    def __init__(
        self,
        open_client: Callable[[], Any],
        admin: TopicAdmin,
        level_topics: Sequence[str],
        settings: DispatchSettings,
        *,
        namespace: str | None = None,
        trigger_ms: int | None = None,
        moves: bool = True,
        processes: Processes | None = None,
    ) -> None:
        self._admin = admin
        self._settings = settings
        self._moves = moves
        self._processes = processes
        self._open_client = open_client
        self._dispatcher: Dispatcher | None = None
        self._stopping = threading.Event()
        self._closing = ExitStack()
        # Movers and window partitions share the threads.
        self._lanes = self._closing.enter_context(closing(Lanes()))
        try:
            with translate_errors():
                client = self._closing.enter_context(closing(open_client()))
                self._movers = MoverService(
                    client,
                    admin,
                    trigger_ms=trigger_ms,
                    target_client=open_client,
                    lanes=self._lanes,
                )
                self._roster = self._movers.roster = roster.Roster(
                    admin, level_topics, self._serve, namespace
                )
                self._roster.start()
                if namespace is not None or self._roster.refused:
                    self._dispatching()  # for level topics that can be served later
        except BaseException:
            self._closing.close()
            raise
        self.movers = (self._movers,) if moves else ()

    @property
    def dispatchers(self) -> tuple[Dispatcher, ...]:
        """The dispatcher, as a tuple; empty if no level topic needs one."""
        return () if self._dispatcher is None else (self._dispatcher,)

    @property
    def refused(self) -> Mapping[str, str]:
        """The reason for each level topic that cannot be served now, by its name."""
        given_up = {} if self._dispatcher is None else self._dispatcher.refused
        return {**self._roster.refused, **given_up}

    @property
    def descriptions(self) -> tuple[LevelTopicDescription, ...]:
        """The descriptions of the level topics that are served."""
        found = {item.topic: item for item in self._movers.descriptions}
        if self._dispatcher is not None:
            found = {item.topic: item for item in self._dispatcher.descriptions} | found
        return tuple(found[topic] for topic in sorted(found))

    def members(self) -> dict[str, LevelTopicStatus | None]:
        """Return the broker's last statistics by level topic, without waiting for them.

        They are requested again after some seconds, while somebody asks; None until then.
        """
        cache = self._movers.members
        return {item.topic: cache.latest(item, _MEMBERS_S) for item in self.descriptions}

    def start_checks(self) -> list[ProbeCheck]:
        """Return the conditions under which the start is over: locks, and partitions read.

        A process on standby meets them, too.
        """
        movers = self._movers.stats()
        checks = [
            lock_check(description, movers[description.topic])
            for description in self._movers.descriptions
            if description.topic in movers
        ]
        groups = () if self._dispatcher is None else self._dispatcher.groups()
        return checks + [check for group in groups for check in start_checks(group)]

    def run(self, tick: Callable[[], None] | None = None) -> None:
        """Serve until `stop` is called; then finish the messages in flight.

        Args:
            tick: function that is called about once a second in this thread.

        Raises:
            SpillError: the directory for spill files cannot be used.
        """

        def look() -> None:
            self._look()
            if tick is not None:
                tick()

        with self._closing:
            if self._dispatcher is None:
                self._movers.run(tick)
                return
            self._movers.start()
            try:
                self._dispatcher.run(look)
            finally:
                self._movers.close()

    def run_once(self, tick: Callable[[], None] | None = None) -> OnceReport:
        """Move everything that is ready now, then release everything that is due by then.

        Args:
            tick: function that is called about once a second while messages are released.

        Raises:
            AlreadyRunningError: another mover has a level topic.
            BrokerError: messages could not be moved, or window partitions not be taken over.
        """
        with self._closing:
            moved, failure = ForwardReport(), None
            try:
                moved = self._movers.run_once()
            except BrokerError as error:
                failure = error  # what is due is released nevertheless
            released = 0
            if self._dispatcher is not None and not self._stopping.is_set():
                release = ReleaseOnce(self._dispatcher, self._admin)

                def look() -> None:
                    release.look()
                    if tick is not None:
                        tick()

                self._dispatcher.run(look)
                release.check()
                released = self._dispatcher.released().total()
            if failure is not None:
                raise failure
            return OnceReport(moved, released)

    def stop(self) -> None:
        """Request the end of `run`; safe in a signal handler and from any thread."""
        self._stopping.set()
        self._movers.stop()
        if self._dispatcher is not None:
            self._dispatcher.stop()

    def close(self) -> None:
        """Close the connections of a service that was not run; `run` closes them itself."""
        self._closing.close()

    def _check(self, description: LevelTopicDescription) -> None:
        effectively_once = self._settings.delivery is Delivery.EFFECTIVELY_ONCE
        if effectively_once and description.final_window is FinalWindow.BROKER:
            raise InvalidInputError(
                f"level topic {description.topic} has the final window 'broker', for which this "
                "mover delivers at least once: use `delaylevel mover run` (the Spark job), or the "
                "final window 'tracker'"
            )

    def _look(self) -> None:
        """Begin to serve what can be served now, and forget what was deleted."""
        given_up = () if self._dispatcher is None else self._dispatcher.refused
        served = {item.topic for item in self.descriptions} | set(given_up)
        for gone in self._roster.look(served):
            log.warning("%s was deleted", gone)
            self._remove(gone)

    def _serve(self, description: LevelTopicDescription, named: bool) -> None:
        """Serve a level topic. Of one that a Function moves, only the window is served."""
        self._check(description)
        if not self._moves:
            check_dispatched(description)
        elif named:
            check_movable(description)
        descriptions = None
        if description.final_window is FinalWindow.TRACKER:
            self._dispatching().add(description.topic)
            descriptions = self._dispatching().descriptions_of(description.topic)
        if self._moves and description.mover is not Mover.FUNCTION:
            # Both read the description every few seconds, so they share it.
            self._movers.add(description, descriptions)
        elif self._moves and descriptions is not None:
            log.info("%s is moved by a Function; its window is served here", description.topic)

    def _dispatching(self) -> Dispatcher:
        """Return the dispatcher, which is opened when the first level topic needs it."""
        if self._dispatcher is None:
            client = self._closing.enter_context(closing(self._open_client()))
            self._dispatcher = Dispatcher(
                client,
                self._admin,
                (),
                self._settings,
                target_client=self._open_client,
                lanes=self._lanes,
                processes=self._processes,
            )
        return self._dispatcher

    def _remove(self, topic: str) -> None:
        if topic in self._movers.stats():
            self._movers.remove(topic)
        if self._dispatcher is not None:
            self._dispatcher.remove(topic)


class ServiceCollector:
    """Collector of the series of movers and dispatchers, with the reporters of both."""

    def __init__(self, service: LocalService) -> None:
        def is_dispatched(topic: str) -> bool:
            return any(each.descriptions_of(topic) is not None for each in service.dispatchers)

        self._collectors: list[Collector] = [
            *(MoverCollector(each, is_dispatched) for each in service.movers),
            *map(DispatchCollector, service.dispatchers),
        ]

    def collect(self) -> Iterator[Any]:
        """Yield every series."""
        for collector in self._collectors:
            yield from collector.collect()


def further_process(
    connection: Connection,
    level_topics: Sequence[str],
    settings: DispatchSettings,
    namespace: str | None,
    configure: Callable[[], object],
    name: str,
    names: Sequence[str],
) -> tuple[LocalService, Sequence[Reporter]]:
    """Open the dispatcher of a further process; with the last two arguments an :data:`.Opener`.

    Args:
        configure: function that prepares the log of a new interpreter.
    """
    configure()
    # The first process tells what is not served, and what is paused.
    for quiet in (roster.__name__, PAUSES):
        logging.getLogger(quiet).setLevel(logging.CRITICAL)
    service = LocalService(
        partial(connection.open_service_client, logger=silent()),
        Admin.from_connection(connection, for_service=True),
        level_topics,
        replace(settings, name=name, processes=tuple(names)),
        namespace=namespace,
        moves=False,
    )
    return service, reporters_of(ServiceCollector(service))
