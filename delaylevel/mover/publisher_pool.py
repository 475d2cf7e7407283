"""Publishers of one forwarder to topics of our own."""

from __future__ import annotations

from typing import Any

from delaylevel.cluster.compression import compression_settings
from delaylevel.cluster.failures import client_error, is_too_large
from delaylevel.cluster.publisher import (
    BULK_SETTINGS,
    UNBATCHED_SETTINGS,
    Publisher,
    close_all,
    open_producer,
)
from delaylevel.errors import BatchTooLargeError, BrokerError, ClientError
from delaylevel.model.delivery import Sequence
from delaylevel.model.level_topic import LevelTopicDescription

# With sequence ids a send never waits for room in the queue: it would continue after a message
# that the client has given up.
_SEQUENCED_SETTINGS: dict[str, Any] = {
    **UNBATCHED_SETTINGS,
    "block_if_queue_full": False,
    "max_pending_messages": 0,
    "max_pending_messages_across_partitions": 1 << 30,
}

#: The window topic among the levels, as in :class:`delaylevel.model.router.Decision`.
WINDOW_TOPIC = -1

# Topics with a batch that was too large, although none of its messages may be: from now on they get
# no batches in this process.
_without_batches: set[str] = set()


class PublisherPool:
    """Publishers of one forwarder to topics of our own, each opened for its first message.

    The methods raise BrokerError if a topic cannot be written.
    """

    def __init__(
        self, client: Any, description: LevelTopicDescription, sequence: Sequence | None
    ) -> None:
        self._client = client
        self._description = description
        self._sequence = sequence
        # Each topic of our own has a publisher for each compression of its messages, and one for
        # messages that share no batch.
        self._own: dict[tuple[str, str | None, bool], Publisher[Any]] = {}
        # The same publishers as in _own, found without building the name of the topic.
        self._members: dict[tuple[int, int, str | None, bool], Publisher[Any]] = {}

    def member(
        self, level: int, partition: int, compression: str | None = None, alone: bool = False
    ) -> Publisher[Any]:
        """Return the publisher to a partition of a level or of the window topic.

        Args:
            level: number of the level, or ``WINDOW_TOPIC``.
            compression, alone: as for `own`.
        """
        key = (level, partition, compression, alone)
        publisher = self._members.get(key)
        if publisher is None:
            topic = self.member_topic(level, partition)
            publisher = self._members[key] = self.own(topic, compression, alone)
        return publisher

    def member_topic(self, level: int, partition: int) -> str:
        """Return the full name of a partition; the arguments are those of `member`."""
        described = self._description
        topic = described.window_topic if level == WINDOW_TOPIC else described.level_topic(level)
        return topic.partition(partition).full

    def own(
        self, topic: str, compression: str | None = None, alone: bool = False
    ) -> Publisher[Any]:
        """Return the publisher to a topic of our own; these have no schema.

        Args:
            compression: the compression of the messages: that of their envelopes.
            alone: True for messages that share no batch.
        """
        bulk = self._sequence is None and not alone and topic not in _without_batches
        key = (topic, compression, bulk)
        publisher = self._own.get(key)
        if publisher is None:
            try:
                producer = self._open(topic, compression, bulk)
            except ClientError as error:
                raise BrokerError(
                    f"cannot write to {topic} ({error.name}); nothing was acknowledged"
                ) from error
            publisher = self._own[key] = Publisher(producer, bulk=bulk)
        return publisher

    def flush(self) -> None:
        """Wait for the confirmations of all topics.

        Raises:
            BatchTooLargeError: a batch is too large. Everything can be sent again: from now on,
                its topic gets no batches.
            BrokerError: a message was not confirmed.
        """
        for key, publisher in list(self._own.items()):
            failure, _, _ = publisher.flush()
            if failure is not None:
                # A producer that is closed for good would fail every later try, too.
                del self._own[key]
                self._members = {}
                close_all([publisher])
                error = BrokerError
                if is_too_large(failure) and self._sequence is None:
                    error = BatchTooLargeError
                    _without_batches.add(key[0])
                raise error(
                    f"{key[0]} did not confirm ({failure}); nothing was acknowledged, and what is "
                    "unconfirmed will be read and sent again"
                ) from client_error(failure)

    def reset(self) -> None:
        """Discard the outcomes of everything sent since the last flush."""
        for publisher in self._own.values():
            publisher.reset()

    def close(self) -> None:
        """Close every producer."""
        publishers, self._own = list(self._own.values()), {}
        self._members = {}
        close_all(publishers)

    def _open(self, topic: str, compression: str | None, bulk: bool) -> Any:
        compressed = compression_settings(compression)
        if self._sequence is None:
            unbatched = {} if bulk else {"batching_enabled": False}
            settings = {**BULK_SETTINGS, **unbatched, **compressed}
            return open_producer(self._client, topic, settings)
        # A name serves one producer of a topic at a time.
        name = self._sequence.producer_name + (f"-{compression}" if compression else "")
        settings = {**_SEQUENCED_SETTINGS, **compressed}
        return open_producer(self._client, topic, settings, name=name)
