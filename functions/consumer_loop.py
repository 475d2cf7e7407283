"""One Function instance: its settings, and its loop that receives, forwards and acknowledges.

The worker passes messages to a Python Function one by one, through a queue of one between two
threads. That costs twice as much as all the rest. So the instance opens its own consumer on the
same Shared subscription, and then closes the worker's consumers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import pulsar

from delaylevel.cluster.client_parts.cores import consumer_core
from delaylevel.cluster.failures import close_quietly, error_name, missing_subscription
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.reader import KEEP_ENCRYPTED
from delaylevel.cluster.targets.pool import TargetClients
from delaylevel.errors import BrokerError, ConfigError, DelayLevelError, LevelTopicError
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription, Mover, Role
from delaylevel.topics import registry as topics

from .relay import Relay, RelayReport

log = logging.getLogger(__name__)

# Messages to fetch ahead for each partition.
_RECEIVER_QUEUE = 500
# Name of a secret with a token for the admin interface.
TOKEN_SECRET = "delaylevel_admin_token"


@dataclass(frozen=True)
class FunctionSettings:
    """The user configuration of one Function, for the admin interface and its own clients."""

    level_topic: str
    admin_url: str
    token_file: str | None = None
    tls_trust_certs_file: str | None = None
    tls_allow_insecure: bool = False
    tls_validate_hostname: bool = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FunctionSettings:
        """Read a Function's user configuration."""
        known = {field.name for field in fields(cls)}
        try:
            return cls(**{name: value for name, value in config.items() if name in known})
        except TypeError as error:
            raise ConfigError(
                f"the Function's user configuration cannot be read ({error}): deploy it with "
                "`delaylevel mover deploy`"
            ) from error


POLL_EVERY = 64
_IDLE_MS = 500
_BUSY_MS = 2
_NO_ROOM_S = 0.002
_RETRY_S = 5.0
_REPORT_S = 1.0
_REDELIVERY_MS = 10_000
_QUEUES_TOTAL = 20_000


def source_topics(description: LevelTopicDescription) -> list[str]:
    """Return the topics that a Function reads: every level, and the held topic."""
    return [
        item.topic.full for item in description.members() if item.role in (Role.LEVEL, Role.HELD)
    ]


def check_movable(description: LevelTopicDescription) -> None:
    """Raise LevelTopicError unless a Function may move this level topic."""
    if description.mover is not Mover.FUNCTION:
        raise LevelTopicError(
            f"level topic {description.topic} is described with mover "
            f"{description.mover.value!r}: its producers rely on that, and do not ask the broker "
            "to hold messages until their hand-off. Use `delaylevel run` for it, or create a level "
            "topic of another name with `delaylevel levels create --mover function "
            "--level-topic NAME`"
        )


class ConsumerLoop(threading.Thread):
    """Thread that moves the messages of one level topic until its client is closed.

    Args:
        replaces: consumers to close as soon as the loop has its own; the broker then delivers their
            unacknowledged messages to that one.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        settings: FunctionSettings,
        consumer_name: str,
        report: Callable[[RelayReport, Relay], None],
        target_client: Callable[[], Any] | None,
        replaces: Iterable[Any],
    ) -> None:
        super().__init__(name="delaylevel-consumer-loop", daemon=True)
        self._client = client
        self._target_client = target_client
        self._admin = admin
        self._settings = settings
        self._consumer_name = consumer_name
        self._report = report
        self._replaces = list(replaces)
        self._warning = RepeatedWarning(log, f"level topic {settings.level_topic}")

    def run(self) -> None:
        """Move messages; begin again after a failure."""
        while True:
            try:
                self._move()
            except pulsar.AlreadyClosed:
                log.info("the client is closed: this instance stops")
                return
            except (DelayLevelError, pulsar.PulsarException) as error:
                self._warning.failed(f"not moving ({error_name(error)}): {error}")
            except Exception:
                log.exception("not moving: this should not happen")
            time.sleep(_RETRY_S)

    def _describe(self) -> LevelTopicDescription:
        description = topics.describe(self._admin, self._settings.level_topic)
        check_movable(description)
        return description

    def _move(self) -> None:
        description = self._describe()
        sources = source_topics(description)
        try:
            consumer = self._client.subscribe(
                sources,
                SUBSCRIPTION,
                consumer_type=pulsar.ConsumerType.Shared,
                initial_position=pulsar.InitialPosition.Earliest,
                receiver_queue_size=_RECEIVER_QUEUE,
                max_total_receiver_queue_size_across_partitions=_QUEUES_TOTAL,
                negative_ack_redelivery_delay_ms=_REDELIVERY_MS,
                consumer_name=self._consumer_name,
                **KEEP_ENCRYPTED,
            )
        except pulsar.Timeout as error:
            found = (missing_subscription(self._admin, each, SUBSCRIPTION) for each in sources)
            missing = next(filter(None, found), None)
            if missing is None:
                raise
            raise BrokerError(missing) from error
        targets = TargetClients(self._client, self._target_client)
        relay = Relay(
            self._client,
            self._admin,
            description,
            consumer,
            describe=self._describe,
            target_client=targets.of,
        )
        try:
            while self._replaces:
                close_quietly(self._replaces.pop(), "consumer")
            log.info("moving %s (%s)", description.topic, description.levels)
            self._receive(consumer, relay)
        finally:
            relay.close()
            close_quietly(consumer, "consumer")
            targets.close()

    def _receive(self, consumer: Any, relay: Relay) -> None:
        received = 0
        receive = consumer_core(consumer).receive
        report_at_s = relay.now_s() + _REPORT_S
        while True:
            if relay.has_room:
                try:
                    message = receive(_BUSY_MS if relay.unacknowledged else _IDLE_MS)
                except pulsar.Timeout:
                    received = POLL_EVERY
                else:
                    relay.offer(message)
                    received += 1
            else:
                time.sleep(_NO_ROOM_S)
                received = POLL_EVERY
            if received >= POLL_EVERY:
                received = 0
                relay.poll()
                if relay.now_s() >= report_at_s:
                    report_at_s = relay.now_s() + _REPORT_S
                    self._warning.over()
                    self._report(relay.take_report(), relay)
