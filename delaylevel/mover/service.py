"""Movers without Spark as a service: a thread for each level topic, standby and retries."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.rules import Explainer
from delaylevel.errors import BrokerError, LevelTopicError, NotFoundError
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.formatting import shell
from delaylevel.model.level_topic import LevelTopicDescription, Mover
from delaylevel.model.report import ForwardReport
from delaylevel.model.source_partition import SourcePartition, source_partitions
from delaylevel.topics import registry as topics
from delaylevel.topics.reporting import REPORTED_ROLES
from delaylevel.topics.roster import Roster
from delaylevel.topics.stats import LevelTopicStats, read_stats

from .local import LocalMover
from .ready import in_threads
from .topic_thread import MoverStats, TopicThread


def movable(admin: TopicAdmin, name: str) -> LevelTopicDescription:
    """Return the description of a level topic that a local mover can serve.

    Args:
        name: name of the level topic or of its business topic.

    Raises:
        LevelTopicError: it is missing, or a Function moves its messages.
    """
    description = topics.describe(admin, name, search=True)
    check_movable(description)
    return description


def check_movable(description: LevelTopicDescription) -> None:
    """Raise LevelTopicError if a Function moves the messages of a level topic."""
    if description.mover is Mover.FUNCTION:
        name = description.topic
        raise LevelTopicError(
            f"level topic {name} is moved by a function, which is inside Pulsar: deploy it with "
            f"`delaylevel mover deploy {shell(name)}`; `delaylevel dispatcher run "
            f"{shell(name)}` releases its "
            "messages"
        )


class MoverService:
    """Service that hands off the near-due messages of level topics.

    Several processes may serve the same level topics. One of them moves the messages of a level
    topic; the others are on standby, and take over if it ends, dies or hangs.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        level_topics: names of business topics or level topics.
        trigger_ms: time between two passes, in ms; by default a fifth of the shortest lead.
        target_client: as for :class:`~delaylevel.mover.local.LocalMover`.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        level_topics: Sequence[str] = (),
        *,
        trigger_ms: int | None = None,
        clock: Clock | None = None,
        target_client: Callable[[], Any] | None = None,
    ) -> None:
        self._client = client
        self._admin = admin
        self._trigger_ms = trigger_ms
        self._clock = clock or SystemClock()
        self._target_client = target_client
        self._explainer = Explainer(admin)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads: dict[str, TopicThread] = {}
        self._started = False
        #: The level topics to serve; a service that contains this one has its own here.
        self.roster = Roster(admin, level_topics, lambda description, _: self.add(description))
        self.roster.start()

    @property
    def descriptions(self) -> tuple[LevelTopicDescription, ...]:
        """The descriptions of the level topics that are served."""
        with self._lock:
            return tuple(thread.description for thread in self._threads.values())

    def stats(self) -> Mapping[str, MoverStats]:
        """Return the statistics by level topic."""
        with self._lock:
            threads = dict(self._threads)
        return {topic: thread.stats() for topic, thread in threads.items()}

    def member_stats(self, description: LevelTopicDescription) -> LevelTopicStats:
        """Request the statistics of the levels, of held messages and of dead letters."""
        return read_stats(self._admin, description, roles=REPORTED_ROLES)

    def add(self, description: LevelTopicDescription) -> None:
        """Serve one more level topic.

        Raises:
            LevelTopicError: a Function moves its messages.
        """
        check_movable(description)
        thread = self._thread(description)
        with self._lock:
            self._threads[description.topic] = thread
        if self._started:
            thread.start()

    def remove(self, topic: str) -> None:
        """Stop serving a level topic."""
        with self._lock:
            thread = self._threads.pop(topic)
        thread.stop()
        if self._started:
            thread.join()

    def run(self, tick: Callable[[], None] | None = None) -> None:
        """Serve until `stop` is called; then end the current passes and release the locks.

        Args:
            tick: function that is called about once a second in this thread.
        """
        self.start()
        try:
            while not self._stopping.is_set():
                self.roster.look(self.stats())
                if tick is not None:
                    tick()
                self._stopping.wait(1.0)
        finally:
            self.close()

    def run_once(self) -> ForwardReport:
        """Hand off everything that is ready now, then release the locks.

        Returns:
            The numbers of messages, by outcome. A message that passes several levels is counted at
            each.

        Raises:
            AlreadyRunningError: another mover has a level topic.
            BrokerError: messages of a level topic could not be handed off, or it cannot be served;
                those of the other ones were.
        """
        total = ForwardReport()
        failure: BrokerError | None = None
        for thread in self._threads.values():
            try:
                total.add(thread.run_once())
            except BrokerError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        for name, reason in self.roster.refused.items():
            raise LevelTopicError(f"level topic {name} was not served: {reason}")
        return total

    def start(self) -> None:
        """Start to serve, in threads."""
        self._started = True
        for thread in list(self._threads.values()):
            thread.start()

    def stop(self) -> None:
        """Request the end; safe in a signal handler and from any thread."""
        self._stopping.set()
        for thread in list(self._threads.values()):
            thread.stop()

    def close(self) -> None:
        """End the current passes, release the locks, and wait for that."""
        self.stop()
        for thread in list(self._threads.values()):
            if thread.ident is not None:
                thread.join()

    def _thread(self, description: LevelTopicDescription) -> TopicThread:
        return TopicThread(
            lambda latest: LocalMover(
                self._client, self._admin, latest, self._clock, self._target_client
            ),
            lambda: self._served(description.topic),
            description,
            self._trigger_ms,
            self._clock,
            self._explainer.explain,
        )

    def _served(self, topic: str) -> LevelTopicDescription:
        """Return the description of a level topic once the broker serves its source partitions.

        While a broker fails over, the client would block, and make growing pauses between its
        attempts. Here, requests fail at once, so the mover notices the end within two seconds.

        Raises:
            LevelTopicError: as for `movable`.
            BrokerError: a partition is not served now.
        """
        description = movable(self._admin, topic)

        # Not by the statistics of a whole topic: a broker waits for the one that is away, for 30 s.
        def look(source: SourcePartition) -> None:
            with suppress(NotFoundError):
                self._admin.last_message_id(source.name)

        in_threads(look, source_partitions(description))
        return description
