"""The local service: the movers and the dispatcher of level topics, in one process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

from delaylevel.cluster.failures import translate_errors
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.repeated_warning import RepeatedWarning
from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.dispatcher.reporting import start_checks
from delaylevel.errors import BrokerError, InvalidInputError, LevelTopicError
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Mover
from delaylevel.mover.reporting import lock_check
from delaylevel.mover.service import MoverService, movable
from delaylevel.topics import registry as topics
from delaylevel.web.reports import ProbeCheck

from .once import OnceReport, ReleaseOnce

log = logging.getLogger(__name__)

# Time between two looks at the level topics of a namespace.
_NAMESPACE_S = 5.0


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

    Attributes:
        movers: the service that moves, as a tuple.
        dispatchers: the dispatcher, as a tuple; empty if no level topic needs one.

    Raises:
        LevelTopicError: a level topic is missing, or a Function moves its messages.
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
    ) -> None:
        self._admin = admin
        self._settings = settings
        self._namespace = namespace
        self._look_s = 0.0
        self._warning = RepeatedWarning(log, f"level topics of {namespace}")
        self._refused: set[str] = set()
        self._stopping = threading.Event()
        self._closing = ExitStack()
        described = [movable(admin, name) for name in dict.fromkeys(level_topics)]
        for description in described:
            self._check(description)
        try:
            with translate_errors():
                client = self._closing.enter_context(closing(open_client()))
                self._movers = MoverService(
                    client, admin, described, trigger_ms=trigger_ms, target_client=open_client
                )
                self._dispatcher: Dispatcher | None = None
                windows = [
                    item.topic for item in described if item.final_window is FinalWindow.TRACKER
                ]
                if windows or namespace is not None:
                    client = self._closing.enter_context(closing(open_client()))
                    self._dispatcher = Dispatcher(
                        client, admin, windows, settings, target_client=open_client
                    )
                self._follow_namespace()
        except BaseException:
            self._closing.close()
            raise
        self.movers = (self._movers,)
        self.dispatchers = () if self._dispatcher is None else (self._dispatcher,)

    @property
    def descriptions(self) -> tuple[LevelTopicDescription, ...]:
        """The descriptions of the level topics that are served."""
        found = {item.topic: item for item in self._movers.descriptions}
        if self._dispatcher is not None:
            found = {item.topic: item for item in self._dispatcher.descriptions} | found
        return tuple(found[topic] for topic in sorted(found))

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
            AlreadyRunningError: a mover of another kind, such as a Spark job, has a level topic
                that was named.
            SpillError: the directory for spill files cannot be used.
            UpgradeRequiredError: a level topic is described in a later format.
        """

        def look() -> None:
            self._movers.check()
            self._follow_namespace()
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
            moved = self._movers.run_once()
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

    def _follow_namespace(self) -> None:
        """Begin to serve new level topics of the namespace, and forget deleted ones."""
        if self._namespace is None or time.monotonic() < self._look_s:
            return
        first, self._look_s = not self._look_s, time.monotonic() + _NAMESPACE_S
        try:
            with translate_errors():
                found = topics.list_level_topics(self._admin, self._namespace)
        except BrokerError as error:
            if first:
                raise
            self._warning.failed(error)
            return
        self._warning.over()
        for gone in self._served() - {item.topic for item in found}:
            log.warning("%s was deleted", gone)
            self._remove(gone)
        for item in found:
            if item.topic not in self._served():
                self._add(item)

    def _served(self) -> set[str]:
        return {item.topic for item in self.descriptions}

    def _add(self, item: topics.FoundLevelTopic) -> None:
        """Serve a level topic of the namespace."""
        description = item.description
        try:
            if description is None:
                raise LevelTopicError(item.problem or item.topic)
            self._check(description)
            if description.final_window is FinalWindow.TRACKER:
                assert self._dispatcher is not None
                self._dispatcher.add(description.topic)
        except (BrokerError, InvalidInputError) as error:
            if item.topic not in self._refused:
                self._refused.add(item.topic)
                log.warning("level topic %s is not served: %s", item.topic, error)
            return
        self._refused.discard(item.topic)
        if description.mover is not Mover.FUNCTION:
            self._movers.add(description)
        elif description.final_window is FinalWindow.TRACKER:
            log.info("%s is moved by a Function; its window is served here", item.topic)

    def _remove(self, topic: str) -> None:
        if topic in self._movers.stats():
            self._movers.remove(topic)
        if self._dispatcher is not None:
            self._dispatcher.remove(topic)
