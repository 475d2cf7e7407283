"""Publication of a forwarder: to topics of our own, and to business topics through the pool.

Apart from the forwarder because nothing here knows of routes: a message comes with its place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from delaylevel.cluster.failures import client_error, is_too_large
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.publisher import (
    BULK_SETTINGS,
    Publisher,
    close_all,
    compression_settings,
    needs_own_batch,
    open_producer,
)
from delaylevel.cluster.targets.opener import GIVE_UP_S
from delaylevel.cluster.targets.pool import TargetKey, TargetPool
from delaylevel.cluster.targets.send_state import SendOutcome
from delaylevel.cluster.threads import BackgroundWork, Starter
from delaylevel.errors import BatchTooLargeError, BrokerError, ClientError
from delaylevel.model.envelope import Envelope
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import ParkedMessage

#: The window topic among the levels, as in :class:`delaylevel.model.router.Decision`.
WINDOW_TOPIC = -1

# Topics with a batch that was too large, although none of its messages may be: from now on they get
# no batches in this process.
_without_batches: set[str] = set()


class PublisherPool:
    """Publishers of one forwarder to topics of our own, each opened for its first message.

    The methods raise BrokerError if a topic cannot be written.
    """

    def __init__(self, client: Any, description: LevelTopicDescription) -> None:
        self._client = client
        self._description = description
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
        bulk = not alone and topic not in _without_batches
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
                if is_too_large(failure):
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
        unbatched = {} if bulk else {"batching_enabled": False}
        settings = {**BULK_SETTINGS, **unbatched, **compression_settings(compression)}
        return open_producer(self._client, topic, settings)


# A target that only confirms slowly is waited for. Without any outcome for this time nobody can
# tell what became of the messages.
PATIENCE_S = 60.0
_POLL_S = 0.05
# Callbacks follow the end of a flush within a moment.
_OWED_S = 0.0005


@dataclass(slots=True, eq=False)
class HandOff:
    """A message that was handed off.

    Attributes:
        due: True if the message is due; otherwise the broker holds it until it is.
        reason: the reason why its target did not take it; empty as long as that is not known.
    """

    message: ParkedMessage
    envelope: Envelope
    due: bool
    reason: str = ""


class HandOffs:
    """The messages that one forwarder has handed off to business topics.

    One thread uses it.

    Args:
        client_of: function that returns the ``pulsar.Client`` for a target; called in any thread.
        pause_s: function that returns for how long a target is left alone after a refusal, in s.
        start: function that runs slow work; a thread for each by default.
        now_s: monotonic clock.
        connected: as for :class:`~delaylevel.cluster.targets.pool.TargetPool`.
    """

    def __init__(
        self,
        client_of: Callable[[str], Any],
        admin: TopicAdmin,
        pause_s: Callable[[], float],
        *,
        start: Starter | None = None,
        now_s: Callable[[], float] = time.monotonic,
        connected: Callable[[], bool] = lambda: False,
    ) -> None:
        self._now_s = now_s
        self._woken = threading.Event()
        self._background = BackgroundWork()
        self._pool: TargetPool[HandOff] = TargetPool(
            client_of,
            admin,
            pause_s=pause_s,
            start=start or self._background.start,
            now_s=now_s,
            wake=self._woken.set,
            connected=connected,
        )
        self._aside: list[HandOff] = []
        self._stored = [0, 0]  # not due yet, due

    def send(self, hand_off: HandOff, properties: dict[str, str]) -> None:
        """Send a message as soon as its target is open."""
        message, envelope = hand_off.message, hand_off.envelope
        topic = envelope.target
        schema = "" if envelope.schema is None else str(envelope.schema)
        reason = self._pool.refusal(topic, schema)
        if reason is not None:
            hand_off.reason = reason
            self._aside.append(hand_off)
            return
        alone = needs_own_batch(message, properties)
        key = TargetKey(topic, schema, envelope.compression or "", alone=alone)
        producer = self._pool.producer(key)
        deliver_at_ms = None if hand_off.due else envelope.due_ms
        if not producer.is_open:
            producer.open()
        producer.send(hand_off, message, properties, deliver_at_ms)

    def poll(self) -> bool:
        """Process the outcomes since the last call; return False if there were none."""
        found = False
        for _, (sent, outcome, reason) in self._pool.poll():
            found = True
            hand_off: HandOff = sent.item
            if outcome is SendOutcome.STORED:
                self._stored[hand_off.due] += 1
            else:
                hand_off.reason = reason
                self._aside.append(hand_off)
        return found

    def wait(self) -> None:
        """Wait until every message has an outcome.

        Raises:
            BrokerError: the outcome of some messages cannot be known now.
        """
        pool = self._pool
        pool.flush()
        reasons: dict[str, str] = {}
        quiet_s, before_s = 0.0, self._now_s()
        while True:
            self._woken.clear()
            if self.poll():
                quiet_s = 0.0
            if not pool.active:
                return
            now_s = self._now_s()
            quiet_s += min(now_s - before_s, 1.0)  # more: this process was suspended
            before_s = now_s
            for key, _ in pool.waiting():
                reason = pool.refusal(key.topic, key.schema)
                if reason is not None:
                    reasons[key.topic] = reason
            if quiet_s > GIVE_UP_S:
                # Connected or not: the rest of the batch cannot wait any longer, and a message
                # that may be stored already is held, with its ID.
                pool.give_up_stalled()
            if quiet_s > PATIENCE_S:
                raise self._unknown(reasons)
            self._woken.wait(_OWED_S if pool.owes_answers else _POLL_S)

    def take_refused(self) -> list[HandOff]:
        """Return the messages to be set aside now."""
        aside, self._aside = self._aside, []
        return aside

    def take_stored(self) -> tuple[int, int]:
        """Return the numbers of messages stored since the last call: not due yet, and due."""
        window, due = self._stored
        self._stored = [0, 0]
        return window, due

    def reset(self) -> None:
        """Drop all messages; they will be sent again."""
        if len(self._pool):
            self._pool.close()
        self._aside = []
        self._stored = [0, 0]

    def close(self) -> None:
        """Close the producers; messages without an outcome get none."""
        self._pool.close()
        self._background.join()

    def _unknown(self, reasons: dict[str, str]) -> BrokerError:
        topics = dict.fromkeys(key.topic for key, _ in self._pool.waiting())
        names = (f"{topic} ({reasons.get(topic, 'no confirmation')})" for topic in topics)
        return BrokerError(
            f"{', '.join(names)}: it is not known which of the messages are stored; nothing was "
            "acknowledged, and they will be sent again"
        )
