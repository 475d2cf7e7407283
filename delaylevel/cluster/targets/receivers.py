"""Receivers of a business topic, and the look at it before a producer of it is opened.

A client that is connected to a topic creates it again when it is deleted by force, without its
subscriptions. A broker does not tell when a topic was created, so a process could only remember
what the topic had before, and its successor could not. The rule therefore needs no memory: a topic
that nobody can receive from is not written to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

from delaylevel.cluster import schemas
from delaylevel.cluster.failures import error_name, is_admin_away, may_pass
from delaylevel.cluster.port import PartitionStats, TopicAdmin
from delaylevel.errors import (
    AdminError,
    BrokerError,
    ClientError,
    DelayLevelError,
    NotFoundError,
)
from delaylevel.model.envelope import SchemaRef
from delaylevel.model.topic_name import TopicName

log = logging.getLogger(__name__)

#: The reason for holding a message whose business topic does not exist.
NO_TOPIC = "the topic does not exist"
#: The reason for holding a message whose business topic exists, without receivers.
NO_RECEIVER = "nobody can receive from it: it has no durable subscription and no known retention"
#: The reason for holding a message whose business topic was made again, with other partitions.
OTHER_PARTITIONS = "it was created again, with partitions instead of without, or the reverse"
#: The reason while somebody can receive from some partitions of a business topic only.
SOME_RECEIVED = (
    "some of its partitions have no durable subscription; perhaps they are just being added"
)


class Refusal(Enum):
    """Kind of a failed opening."""

    GONE = "gone"  # the topic does not exist, or nobody can receive from it
    REFUSED = "refused"  # the topic takes no producer now
    UNAVAILABLE = "unavailable"  # no answer; it may be served in a moment


class OpeningError(DelayLevelError):
    """A topic that cannot be opened."""

    def __init__(self, kind: Refusal, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason

    @classmethod
    def of(cls, error: Exception) -> OpeningError:
        """Return the opening error for any error."""
        if isinstance(error, OpeningError):
            return error
        if isinstance(error, ClientError):
            kind = Refusal.UNAVAILABLE if error.transient else Refusal.REFUSED
            return cls(kind, error.name)
        if not isinstance(error, BrokerError):
            log.error("opening a producer failed", exc_info=error)
        return cls(Refusal.UNAVAILABLE, str(error) or error_name(error))


def topic_stats(admin: TopicAdmin, topic: TopicName) -> dict[TopicName, PartitionStats] | None:
    """Request the statistics of a topic by partition, or by its own name; None if it is missing."""
    try:
        return _stats(admin, topic, admin.partitioned_metadata(topic).partitions)
    except NotFoundError:
        return None


def _stats(admin: TopicAdmin, topic: TopicName, partitions: int) -> dict[TopicName, PartitionStats]:
    if not partitions:
        return {topic: admin.partition_stats(topic)}
    found = admin.partitioned_stats(topic)
    return {topic.partition(index): stats for index, stats in found.items()}


def has_receivers(admin: TopicAdmin, topic: TopicName, stats: Collection[PartitionStats]) -> bool:
    """Return True if somebody can receive what is published now; a BrokerError: unknown."""
    # Each partition needs a durable subscription or a copy in another cluster (no ``stats``: one of
    # them does not exist). Or the topic has a retention, or its own policy keeps it while nobody
    # subscribes (``--keep-target``), which says that it is meant to be without.
    if (stats and all(map(_is_received, stats))) or admin.retains(topic):
        return True
    try:
        return admin.topic_policies(topic).delete_while_inactive is False
    except AdminError as error:
        if may_pass(error):
            raise
        return False  # no policies for single topics, or none that this role may read


def _is_received(stats: PartitionStats) -> bool:
    return stats.replicated or any(each.durable for each in stats.subscriptions.values())


#: Partition (-1 without) and ledger ID.
Ledger = tuple[int, int]
#: The reason for holding a message that would be published effectively once.
NO_DEDUPLICATION = "broker deduplication is off"
# An interface that hangs would answer after its timeout, 30 s by default.
_LOOK_S = 1.5


class TargetLook(NamedTuple):
    """A target as it was before an opening."""

    partitions: int  # 0 if it is not partitioned
    schema: Any
    max_size: int | None
    remembered: bool = False  # an earlier look, because nobody could look now: see `Opened`


class Receivers:
    """A memory of who can receive from a target; it outlives the producers.

    A target is looked at before each opening, and whenever a confirmation names a new ledger: after
    a rollover, on another broker, and in a deleted topic that a client has created again.
    """

    def __init__(
        self,
        admin: TopicAdmin,
        topic: TopicName,
        partition: int,
        schema: str,
        *,
        numbered: bool,
        connected: Callable[[], bool],
    ) -> None:
        self._admin = admin
        # Where a last look can serve instead, an interface that hangs must not cost its timeout.
        self._soon = admin.within(_LOOK_S)
        self._topic = topic
        self._partition = partition  # -1 for all
        self._schema = schema
        self._numbered = numbered  # broker deduplication is necessary
        self._connected = connected  # True while brokers serve the host's own topics
        self._look: TargetLook | None = None  # the last one that allowed an opening
        # That it certainly had while somebody could receive from it, so they are not those of a
        # topic that is created again. Read in any thread.
        self.ledgers: frozenset[Ledger] = frozenset()

    def look(self, *, may_remember: bool) -> TargetLook:
        """Look at the target in any thread; raise OpeningError if it must not be opened."""
        # While no address of the admin interface answers soon, but brokers serve the host's own
        # topics, a target that was open before is opened as it was then. Confirmations count once
        # they come from a ledger that it had, or the interface answers.
        last = self._look
        if last is None or not self.ledgers or not may_remember or not self._connected():
            return self._look_with(self._admin)
        try:
            return self._look_with(self._soon)
        except BrokerError as error:
            if not is_admin_away(error):
                raise
        log.info("opening %s as it was before: the admin interface is silent", self._topic.full)
        return last._replace(remembered=True)

    def knows(self, message_id: Any) -> bool:
        """Return True if somebody could certainly receive a message when it was stored."""
        # A message that the broker has dropped, because it knows the sequence ID, has no position:
        # perhaps it is a new topic that knows it.
        return (message_id.partition(), message_id.ledger_id()) in self.ledgers

    def looked(self, received: bool, message_ids: Iterable[Any]) -> None:
        """Note that somebody, or nobody, can receive messages that were confirmed before a look."""
        found = {(each.partition(), each.ledger_id()) for each in message_ids}
        found = {ledger for ledger in found if ledger[1] >= 0}
        self.ledgers = self.ledgers | found if received else frozenset()

    def exist(self) -> bool:
        """Return False if nobody can receive what was just stored; errors as `has_receivers`."""
        partitions = self._look.partitions if self._look is not None else 0
        try:
            present, found = self._read(self._admin)
        except NotFoundError:
            return False
        if present and not partitions:
            return False  # a client has made a topic again that has partitions now
        if partitions and self._partition < 0:
            # Partitions that were added since are perhaps still without their subscriptions, and
            # say nothing about the others.
            known = set(map(self._topic.partition, range(partitions)))
            found = {name: stats for name, stats in found.items() if name in known}
        return self._receives(self._admin, found, partitions)

    def _look_with(self, admin: TopicAdmin) -> TargetLook:
        try:
            partitions, found = self._read(admin)
        except NotFoundError:
            raise OpeningError(Refusal.GONE, NO_TOPIC) from None
        if self._partition >= 0 and not partitions:
            # The topic is a new one. The client would create another one for the partition.
            raise OpeningError(Refusal.GONE, OTHER_PARTITIONS)
        if not self._receives(admin, found, partitions):
            if any(map(_is_received, found.values())):
                # A new topic has no subscription at all. New partitions are there before their
                # subscriptions are.
                raise BrokerError(SOME_RECEIVED)
            # Perhaps it is a new topic: whatever it has stored of ours is worth nothing.
            raise OpeningError(Refusal.GONE, NO_RECEIVER)
        if self._numbered and not all(each.deduplication for each in found.values()):
            raise OpeningError(Refusal.REFUSED, NO_DEDUPLICATION)
        schema = None
        if self._schema:
            reference = SchemaRef.parse(self._schema)
            schema = schemas.find(admin, self._topic, reference)
            if schema is None:
                reason = f"its registry has no schema {reference}"
                raise OpeningError(Refusal.REFUSED, reason)
        self._look = TargetLook(partitions, schema, admin.max_message_size(self._topic))
        return self._look

    def _read(self, admin: TopicAdmin) -> tuple[int, Mapping[TopicName, PartitionStats]]:
        """Return the number of partitions, and the statistics of those that are looked at."""
        partitions = admin.partitioned_metadata(self._topic).partitions
        if not partitions or self._partition < 0:
            return partitions, _stats(admin, self._topic, partitions)
        # Brokers delete single partitions that have no subscription, and create them again.
        with suppress(NotFoundError):
            name = self._topic.partition(self._partition)
            return partitions, {name: admin.partition_stats(name)}
        return partitions, {}

    def _receives(
        self, admin: TopicAdmin, found: Mapping[TopicName, PartitionStats], partitions: int
    ) -> bool:
        """Return `has_receivers` for the partitions that were found, or for none if some lack."""
        expected = 1 if self._partition >= 0 else partitions
        stats = found.values() if len(found) >= expected else ()
        return has_receivers(admin, self._topic, stats)
