"""Sending on what is near-due: what every mover does with a message once it has read it.

The forwarder decides with the router, sends, and waits for the broker's confirmations. Whoever
drives it acknowledges a source message only after :meth:`Forwarder.flush` has returned.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pulsar
from pulsar.schema import BytesSchema

from delaylevel import envelope as env
from delaylevel import schemas
from delaylevel.clock import Clock, SystemClock
from delaylevel.description import LevelTopicDescription, Mover
from delaylevel.envelope import Envelope, SchemaRef
from delaylevel.errors import BrokerError, EnvelopeError
from delaylevel.ports import TopicAdmin
from delaylevel.reading import ParkedMessage, SourcePartition
from delaylevel.router import Decision, Hop, Router
from delaylevel.topicname import TopicName

log = logging.getLogger(__name__)

# What the broker has not confirmed is kept for a second try elsewhere: at most so much.
EPOCH_MESSAGES = 10_000
EPOCH_BYTES = 32 * 1024 * 1024

PRODUCER_SETTINGS: dict[str, Any] = {
    "block_if_queue_full": True,
    "batching_enabled": True,
    "batching_max_messages": 1000,
    "batching_max_publish_delay_ms": 5,
    "max_pending_messages": 5000,
    "send_timeout_millis": 30_000,
}

# The broker, not the target, is in trouble: holding the message would not help either.
_TRANSIENT = (
    pulsar.ConnectError,
    pulsar.NotConnected,
    pulsar.ServiceUnitNotReady,
    pulsar.TooManyLookupRequestException,
    pulsar.AlreadyClosed,
    pulsar.Interrupted,
)


@dataclass
class ForwardReport:
    """What became of the messages of one or more flushes.

    Attributes:
        parked: how many went into each (level topic, level, partition).
        window: how many were handed to the final window.
        due: how many were delivered at once, because they were due.
        held: how many a target refused, by target.
        dead: how many could not be understood, by reason.
        latest_ms: the largest lateness at hand-off in ms: how long after its due time a message
            was sent on; 0 where none was late.
    """

    parked: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    window: int = 0
    due: int = 0
    held: Counter[str] = field(default_factory=Counter)
    dead: Counter[str] = field(default_factory=Counter)
    latest_ms: int = 0

    @property
    def total(self) -> int:
        """How many messages it speaks of."""
        return self.parked.total() + self.window + self.due + self.held.total() + self.dead.total()

    def add(self, other: ForwardReport) -> None:
        """Add another report's figures to these."""
        self.parked += other.parked
        self.window += other.window
        self.due += other.due
        self.held += other.held
        self.dead += other.dead
        self.latest_ms = max(self.latest_ms, other.latest_ms)


@dataclass
class _Waiting:
    """A message that a target has not confirmed yet."""

    source: SourcePartition
    message: ParkedMessage
    envelope: Envelope
    application: dict[str, str]
    due: bool


class _Outlet:
    """One producer, and what it has not confirmed."""

    __slots__ = ("outcomes", "producer", "sent", "waiting")

    def __init__(self, producer: Any) -> None:
        self.producer = producer
        self.sent = 0
        # A dict's own setdefault as the callback keeps the distinct outcomes without running
        # Python code for every message.
        self.outcomes: dict[Any, Any] = {}
        self.waiting: list[_Waiting] = []

    def send(
        self, message: ParkedMessage, properties: dict[str, str], deliver_at_ms: int | None
    ) -> None:
        self.sent += 1
        self.producer.send_async(
            message.value,
            self.outcomes.setdefault,
            properties=properties,
            partition_key=message.key or None,
            ordering_key=message.ordering_key or None,
            event_timestamp=message.event_ms or None,
            deliver_at=deliver_at_ms,
        )

    def settle(self) -> str | None:
        """Wait for every confirmation; return None, or the name of the first failure."""
        if not self.sent:
            return None
        failure: str | None = None
        try:
            self.producer.flush()
        except pulsar.PulsarException as error:
            failure = _name(error)
        for outcome in self.outcomes:
            if outcome != pulsar.Result.Ok:
                failure = failure or str(outcome).rpartition(".")[2]
        if not self.outcomes:
            failure = failure or "no confirmation"
        self.sent = 0
        self.outcomes = {}
        return failure

    def forget(self) -> None:
        """Count nothing that was sent so far; what is confirmed later says nothing any more."""
        self.sent = 0
        self.outcomes = {}
        self.waiting = []


class Forwarder:
    """Sends messages on to where they belong now, and knows which of them have arrived.

    Not thread-safe: one forwarder serves one partition's task, or one loop.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        admin: says whether a target exists, and finds its schemas.
        description: the level topic whose messages these are.
        clock: for the pause after a target's refusal.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        description: LevelTopicDescription,
        clock: Clock | None = None,
    ) -> None:
        self._client = client
        self._admin = admin
        self._description = description
        self._clock = clock or SystemClock()
        self._router = Router(description.levels)
        self._targets: dict[tuple[str, SchemaRef | None], _Outlet] = {}
        self._internal: dict[str, _Outlet] = {}
        self._refused: dict[tuple[str, SchemaRef | None], tuple[str, int]] = {}
        self._report = ForwardReport()
        self._epoch_messages = 0
        self._epoch_bytes = 0

    def forward(self, source: SourcePartition, message: ParkedMessage, now_ms: int) -> None:
        """Send one message on; it counts as arrived when :meth:`flush` has returned.

        Args:
            source: where it was read.
            message: as it was read there.
            now_ms: the present time that routing goes by.

        Raises:
            BrokerError: a topic of our own cannot be written. None of the source messages since
                the last flush may be acknowledged; all of them are to be forwarded again.
        """
        try:
            self._forward(source, message, now_ms)
        except BrokerError:
            self._forget()
            raise

    def _forward(self, source: SourcePartition, message: ParkedMessage, now_ms: int) -> None:
        try:
            sealed = Envelope.read(message.properties)
            if sealed.target not in self._description.targets:
                raise EnvelopeError(
                    f"target {sealed.target} is not one of level topic {source.family}"
                )
        except EnvelopeError as error:
            self._dead_letter(source, message, error.reason)
            return
        sealed = sealed.identified(message.stable_id(source.topic))
        decision = self._router.decide(sealed.due_ms, now_ms, came_from=source.level)
        if decision.hop is Hop.PARK:
            self._park(message, sealed, decision)
        else:
            self._hand_off(source, message, sealed, due=decision.hop is Hop.DUE)
            self._report.latest_ms = max(self._report.latest_ms, now_ms - sealed.due_ms)
        self._epoch_messages += 1
        self._epoch_bytes += len(message.value or b"")
        if self._epoch_messages >= EPOCH_MESSAGES or self._epoch_bytes >= EPOCH_BYTES:
            self._settle()

    def flush(self) -> ForwardReport:
        """Wait until the broker has confirmed all that was forwarded so far.

        Returns:
            What became of it, since the last flush.

        Raises:
            BrokerError: something is unconfirmed and could not be held either. None of the source
                messages since the last flush may be acknowledged; all are to be forwarded again.
        """
        try:
            self._settle()
        except BrokerError:
            self._forget()
            raise
        report, self._report = self._report, ForwardReport()
        return report

    def close_targets(self) -> None:
        """Close the producers of business topics.

        A connected producer would make a topic anew that an operator deletes by force, so none is
        kept while there is nothing to send.
        """
        outlets, self._targets = list(self._targets.values()), {}
        _close(outlets)

    def close(self) -> None:
        """Close every producer; what was not flushed is not confirmed."""
        self.close_targets()
        outlets, self._internal = list(self._internal.values()), {}
        _close(outlets)

    def _forget(self) -> None:
        """Start anew after a failure: what is forwarded again must not be counted twice."""
        self._report = ForwardReport()
        self._epoch_messages = self._epoch_bytes = 0
        for outlet in (*self._targets.values(), *self._internal.values()):
            outlet.forget()

    # -- the ways out

    def _park(self, message: ParkedMessage, sealed: Envelope, decision: Decision) -> None:
        description = self._description
        topic = description.level_topic(decision.level).partition(decision.partition).full
        deliver_at = None
        if description.mover is Mover.FUNCTION:
            deliver_at = self._router.hand_off_ms(
                decision.level, decision.partition, self._clock.now_ms()
            )
        application = env.application_properties(message.properties)
        properties = sealed.parked_properties(application)
        self._own(topic).send(message, properties, deliver_at)
        self._report.parked[description.topic, decision.level, decision.partition] += 1

    def _hand_off(
        self, source: SourcePartition, message: ParkedMessage, sealed: Envelope, *, due: bool
    ) -> None:
        application = env.application_properties(message.properties)
        waiting = _Waiting(source, message, sealed, application, due)
        key = (sealed.target, sealed.schema)
        refusal = self._refused.get(key)
        if refusal is not None:
            reason, until_ms = refusal
            if self._clock.now_ms() < until_ms:
                self._hold(waiting, reason)
                return
            del self._refused[key]
        outlet = self._targets.get(key)
        if outlet is None:
            opened = self._open_target(*key)
            if isinstance(opened, str):
                self._refuse(key, opened)
                self._hold(waiting, opened)
                return
            outlet = self._targets[key] = opened
        outlet.send(
            message, sealed.delivered_properties(application), None if due else sealed.due_ms
        )
        outlet.waiting.append(waiting)

    def _hold(self, waiting: _Waiting, reason: str) -> None:
        """Set a message aside whose target cannot be written now."""
        properties = waiting.envelope.held_again().parked_properties(waiting.application)
        properties[env.REASON] = reason
        topic = self._description.held_topic.partition(0).full
        self._own(topic).send(waiting.message, properties, None)
        self._report.held[waiting.envelope.target] += 1

    def _dead_letter(self, source: SourcePartition, message: ParkedMessage, reason: str) -> None:
        """Put a message away that cannot be understood, as it is, with the reason."""
        properties = {
            **message.properties,
            env.REASON: reason,
            env.SOURCE: message.stable_id(source.topic),
        }
        topic = self._description.dead_letter_topic.partition(0).full
        self._own(topic).send(message, properties, None)
        self._report.dead[reason] += 1

    # -- producers

    def _own(self, topic: str) -> _Outlet:
        """Return the outlet to a topic of our own; these have no schema and are batched."""
        outlet = self._internal.get(topic)
        if outlet is None:
            outlet = self._internal[topic] = _Outlet(
                self._create(topic, lambda: {"schema": BytesSchema()})
            )
        return outlet

    def _create(self, topic: str, settings: Callable[[], dict[str, Any]]) -> Any:
        try:
            return self._client.create_producer(topic, **PRODUCER_SETTINGS, **settings())
        except pulsar.PulsarException as error:
            raise BrokerError(
                f"cannot write to {topic} ({_name(error)}); nothing was acknowledged"
            ) from error

    def _open_target(self, target: str, reference: SchemaRef | None) -> _Outlet | str:
        """Return an outlet to a business topic, or the reason why it cannot be written."""
        name = TopicName.parse(target)
        if not self._admin.topic_exists(name):
            return "the topic does not exist"
        schema: Any = BytesSchema()
        if reference is not None:
            schema = schemas.find(self._admin, name, reference)
            if schema is None:
                return f"its registry has no schema {reference}"
        try:
            producer = self._client.create_producer(
                target,
                schema=schema,
                # Key_Shared consumers need every entry to hold one key only.
                batching_type=pulsar.BatchingType.KeyBased,
                **PRODUCER_SETTINGS,
            )
        except _TRANSIENT as error:
            raise BrokerError(
                f"no broker serves {target} now ({_name(error)}); nothing was acknowledged"
            ) from error
        except pulsar.PulsarException as error:
            return _name(error)
        return _Outlet(producer)

    def _refuse(self, key: tuple[str, SchemaRef | None], reason: str) -> None:
        log.warning("target %s cannot be written (%s): holding its messages", key[0], reason)
        self._refused[key] = (reason, self._clock.now_ms() + self._description.hold_pause_ms)

    # -- confirmations

    def _settle(self) -> None:
        for key, outlet in list(self._targets.items()):
            waiting, outlet.waiting = outlet.waiting, []
            failure = outlet.settle()
            if failure is None:
                for item in waiting:
                    if item.due:
                        self._report.due += 1
                    else:
                        self._report.window += 1
                continue
            # Which of them arrived is not known; all are held, and those that did will come
            # again with the same id.
            del self._targets[key]
            _close([outlet])
            self._refuse(key, failure)
            for item in waiting:
                self._hold(item, failure)
        for topic, outlet in list(self._internal.items()):
            failure = outlet.settle()
            if failure is not None:
                # A producer that is closed for good would fail every later try, too.
                del self._internal[topic]
                _close([outlet])
                raise BrokerError(
                    f"{topic} did not confirm ({failure}); nothing was acknowledged, and what is "
                    "unconfirmed will be read and sent again"
                )
        self._epoch_messages = self._epoch_bytes = 0


def _close(outlets: list[_Outlet]) -> None:
    for outlet in outlets:
        try:
            outlet.producer.close()
        except pulsar.PulsarException as error:
            log.debug("closing a producer: %s", _name(error))


def _name(error: BaseException) -> str:
    return type(error).__name__
