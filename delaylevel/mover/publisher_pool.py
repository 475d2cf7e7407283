"""Publishers of one forwarder: to business topics, and to topics of our own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from delaylevel.cluster.compression import compression_settings
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
from delaylevel.cluster.targets.schema import NO_TOPIC, target_schema
from delaylevel.errors import BrokerError, ClientError
from delaylevel.model.delivery import Sequence
from delaylevel.model.envelope import Envelope, SchemaRef
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import ParkedMessage
from delaylevel.model.topic_name import TopicName

# With sequence ids a send never waits for room in the queue: it would continue after a message
# that the client has given up.
_SEQUENCED_SETTINGS: dict[str, Any] = {
    **UNBATCHED_SETTINGS,
    "block_if_queue_full": False,
    "max_pending_messages": 0,
    "max_pending_messages_across_partitions": 1 << 30,
}

# A business topic, the schema, and, for keyless messages under deduplication, its partition.
_TargetKey = tuple[str, SchemaRef | None, int | None]


@dataclass(slots=True)
class HandOff:
    """A message that was handed off, and that its target has not confirmed yet."""

    message: ParkedMessage
    envelope: Envelope
    due: bool


class PublisherPool:
    """Publishers of one forwarder, each opened for its first message.

    The methods raise BrokerError if a topic of our own cannot be written, if no broker serves a
    business topic, or if the broker may have stored a message with a sequence id that failed.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        description: LevelTopicDescription,
        sequence: Sequence | None,
    ) -> None:
        self._client = client
        self._admin = admin
        self._description = description
        self._sequence = sequence
        self._targets: dict[_TargetKey, Publisher[HandOff]] = {}
        # Each topic of our own has a publisher for each compression of its messages.
        self._own: dict[tuple[str, str | None], Publisher[Any]] = {}
        # The same publishers as in _own, found without building the name of the topic.
        self._levels: dict[tuple[int, int, str | None], Publisher[Any]] = {}
        self._window: dict[tuple[int, str | None], Publisher[Any]] = {}
        self._partition_counts: dict[str, int] = {}

    def level(self, level: int, partition: int, compression: str | None = None) -> Publisher[Any]:
        """Return the publisher to a partition of a level, of messages with this compression."""
        key = (level, partition, compression)
        publisher = self._levels.get(key)
        if publisher is None:
            topic = self._description.level_topic(level).partition(partition).full
            publisher = self._levels[key] = self.own(topic, compression)
        return publisher

    def window(self, partition: int, compression: str | None = None) -> Publisher[Any]:
        """Return the publisher to a window partition, of messages with this compression."""
        key = (partition, compression)
        publisher = self._window.get(key)
        if publisher is None:
            topic = self._description.window_topic.partition(partition).full
            publisher = self._window[key] = self.own(topic, compression)
        return publisher

    def own(self, topic: str, compression: str | None = None) -> Publisher[Any]:
        """Return the publisher to a topic of our own; these have no schema.

        Args:
            compression: the compression of the messages: that of their envelopes.
        """
        publisher = self._own.get((topic, compression))
        if publisher is None:
            settings = {**BULK_SETTINGS, **compression_settings(compression)}
            # A name serves one producer of a topic at a time.
            suffix = "" if compression is None else f"-{compression}"
            try:
                producer = self._open(topic, settings, suffix)
            except ClientError as error:
                raise BrokerError(
                    f"cannot write to {topic} ({error.name}); nothing was acknowledged"
                ) from error
            publisher = Publisher(producer, bulk=self._sequence is None)
            self._own[topic, compression] = publisher
        return publisher

    def target(
        self, envelope: Envelope, message: ParkedMessage, sequence_id: int | None
    ) -> Publisher[HandOff] | str:
        """Return the publisher to a business topic, or the reason why it cannot be written."""
        partition = None
        if sequence_id is not None and not (message.key or message.ordering_key):
            # The client would choose the partition in turn; a replay has to choose the same one.
            count = self._partition_counts.get(envelope.target)
            if count is None:
                name = TopicName.parse(envelope.target)
                if not self._admin.topic_exists(name):
                    return NO_TOPIC
                count = self._admin.partitioned_metadata(name).partitions
                self._partition_counts[envelope.target] = count
            partition = sequence_id % count if count else None
        key = (envelope.target, envelope.schema, partition)
        publisher = self._targets.get(key)
        if publisher is None:
            opened = self._open_target(*key)
            if isinstance(opened, str):
                return opened
            publisher = self._targets[key] = Publisher(opened)
        return publisher

    def flush_targets(
        self,
    ) -> Iterator[tuple[str | None, list[HandOff], list[tuple[HandOff, str]]]]:
        """Wait for the confirmations of each business topic; close producers that failed.

        Yields:
            The failure or None; hand-offs that are confirmed; those that failed, with the reason.
        """
        for key, publisher in list(self._targets.items()):
            failure, confirmed, failed = publisher.flush()
            if failure is not None:
                del self._targets[key]
                close_all([publisher])
                for _, reason in failed:
                    self._check_certain(key[0], reason)
            yield failure, confirmed, failed

    def flush_own(self) -> None:
        """Wait for the confirmations of our own topics."""
        for key, publisher in list(self._own.items()):
            failure, _, _ = publisher.flush()
            if failure is not None:
                # A producer that is closed for good would fail every later try, too.
                del self._own[key]
                self._levels, self._window = {}, {}
                close_all([publisher])
                raise BrokerError(
                    f"{key[0]} did not confirm ({failure}); nothing was acknowledged, and what is "
                    "unconfirmed will be read and sent again"
                )

    def reset(self) -> None:
        """Discard the outcomes of everything sent since the last flush."""
        for publisher in (*self._targets.values(), *self._own.values()):
            publisher.reset()

    def close_targets(self) -> None:
        """Close the producers of business topics."""
        publishers, self._targets = list(self._targets.values()), {}
        close_all(publishers)

    def close(self) -> None:
        """Close every producer."""
        self.close_targets()
        publishers, self._own = list(self._own.values()), {}
        self._levels, self._window = {}, {}
        close_all(publishers)

    def _open(
        self, topic: str, batched: Mapping[str, Any], suffix: str = "", schema: Any = None
    ) -> Any:
        if self._sequence is None:
            return open_producer(self._client, topic, batched, schema=schema)
        name = self._sequence.producer_name + suffix
        settings = _SEQUENCED_SETTINGS
        if "compression_type" in batched:
            settings = {**settings, "compression_type": batched["compression_type"]}
        return open_producer(self._client, topic, settings, schema=schema, name=name, retry_s=0.2)

    def _open_target(self, target: str, reference: SchemaRef | None, partition: int | None) -> Any:
        """Return a producer for a business topic, or the reason why it cannot be written."""
        schema = target_schema(self._admin, target, reference)
        if isinstance(schema, str):
            return schema
        topic = target
        if partition is not None:
            topic = TopicName.parse(target).partition(partition).full
        # A name serves one producer of a topic at a time: each schema, and each way to choose a
        # partition, needs its own.
        suffix = f"-{reference}" if reference is not None else ""
        suffix += "" if partition is None else "-keyless"
        try:
            return self._open(topic, KEY_BATCHED_SETTINGS, suffix, schema)
        except ClientError as error:
            if error.transient:
                raise BrokerError(
                    f"no broker serves {target} now ({error.name}); nothing was acknowledged"
                ) from error
            self._check_certain(target, error.name)
            return error.name

    def _check_certain(self, target: str, reason: str) -> None:
        """Raise BrokerError if a message with a sequence id may have been stored all the same."""
        if self._sequence is not None and reason not in CERTAIN_REFUSALS:
            raise BrokerError(
                f"{target} did not confirm ({reason}); nothing was acknowledged, and a replay "
                "sends the same again, of which the broker drops what it has"
            )
