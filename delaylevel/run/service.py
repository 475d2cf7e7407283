"""The local service: the movers and the dispatcher of level topics, in one process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.failures import translate_errors
from delaylevel.cluster.logs import silent
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.scheduler import Scheduler
from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.dispatcher.processes import Processes
from delaylevel.dispatcher.service import PAUSES, check_dispatched
from delaylevel.dispatcher.status import DispatchReporter, start_checks
from delaylevel.errors import InvalidInputError
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Mover
from delaylevel.mover.reporting import MoverReporter, lock_check
from delaylevel.mover.service import MoverService, check_movable
from delaylevel.topics import roster
from delaylevel.web.reports import ProbeCheck, Reporter

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
        trigger_ms: time between two passes of a mover, in ms; by default
            a fifth of the shortest lead, between 0.2 and 5 s.
        moves: False to leave moving to others, and to refuse level topics without a window.
        processes: further processes of the dispatcher.

    Attributes:
        movers: the service that moves; without level topics if this service does not move.
        dispatcher: the dispatcher; None while no level topic needs one.
        roster: the level topics to serve.

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
        self.moves = moves
        self._processes = processes
        self._open_client = open_client
        self.dispatcher: Dispatcher | None = None
        self._stopping = threading.Event()
        self._closing = ExitStack()
        # Movers and window partitions share the threads.
        self._scheduler = self._closing.enter_context(closing(Scheduler()))
        try:
            with translate_errors():
                client = self._closing.enter_context(closing(open_client()))
                self.movers = MoverService(
                    client, admin, self._scheduler, trigger_ms=trigger_ms, target_client=open_client
                )
                self.roster = roster.Roster(admin, level_topics, self._serve, namespace)
                self.roster.start()
                if namespace is not None or self.roster.refused:
                    self._dispatching()  # for level topics that can be served later
        except BaseException:
            self._closing.close()
            raise

    @property
    def descriptions(self) -> tuple[LevelTopicDescription, ...]:
        """The descriptions of the level topics that are served."""
        found = {item.topic: item for item, _ in self.movers.served()}
        if self.dispatcher is not None:
            found = {item.topic: item for item in self.dispatcher.descriptions} | found
        return tuple(found[topic] for topic in sorted(found))

    def is_dispatched(self, topic: str) -> bool:
        """Return True if the dispatcher serves a level topic."""
        return self.dispatcher is not None and self.dispatcher.descriptions_of(topic) is not None

    def start_checks(self) -> list[ProbeCheck]:
        """Return the conditions under which the start is over: locks, and partitions read.

        A process on standby meets them, too.
        """
        checks = [lock_check(*each) for each in self.movers.served()]
        groups = () if self.dispatcher is None else self.dispatcher.groups()
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
            self.movers.start()
            try:
                if self.dispatcher is not None:
                    self.dispatcher.run(look)
                else:
                    look()
                    while not self._stopping.wait(1.0):
                        look()
            finally:
                self.movers.close()

    def stop(self) -> None:
        """Request the end of `run`; safe in a signal handler and from any thread."""
        self._stopping.set()
        self.movers.stop()
        if self.dispatcher is not None:
            self.dispatcher.stop()

    def close(self) -> None:
        """Close the connections of a service that was not run; `run` closes them itself."""
        self._closing.close()

    def _look(self) -> None:
        """Begin to serve what can be served now, and forget what was deleted."""
        for item, _ in self.movers.served():
            if item.final_window is FinalWindow.TRACKER and not self.is_dispatched(item.topic):
                self.movers.remove(item.topic)  # the dispatcher has given it up
        for gone in self.roster.look(item.topic for item in self.descriptions):
            log.warning("%s was deleted", gone)
            if gone in self.movers.stats():
                self.movers.remove(gone)
            if self.dispatcher is not None:
                self.dispatcher.remove(gone)

    def _serve(self, description: LevelTopicDescription, named: bool) -> None:
        """Serve a level topic. Of one that a Function moves, only the window is served."""
        effectively_once = self._settings.delivery is Delivery.EFFECTIVELY_ONCE
        if effectively_once and description.final_window is FinalWindow.BROKER:
            raise InvalidInputError(
                f"level topic {description.topic} has the final window 'broker', for which movers "
                "deliver at least once: leave out --delivery, or use the final window 'tracker'"
            )
        if not self.moves:
            check_dispatched(description)
        elif named:  # of a whole namespace, what a Function moves is served in part
            check_movable(description)
        descriptions = None
        if description.final_window is FinalWindow.TRACKER:
            self._dispatching().add(description.topic)
            descriptions = self._dispatching().descriptions_of(description.topic)
        if self.moves and description.mover is not Mover.FUNCTION:
            # Both read the description every few seconds, so they share it.
            self.movers.add(description, descriptions)
        elif self.moves and descriptions is not None:
            log.info("%s is moved by a Function; its window is served here", description.topic)

    def _dispatching(self) -> Dispatcher:
        """Return the dispatcher, which is opened when the first level topic needs it."""
        if self.dispatcher is None:
            client = self._closing.enter_context(closing(self._open_client()))
            self.dispatcher = Dispatcher(
                client,
                self._admin,
                (),
                self._settings,
                target_client=self._open_client,
                scheduler=self._scheduler,
                processes=self._processes,
            )
        return self.dispatcher


def reporters_of(service: LocalService) -> list[Any]:
    """Return the reporters of a service, which collect its metrics, too."""
    found: list[Any] = [roster.RosterReporter(service.roster)]
    if service.dispatcher is not None:
        found.insert(0, DispatchReporter(service.dispatcher))
    if service.moves:
        found.insert(0, MoverReporter(service.movers, service.is_dispatched))
    return found


def further_process(
    connection: Connection,
    level_topics: Sequence[str],
    settings: DispatchSettings,
    namespace: str | None,
    configure: Callable[[], object],
    name: str,
    names: Sequence[str],
) -> tuple[LocalService, Sequence[Reporter]]:
    """Open the dispatcher of a further process; with the last two arguments an :data:`.Opener`."""
    configure()  # the log of a new interpreter
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
    return service, reporters_of(service)
