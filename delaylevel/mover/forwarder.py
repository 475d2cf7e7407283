"""Sending on what is near-due: what every mover does with a message once it has read it.

The forwarder decides with the router, sends, and waits for the broker's confirmations. Whoever
drives it acknowledges a source message only after :meth:`Forwarder.flush` has returned.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.publisher import (
    BULK_SETTINGS,
    CERTAIN_REFUSALS,
    KEY_BATCHED_SETTINGS,
    UNBATCHED_SETTINGS,
    Publisher,
    close_all,
    open_producer,
)
from delaylevel.cluster.reader import read_range
from delaylevel.errors import BrokerError, ClientError, DelayLevelError, EnvelopeError
from delaylevel.model import envelope as env
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.delivery import Delivery, Sequence, sequence_id
from delaylevel.model.envelope import Envelope, SchemaRef
from delaylevel.model.level_topic import (
    SUBSCRIPTION,
    FinalWindow,
    LevelTopicDescription,
    MissingTarget,
)
from delaylevel.model.message import ParkedMessage
from delaylevel.model.report import ForwardReport
from delaylevel.model.router import Decision, Hop, Router
from delaylevel.model.source_partition import SourcePartition
from delaylevel.model.topic_name import TopicName

from . import hop
from .sequencing import Sequencer

log = logging.getLogger(__name__)

# What the broker has not confirmed is kept for a second try elsewhere: at most so much.
EPOCH_MESSAGES = 10_000
EPOCH_BYTES = 32 * 1024 * 1024
# Effectively once a send never waits: it would go on behind what the timeout has thrown out.
_SEQUENCED_SETTINGS: dict[str, Any] = {
    **UNBATCHED_SETTINGS,
    "block_if_queue_full": False,
    "max_pending_messages": 0,
    "max_pending_messages_across_partitions": 1 << 30,
}

# A business topic, the schema, and, for keyless messages under deduplication, its partition.
_TargetKey = tuple[str, SchemaRef | None, int | None]


@dataclass(slots=True)
class _Waiting:
    """A message that a target has not confirmed yet."""

    message: ParkedMessage
    envelope: Envelope
    due: bool


class Forwarder:
    """Sends messages on to where they belong now, and knows which of them have arrived.

    Not thread-safe: one forwarder serves one partition's task, or one loop.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        admin: says whether a target exists, and finds its schemas.
        description: the level topic whose messages these are.
        clock: for the pause after a target's refusal.
        sequence: publish effectively once: unbatched, under this name, with sequence ids. The
            forwarder then serves this one source partition, in its order. Not for a level topic
            with a tracker: see :func:`delaylevel.mover.hop.check_delivery`.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        description: LevelTopicDescription,
        clock: Clock | None = None,
        sequence: Sequence | None = None,
    ) -> None:
        if sequence is not None:
            hop.check_delivery(description, Delivery.EFFECTIVELY_ONCE)
        self._client = client
        self._admin = admin
        self._description = description
        self._clock = clock or SystemClock()
        self._sequence = sequence
        self._router = Router(description.levels)
        self._targets: dict[_TargetKey, Publisher[_Waiting]] = {}
        self._internal: dict[str, Publisher[Any]] = {}
        self._parks: dict[tuple[int, int], Publisher[Any]] = {}
        self._tracked = description.final_window is FinalWindow.TRACKER
        self._window: dict[int, Publisher[Any]] = {}
        self._partition_counts: dict[str, int] = {}
        self._refused: dict[tuple[str, SchemaRef | None], tuple[str, int]] = {}
        self._to_hold: list[tuple[_Waiting, str]] = []
        self._report = ForwardReport()
        self._epoch_messages = 0
        self._epoch_bytes = 0
        self.numbering: Sequencer | None = None
        if sequence is not None:
            self.numbering = Sequencer(sequence, self._settle, self._read_held)

    def forward(self, source: SourcePartition, message: ParkedMessage, now_ms: int) -> None:
        """Send one message on; it counts as arrived when :meth:`flush` has returned.

        Args:
            source: where it was read.
            message: as it was read there.
            now_ms: the present time that routing goes by.

        Raises:
            BrokerError: a topic of our own cannot be written. None of the source messages since
                the last flush may be acknowledged; all of them are to be forwarded again.
            InvalidInputError: with a sequence, messages out of order or not of its partition.
        """
        try:
            self._forward(source, message, now_ms)
        except DelayLevelError:
            self.forget()
            raise

    def _forward(self, source: SourcePartition, message: ParkedMessage, now_ms: int) -> None:
        number = None
        if self.numbering is not None:
            number = self.numbering.next(source, *message[:3], len(message.value or b""))
        try:
            envelope = hop.open_envelope(self._description, source.topic, message)
        except EnvelopeError as error:
            self._dead_letter(source, message, error.reason, number)
            return
        decision = self._router.decide(envelope.due_ms, now_ms, came_from=source.level)
        if decision.hop is Hop.PARK:
            self._park(message, envelope, decision, number)
        else:
            if self._tracked:
                self._into_window(message, envelope)
            else:
                self._hand_off(message, envelope, decision.hop is Hop.DUE, number)
            late_ms = now_ms - envelope.due_ms
            if late_ms > self._report.latest_ms:
                self._report.latest_ms = late_ms
        if self._tracked:
            return  # no message is kept for a second try elsewhere
        self._epoch_messages += 1
        self._epoch_bytes += len(message.value or b"")
        if self._epoch_messages >= EPOCH_MESSAGES or self._epoch_bytes >= EPOCH_BYTES:
            self._settle()

    @property
    def description(self) -> LevelTopicDescription:
        """The level topic whose messages these are."""
        return self._description

    @property
    def router(self) -> Router:
        """What decides where a message goes."""
        return self._router

    def level_outlet(self, level: int, partition: int) -> Publisher[Any]:
        """Return the way into a partition of a level.

        Raises:
            BrokerError: it cannot be written.
        """
        outlet = self._parks.get((level, partition))
        if outlet is None:
            topic = self._description.level_topic(level).partition(partition).full
            outlet = self._parks[level, partition] = self._own(topic)
        return outlet

    def count_parked(self, level: int, partition: int, count: int) -> None:
        """Take down what was given to :meth:`level_outlet`."""
        if count:
            self._report.parked[self._description.topic, level, partition] += count

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
        except DelayLevelError:
            self.forget()
            raise
        report, self._report = self._report, ForwardReport()
        return report

    def close_targets(self) -> None:
        """Close the producers of business topics.

        A connected producer would make a topic anew that an operator deletes by force, so none is
        kept while there is nothing to send.
        """
        outlets, self._targets = list(self._targets.values()), {}
        close_all(outlets)

    def close(self) -> None:
        """Close every producer; what was not flushed is not confirmed."""
        self.close_targets()
        outlets, self._internal = list(self._internal.values()), {}
        self._parks, self._window = {}, {}
        close_all(outlets)

    def forget(self) -> None:
        """Start anew after a failure: what is forwarded again must not be counted twice."""
        self._report = ForwardReport()
        self._epoch_messages = self._epoch_bytes = 0
        self._to_hold = []
        if self.numbering is not None:
            self.numbering.forget()
        for outlet in (*self._targets.values(), *self._internal.values()):
            outlet.forget()

    # -- the ways out

    def _park(
        self, message: ParkedMessage, envelope: Envelope, decision: Decision, number: int | None
    ) -> None:
        description = self._description
        level, partition = decision.level, decision.partition
        outlet = self.level_outlet(level, partition)
        deliver_at = hop.parked_until_ms(
            description, self._router, level, partition, self._clock.now_ms()
        )
        outlet.send(
            message, envelope.parked_again_properties(message.properties), deliver_at, number
        )
        self.count_parked(level, partition, 1)

    def _into_window(self, message: ParkedMessage, envelope: Envelope) -> None:
        """Give it to the dispatcher; what its target is like is not the mover's business then."""
        assert envelope.id is not None
        partition = self._description.window_partition(message.key, envelope.id)
        outlet = self._window.get(partition)
        if outlet is None:
            topic = self._description.window_topic.partition(partition).full
            outlet = self._window[partition] = self._own(topic)
        outlet.send(message, envelope.parked_again_properties(message.properties), None)
        self._report.window += 1

    def _hand_off(
        self, message: ParkedMessage, envelope: Envelope, due: bool, number: int | None
    ) -> None:
        waiting = _Waiting(message, envelope, due)
        if self.numbering is not None and self.numbering.was_held(
            envelope.id, envelope.attempt + 1
        ):
            # An earlier run of the same batch has set it aside, and the target has recovered.
            self._report.held[envelope.target] += 1
            return
        reason = self._refusal(envelope)
        if reason is None:
            outlet = self._target(envelope, message, number)
            if not isinstance(outlet, str):
                outlet.send(
                    message,
                    hop.delivered_properties(message, envelope),
                    None if due else envelope.due_ms,
                    number,
                    waiting,
                )
                return
            reason = outlet
            self._refuse(envelope, reason)
        self._to_hold.append((waiting, reason))

    def _hold(self, waiting: _Waiting, reason: str) -> None:
        """Set a message aside whose target cannot be written now."""
        message = waiting.message
        policy = hop.missing_target_policy(self._description, reason)
        if policy is MissingTarget.DROP:
            self._report.dropped[waiting.envelope.target] += 1
            return
        # With sequence ids dead letters follow their own order, which this message has left.
        if policy is MissingTarget.DEAD_LETTER and self._sequence is None:
            properties = hop.abandoned_properties(message, waiting.envelope)
            topic = self._description.dead_letter_topic.partition(0).full
            self._own(topic).send(message, properties, None)
            self._report.dead[properties[env.REASON]] += 1
            return
        properties = hop.held_properties(message, waiting.envelope, reason)
        held_until_ms = hop.held_until_ms(self._description, self._clock.now_ms())
        number = None
        if self._sequence is not None:
            number = sequence_id(message.ledger, message.entry, message.batch)
        self._own(self._held_topic).send(message, properties, held_until_ms, number)
        self._report.held[waiting.envelope.target] += 1

    def _dead_letter(
        self, source: SourcePartition, message: ParkedMessage, reason: str, number: int | None
    ) -> None:
        """Put a message away that cannot be understood, as it is, with the reason."""
        properties = hop.dead_letter_properties(message, source.topic, reason)
        topic = self._description.dead_letter_topic.partition(0).full
        self._own(topic).send(message, properties, None, number)
        self._report.dead[reason] += 1

    # -- producers

    @property
    def _held_topic(self) -> str:
        return self._description.held_topic.partition(0).full

    def _own(self, topic: str) -> Publisher[Any]:
        """Return the outlet to a topic of our own; these have no schema."""
        outlet = self._internal.get(topic)
        if outlet is None:
            try:
                producer = self._create(topic, BULK_SETTINGS)
            except ClientError as error:
                raise BrokerError(
                    f"cannot write to {topic} ({error.name}); nothing was acknowledged"
                ) from error
            outlet = self._internal[topic] = Publisher(producer, bulk=self._sequence is None)
        return outlet

    def _create(
        self, topic: str, batched: Mapping[str, Any], suffix: str = "", schema: Any = None
    ) -> Any:
        if self._sequence is None:
            return open_producer(self._client, topic, batched, schema=schema)
        name = self._sequence.producer_name + suffix
        return open_producer(
            self._client, topic, _SEQUENCED_SETTINGS, schema=schema, name=name, retry_s=0.2
        )

    def _target(
        self, envelope: Envelope, message: ParkedMessage, number: int | None
    ) -> Publisher[_Waiting] | str:
        """Return the outlet to a business topic, or the reason why it cannot be written."""
        partition = None
        if number is not None and not (message.key or message.ordering_key):
            # The client would choose the partition in turn; a replay has to choose the same.
            count = self._partition_counts.get(envelope.target)
            if count is None:
                name = TopicName.parse(envelope.target)
                if not self._admin.topic_exists(name):
                    return "the topic does not exist"
                count = self._admin.partitioned_metadata(name).partitions
                self._partition_counts[envelope.target] = count
            partition = number % count if count else None
        key = (envelope.target, envelope.schema, partition)
        outlet = self._targets.get(key)
        if outlet is None:
            opened = self._open_target(*key)
            if isinstance(opened, str):
                return opened
            outlet = self._targets[key] = Publisher(opened)
        return outlet

    def _open_target(self, target: str, reference: SchemaRef | None, partition: int | None) -> Any:
        """Return a producer for a business topic, or the reason why it cannot be written."""
        schema = hop.target_schema(self._admin, target, reference)
        if isinstance(schema, str):
            return schema
        topic = target
        if partition is not None:
            topic = TopicName.parse(target).partition(partition).full
        # Each schema, and each way to choose a partition, has its own producers: a name serves
        # one of them at a time.
        suffix = f"-{reference}" if reference is not None else ""
        suffix += "" if partition is None else "-keyless"
        try:
            return self._create(topic, KEY_BATCHED_SETTINGS, suffix, schema)
        except ClientError as error:
            if error.transient:
                raise BrokerError(
                    f"no broker serves {target} now ({error.name}); nothing was acknowledged"
                ) from error
            return self._may_hold(target, error.name)

    def _may_hold(self, target: str, reason: str) -> str:
        """Return a reason for holding, unless the message may have been stored all the same."""
        if self._sequence is not None and reason not in CERTAIN_REFUSALS:
            raise BrokerError(
                f"{target} did not confirm ({reason}); nothing was acknowledged, and a replay "
                "sends the same again, of which the broker drops what it has"
            )
        return reason

    def _refusal(self, envelope: Envelope) -> str | None:
        """Return why a target is left alone now, or None."""
        key = (envelope.target, envelope.schema)
        refusal = self._refused.get(key)
        if refusal is None:
            return None
        reason, until_ms = refusal
        if self._clock.now_ms() < until_ms:
            return reason
        del self._refused[key]
        return None

    def _refuse(self, envelope: Envelope, reason: str) -> None:
        log.warning("%s cannot be written (%s): holding its messages", envelope.target, reason)
        until_ms = self._clock.now_ms() + self._description.hold_pause_ms
        self._refused[envelope.target, envelope.schema] = (reason, until_ms)

    # -- confirmations

    def _settle(self) -> None:
        """Wait for targets, set aside what they refused, then wait for our own topics.

        In this order, so that what stands in the held topic under a sequence id says that the
        fate of everything before it is settled.
        """
        for key, outlet in list(self._targets.items()):
            failure, arrived, failed = outlet.settle()
            due = sum(item.due for item in arrived)
            self._report.due += due
            self._report.window += len(arrived) - due
            if failure is None:
                continue
            del self._targets[key]
            close_all([outlet])
            for item, reason in failed:
                self._to_hold.append((item, self._may_hold(key[0], reason)))
            self._refuse(failed[0][0].envelope, failure)
        if self._to_hold:
            to_hold, self._to_hold = self._to_hold, []
            if self._sequence is not None:
                to_hold.sort(key=lambda item: item[0].message.position)
            for item, reason in to_hold:
                self._hold(item, reason)
        for topic, outlet in list(self._internal.items()):
            failure, _, _ = outlet.settle()
            if failure is not None:
                # A producer that is closed for good would fail every later try, too.
                del self._internal[topic]
                self._parks, self._window = {}, {}
                close_all([outlet])
                raise BrokerError(
                    f"{topic} did not confirm ({failure}); nothing was acknowledged, and what is "
                    "unconfirmed will be read and sent again"
                )
        self._epoch_messages = self._epoch_bytes = 0
        if self.numbering is not None:
            self.numbering.settled()

    def _read_held(self, first_number: int) -> frozenset[tuple[str | None, int]]:
        """Return (id, attempt) of what an earlier run of this batch has set aside already."""
        held = self._own(self._held_topic)
        if held.producer.last_sequence_id() < first_number:
            return frozenset()
        topic = TopicName.parse(self._held_topic)
        last = self._admin.last_message_id(topic)
        if last is None:
            return frozenset()
        start = self._admin.mark_delete_position(topic, SUBSCRIPTION).next_entry
        found = set()
        for message in read_range(self._client, topic.full, start, last.next_entry):
            envelope = Envelope.read(message.properties)
            found.add((envelope.id, envelope.attempt))
        return frozenset(found)
