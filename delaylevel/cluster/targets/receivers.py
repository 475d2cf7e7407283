"""Receivers of a business topic, and the look at it before a producer of it is opened.

A client that is connected to a topic creates it again when it is deleted by force, without its
subscriptions. A broker does not tell when a topic was created, so a process could only remember
what the topic had before, and its successor could not. The rule therefore needs no memory: a topic
that nobody can receive from is not written to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from delaylevel.cluster import schemas
from delaylevel.cluster.failures import is_admin_away, may_pass
from delaylevel.cluster.port import PartitionStats, TopicAdmin
from delaylevel.errors import AdminError, BrokerError, NotFoundError
from delaylevel.model.envelope import SchemaRef
from delaylevel.model.topic_name import TopicName

from .opener import Ledger, OpeningError, Refusal

log = logging.getLogger(__name__)

#: The reason for holding a message whose business topic does not exist.
NO_TOPIC = "the topic does not exist"
#: The reason for holding a message whose business topic exists, without receivers.
NO_RECEIVER = "nobody can receive from it: it has no durable subscription and no known retention"
#: The reason while somebody can receive from some partitions of a business topic only.
SOME_RECEIVED = (
    "some of its partitions have no durable subscription; perhaps they are just being added"
)


def topic_stats(admin: TopicAdmin, topic: TopicName) -> dict[TopicName, PartitionStats] | None:
    """Request the statistics of any topic, e.g. a business topic.

    Returns:
        The statistics by partition; by the topic's own name if it is not partitioned. None if
        the topic does not exist.
    """
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
    """Return True if somebody can receive what is published to a topic now, or is to.

    Each partition needs a durable subscription or a copy in another cluster; or the topic has a
    retention; or its own policy keeps it while nobody subscribes (``--keep-target``), which says
    that it is meant to be without.

    Args:
        stats: statistics of its partitions; empty if one of them does not exist.

    Raises:
        BrokerError: this cannot be known now.
    """
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


def is_still_received(
    admin: TopicAdmin, topic: TopicName, partitions: int, partition: int = -1
) -> bool:
    """Return False if nobody can receive what was just stored in a topic.

    Partitions that were added since the opening are perhaps still without their subscriptions, and
    say nothing about the others.

    Args:
        partitions: number of partitions at the opening of the producer that has stored it.
    """
    try:
        present, found = _read(admin, topic, partition)
    except NotFoundError:
        return False
    if partitions and partition < 0:
        known = set(map(topic.partition, range(partitions)))
        found = {name: stats for name, stats in found.items() if name in known}
    expected = 1 if partition >= 0 else partitions
    return partitions <= present and _receives(admin, topic, found, expected)


def _read(
    admin: TopicAdmin, topic: TopicName, partition: int
) -> tuple[int, Mapping[TopicName, PartitionStats]]:
    """Return the number of partitions, and the statistics of those that are looked at."""
    partitions = admin.partitioned_metadata(topic).partitions
    if not partitions or partition < 0:
        return partitions, _stats(admin, topic, partitions)
    # Brokers delete single partitions that have no subscription, and create them again.
    with suppress(NotFoundError):
        name = topic.partition(partition)
        return partitions, {name: admin.partition_stats(name)}
    return partitions, {}


def _receives(
    admin: TopicAdmin, topic: TopicName, found: Mapping[TopicName, PartitionStats], expected: int
) -> bool:
    """Return `has_receivers` for the partitions that were found, of at least as many expected."""
    return has_receivers(admin, topic, found.values() if len(found) >= expected else ())


#: The reason for holding a message that would be published effectively once.
NO_DEDUPLICATION = "broker deduplication is off"
# An interface that hangs would answer after its timeout, 30 s by default.
_LOOK_S = 1.5


class TargetLook(NamedTuple):
    """A target as it was before an opening.

    Attributes:
        partitions: number of partitions; 0 if it is not partitioned.
        ledgers: ledgers that it certainly had while somebody could receive from it. They are not
            those of a topic that is created again.
        remembered: True if this is an earlier look, because nobody could look now. Then it is
            unknown whether a sequence ID was stored in this topic or in a new one.
    """

    partitions: int
    schema: Any
    max_size: int | None
    ledgers: frozenset[Ledger] = frozenset()
    remembered: bool = False


class TargetLooks:
    """Looks at targets before they are opened, and the last look at each.

    The last look serves only while no address of the admin interface answers soon, but brokers
    serve the host's own topics: a target that was open before is opened as it was then. That is
    safe, as a confirmation counts as soon as it comes from a ledger that the target had, or the
    interface answers.

    Args:
        connected: function that returns True while brokers serve the host's own topics.
    """

    def __init__(self, admin: TopicAdmin, numbered: bool, connected: Callable[[], bool]) -> None:
        self._admin = admin
        self._soon = admin.within(_LOOK_S)
        self._numbered = numbered
        self._connected = connected
        self._looks: dict[Hashable, TargetLook] = {}  # at the last opening of each producer

    def look(
        self,
        key: Hashable,
        topic: TopicName,
        partition: int,
        schema: str,
        may_remember: bool = True,
    ) -> TargetLook:
        """Look at a target; called in any thread.

        Args:
            partition: the partition that is opened; -1 for all.

        Raises:
            OpeningError: it must not be opened.
        """
        known = self._looks.get(key)
        if known is None or not known.ledgers or not may_remember or not self._connected():
            look = self._look(self._admin, topic, partition, schema)
            return look if known is None else look._replace(ledgers=known.ledgers)
        try:
            look = self._look(self._soon, topic, partition, schema)
        except BrokerError as error:
            if not is_admin_away(error):
                raise
            log.info("opening %s as it was before: the admin interface is silent", topic.full)
            return known._replace(remembered=True)
        return look._replace(ledgers=known.ledgers)

    def opened(self, key: Hashable, look: TargetLook) -> None:
        """Note that a target was opened after a look."""
        self._looks[key] = look

    def keep(self, key: Hashable, ledgers: frozenset[Ledger]) -> None:
        """Note ledgers that an open target certainly has."""
        look = self._looks.get(key)
        if look is not None and ledgers:
            self._looks[key] = look._replace(ledgers=ledgers)

    def _look(self, admin: TopicAdmin, topic: TopicName, partition: int, schema: str) -> TargetLook:
        try:
            partitions, found = _read(admin, topic, partition)
        except NotFoundError:
            raise OpeningError(Refusal.GONE, NO_TOPIC) from None
        if partition >= 0 and not partitions:
            # The topic is a new one. The client would create another one for the partition.
            raise OpeningError(Refusal.GONE, NO_TOPIC)
        if not _receives(admin, topic, found, 1 if partition >= 0 else partitions):
            if any(map(_is_received, found.values())):
                # A new topic has no subscription at all. New partitions are there before their
                # subscriptions are.
                raise BrokerError(SOME_RECEIVED)
            # Perhaps it is a new topic: whatever it has stored of ours is worth nothing.
            raise OpeningError(Refusal.GONE, NO_RECEIVER)
        if self._numbered and not all(each.deduplication for each in found.values()):
            raise OpeningError(Refusal.REFUSED, NO_DEDUPLICATION)
        reference = SchemaRef.parse(schema) if schema else None
        declared = target_schema(admin, topic, reference)
        if isinstance(declared, str):
            raise OpeningError(Refusal.REFUSED, declared)
        return TargetLook(partitions, declared, admin.max_message_size(topic))


def target_schema(admin: TopicAdmin, target: TopicName, reference: SchemaRef | None) -> Any:
    """Return the schema for a producer of a business topic, or the reason why there is none.

    The schema is a ``pulsar.schema.Schema``, the reason a string.
    """
    if reference is None:
        return schemas.bytes_schema()
    return schemas.find(admin, target, reference) or f"its registry has no schema {reference}"
