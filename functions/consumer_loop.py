"""The loop of one Function instance: receive, send on, acknowledge; and begin anew after trouble.

The worker hands a Python Function one message at a time, through a queue of one between two
threads. That path alone costs twice what the message's way costs, so the instance has a consumer
of its own on the same Shared subscription, and the worker's are closed when it stands.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pulsar

from delaylevel.cluster.failures import error_name
from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import DelayLevelError, LevelTopicError
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription, Mover, Role
from delaylevel.topics import registry as topics

from .connections import TargetClients
from .relay import Relay, RelayReport
from .settings import FunctionSettings

log = logging.getLogger(__name__)

POLL_EVERY = 64
_IDLE_MS = 500
_BUSY_MS = 2
_NO_ROOM_S = 0.002
_RETRY_S = 5.0
_REPORT_S = 1.0
_REDELIVERY_MS = 10_000
_QUEUES_TOTAL = 20_000

Report = Callable[[RelayReport, Relay], None]


def source_topics(description: LevelTopicDescription) -> list[str]:
    """Return the topics that a Function reads: every level, and what is held."""
    return [
        member.topic.full
        for member in description.members()
        if member.role in (Role.LEVEL, Role.HELD)
    ]


def check_movable(description: LevelTopicDescription) -> None:
    """Raise LevelTopicError unless a Function may move this level topic."""
    if description.mover is not Mover.FUNCTION:
        raise LevelTopicError(
            f"level topic {description.topic} is described with mover "
            f"{description.mover.value!r}: its producers rely on that, and do not ask the broker "
            "to hold messages back until their hand-off. Run `delaylevel sync "
            f"{description.mover.value}` for it, or make a level topic of another name with "
            "`delaylevel levels create --mover function --level-topic NAME`"
        )


class ConsumerLoop:
    """Moves the messages of one level topic until it is stopped.

    Args:
        client: the instance's ``pulsar.Client``; it is not closed here.
        admin: of the same cluster.
        settings: what was deployed.
        name: the consumer's name, as administrators see it.
        report: is called about once a second while messages move.
        target_client: makes a client of the same cluster for business topics; they are closed
            here. None for the instance's own.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        settings: FunctionSettings,
        name: str,
        report: Report | None = None,
        target_client: Callable[[], Any] | None = None,
    ) -> None:
        self._client = client
        self._targets = TargetClients(target_client) if target_client is not None else None
        self._admin = admin
        self._settings = settings
        self._name = name
        self._report = report
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, replaces: Iterable[Any] = ()) -> None:
        """Begin, in a thread of its own.

        Args:
            replaces: consumers that are closed as soon as this one stands; the broker delivers to
                it what they had and did not acknowledge.
        """
        waiting = list(replaces)
        self._thread = threading.Thread(
            target=self._run, args=(waiting,), name="delaylevel-engine", daemon=True
        )
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout_s: float = 10) -> None:
        """End after what is in flight; what is not acknowledged by then is delivered again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, replaces: list[Any]) -> None:
        while not self._stop.is_set():
            try:
                self._move(replaces)
            except pulsar.AlreadyClosed:
                log.info("the client is closed: this instance ends")
                return
            except (DelayLevelError, pulsar.PulsarException) as error:
                log.error("not moving (%s): %s", error_name(error), error)
            except Exception:
                log.exception("not moving: this should not happen")
            self._stop.wait(_RETRY_S)

    def _describe(self) -> LevelTopicDescription:
        description = topics.describe(self._admin, self._settings.level_topic)
        check_movable(description)
        return description

    def _move(self, replaces: list[Any]) -> None:
        description = self._describe()
        consumer = self._client.subscribe(
            source_topics(description),
            SUBSCRIPTION,
            consumer_type=pulsar.ConsumerType.Shared,
            initial_position=pulsar.InitialPosition.Earliest,
            receiver_queue_size=self._settings.receiver_queue,
            max_total_receiver_queue_size_across_partitions=_QUEUES_TOTAL,
            negative_ack_redelivery_delay_ms=_REDELIVERY_MS,
            consumer_name=self._name,
        )
        stream = Relay(
            self._client,
            self._admin,
            description,
            consumer,
            describe=self._describe,
            in_flight=self._settings.in_flight,
            target_client=self._targets.of if self._targets is not None else None,
        )
        try:
            while replaces:
                _close(replaces.pop())
            log.info("moving %s (%s)", description.topic, description.levels)
            self._pump(consumer, stream)
        finally:
            stream.close()
            _close(consumer)
            if self._targets is not None:
                self._targets.close()

    def _pump(self, consumer: Any, stream: Relay) -> None:
        received = 0
        receive = getattr(consumer, "_consumer", consumer).receive  # past the client's wrapper
        report_at_s = stream.now_s() + _REPORT_S
        while not (self._stop.is_set() and not stream.in_flight):
            if stream.has_room and not self._stop.is_set():
                try:
                    message = receive(_BUSY_MS if stream.unacknowledged else _IDLE_MS)
                except pulsar.Timeout:
                    received = POLL_EVERY
                else:
                    stream.offer(message)
                    received += 1
            else:
                self._stop.wait(_NO_ROOM_S)
                received = POLL_EVERY
            if received >= POLL_EVERY:
                received = 0
                stream.poll()
                if self._report is not None and stream.now_s() >= report_at_s:
                    report_at_s = stream.now_s() + _REPORT_S
                    self._report(stream.take_report(), stream)


def _close(consumer: Any) -> None:
    try:
        consumer.close()
    except Exception as error:  # the worker's own, which it may be closing too
        log.debug("closing a consumer: %s", error_name(error))
