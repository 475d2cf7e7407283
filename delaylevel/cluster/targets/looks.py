"""The look at a target before a producer of it is opened, by the admin interface."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from delaylevel.cluster import schemas
from delaylevel.cluster.failures import is_admin_away
from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import BrokerError, NotFoundError
from delaylevel.model.envelope import SchemaRef
from delaylevel.model.topic_name import TopicName

from .opening import Ledger, OpeningError, Refusal
from .receivers import NO_RECEIVER, NO_TOPIC, read_state

log = logging.getLogger(__name__)

#: The reason for holding a message that would be published effectively once.
NO_DEDUPLICATION = "broker deduplication is off"


class TargetLook(NamedTuple):
    """A target as it was before an opening.

    Attributes:
        partitions: number of partitions; 0 if it is not partitioned.
        schema: the ``pulsar.schema.Schema`` of its producer.
        max_size: limit of the topic itself for an entry, in bytes; None without one.
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

    The last look serves only while no address of the admin interface answers, but brokers serve the
    host's own topics: a target that was open before is opened as it was then. That is safe, as a
    confirmation counts as soon as it comes from a ledger that the target had, or the interface
    answers.

    Args:
        numbered: True if the messages have sequence IDs.
        connected: function that returns True while brokers serve the host's own topics.
    """

    def __init__(self, admin: TopicAdmin, numbered: bool, connected: Callable[[], bool]) -> None:
        self._admin = admin
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
            key: the producer for which this is done.
            partition: the partition that is opened; -1 for all.
            schema: reference to the schema of the payloads as text, or empty.
            may_remember: True if an earlier look is good enough.

        Raises:
            OpeningError: it must not be opened.
            BrokerError: this cannot be known now.
        """
        known = self._looks.get(key)
        try:
            look = self._look(topic, partition, schema)
        except BrokerError as error:
            if known is None or not known.ledgers or not may_remember:
                raise
            if not is_admin_away(error) or not self._connected():
                raise
            log.info("opening %s as it was before: the admin interface does not answer", topic.full)
            return known._replace(remembered=True)
        return look if known is None else look._replace(ledgers=known.ledgers)

    def opened(self, key: Hashable, look: TargetLook) -> None:
        """Note that a target was opened after a look."""
        self._looks[key] = look

    def keep(self, key: Hashable, ledgers: frozenset[Ledger]) -> None:
        """Note ledgers that an open target certainly has."""
        look = self._looks.get(key)
        if look is not None and ledgers:
            self._looks[key] = look._replace(ledgers=ledgers)

    def _look(self, topic: TopicName, partition: int, schema: str) -> TargetLook:
        try:
            state = read_state(self._admin, topic, partition)
        except NotFoundError:
            raise OpeningError(Refusal.GONE, NO_TOPIC) from None
        if partition >= 0 and not state.partitions:
            # The topic is a new one. The client would create another one for the partition.
            raise OpeningError(Refusal.GONE, NO_TOPIC)
        if not state.received:
            # Perhaps it is a new topic: whatever it has stored of ours is worth nothing.
            raise OpeningError(Refusal.GONE, NO_RECEIVER)
        if self._numbered and state.deduplication is False:
            raise OpeningError(Refusal.REFUSED, NO_DEDUPLICATION)
        reference = SchemaRef.parse(schema) if schema else None
        found = target_schema(self._admin, topic, reference)
        if isinstance(found, str):
            raise OpeningError(Refusal.REFUSED, found)
        return TargetLook(state.partitions, found, self._admin.max_message_size(topic))


def target_schema(admin: TopicAdmin, target: TopicName, reference: SchemaRef | None) -> Any:
    """Return the schema for a producer of a business topic, or the reason why there is none.

    The schema is a ``pulsar.schema.Schema``, the reason a string.
    """
    if reference is None:
        return schemas.bytes_schema()
    return schemas.find(admin, target, reference) or f"its registry has no schema {reference}"
