"""The look at a target before a producer of it is opened, by the admin interface."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from delaylevel.cluster.failures import is_admin_away
from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import BrokerError, NotFoundError
from delaylevel.model.envelope import SchemaRef
from delaylevel.model.topic_name import TopicName

from .identity import TopicIdentity, identify
from .opening import Ledger, OpeningError, Refusal
from .producer import REPLACED
from .schema import NO_TOPIC, target_schema

log = logging.getLogger(__name__)

#: The reason for holding a message that would be published effectively once.
NO_DEDUPLICATION = "broker deduplication is off"


class TargetLook(NamedTuple):
    """A target as it was before an opening.

    Attributes:
        schema: the ``pulsar.schema.Schema`` of its producer.
        max_size: limit of the topic itself for an entry, in bytes; None without one.
        ledgers: ledgers that it certainly had when it was open. A topic with one of them is still
            the same one.
        remembered: True if this is an earlier look, because nobody could look now. Then it is
            unknown whether a sequence ID was stored in this topic or in a new one.
    """

    identity: TopicIdentity
    schema: Any
    max_size: int | None
    ledgers: frozenset[Ledger] = frozenset()
    remembered: bool = False


class TargetLooks:
    """Looks at targets before they are opened, and remembers the last look at each.

    If no address of the admin interface answers, but brokers serve the host's own topics, a target
    that was open before is opened as it was then. That is safe: a confirmation counts as soon as it
    comes from a ledger that the target had, or the interface answers.

    Args:
        numbered: True if the messages have sequence IDs.
        connected: function that returns True while brokers serve the host's own topics.
    """

    def __init__(self, admin: TopicAdmin, numbered: bool, connected: Callable[[], bool]) -> None:
        self._admin = admin
        self._numbered = numbered
        self._connected = connected
        # Both by target, as it was at its last opening.
        self._opened: dict[tuple[str, int], TopicIdentity] = {}
        self._looks: dict[Hashable, TargetLook] = {}
        self._subscribed: set[str] = set()  # targets that had a subscription at an opening

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
        if known is None or not known.identity.subscriptions:
            return look
        is_same = look.identity.has_all_of(known.identity)
        return look._replace(ledgers=known.ledgers) if is_same else look

    def opened(self, key: Hashable, topic: TopicName, partition: int, look: TargetLook) -> None:
        """Note that a target was opened after a look."""
        self._opened[topic.full, partition] = look.identity
        self._looks[key] = look
        if look.identity.subscriptions:
            self._subscribed.add(topic.full)

    def keep(self, key: Hashable, ledgers: frozenset[Ledger]) -> None:
        """Note ledgers that an open target certainly has."""
        look = self._looks.get(key)
        if look is not None and ledgers:
            self._looks[key] = look._replace(ledgers=ledgers)

    def _look(self, topic: TopicName, partition: int, schema: str) -> TargetLook:
        try:
            identity = identify(self._admin, topic, partition)
        except NotFoundError:
            raise OpeningError(Refusal.GONE, NO_TOPIC) from None
        if self._is_replaced(topic, partition, identity):
            # A new topic: whatever it has stored of ours is worth nothing.
            raise OpeningError(Refusal.GONE, REPLACED)
        if partition >= 0 and not identity.partitions:
            # The topic is a new one. The client would create another one for the partition.
            raise OpeningError(Refusal.GONE, NO_TOPIC)
        if self._numbered and identity.deduplication is False:
            raise OpeningError(Refusal.REFUSED, NO_DEDUPLICATION)
        reference = SchemaRef.parse(schema) if schema else None
        found = target_schema(self._admin, topic.full, reference)
        if isinstance(found, str):
            raise OpeningError(Refusal.REFUSED, found)
        return TargetLook(identity, found, self._admin.max_message_size(topic))

    def _is_replaced(self, topic: TopicName, partition: int, identity: TopicIdentity) -> bool:
        """Return True if a topic with subscriptions was deleted and created again without any."""
        if identity.subscriptions or topic.full not in self._subscribed:
            return False
        before = self._opened.get((topic.full, partition))
        if partition < 0 or (before is not None and before.subscriptions):
            return True
        # Brokers delete single partitions that are not used. The others tell what has happened.
        return not identify(self._admin, topic).subscriptions
