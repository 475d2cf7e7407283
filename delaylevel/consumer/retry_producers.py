"""Producers of retried copies, one for each schema of their payloads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from delaylevel.cluster.client_parts.receiving import message_core
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.publisher import UNBATCHED_SETTINGS, close_all, open_producer
from delaylevel.cluster.publisher import Publisher as PlainPublisher
from delaylevel.cluster.schemas import EncodedSchema, canonical, registered_reference
from delaylevel.cluster.values import SchemaVersion
from delaylevel.model.envelope import SCHEMA_TYPES, SchemaRef
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.topic_name import TopicName

log = logging.getLogger(__name__)


class SchemaKey(NamedTuple):
    """The schema of a received message, as the client tells it.

    Attributes:
        topic: full name of the topic from which the message was received; empty without a schema.
        version: number of the version in that topic's registry; -1 without a schema.
    """

    topic: str
    version: int

    @classmethod
    def of(cls, raw: Any) -> SchemaKey:
        """Return the schema of a ``pulsar.Message``."""
        version = int(message_core(raw).int_schema_version())
        if version < 0:
            return NO_SCHEMA
        return cls(TopicName.parse(raw.topic_name()).without_partition.full, version)


NO_SCHEMA = SchemaKey("", -1)


class Declared(NamedTuple):
    """A schema that the retry topic has.

    Attributes:
        schema: the schema for a producer of encoded payloads; None for plain bytes.
        reference: the reference to it in the retry topic's registry; None for plain bytes.
    """

    schema: EncodedSchema | None
    reference: SchemaRef | None


_BYTES = Declared(None, None)


class RetryProducers:
    """Producers of retried copies; several threads may use them.

    Args:
        client: a :class:`delaylevel.DelayLevelClient`.
        admin: its admin interface.
        retry_topic: the topic of retried copies.
        description: its level topic.
        options: arguments of ``create_producer``.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        retry_topic: TopicName,
        description: LevelTopicDescription,
        options: Mapping[str, Any],
    ) -> None:
        self._client = client
        self._admin = admin
        self._retry_topic = retry_topic
        self.description = description
        self._options = dict(options)
        self._lock = threading.RLock()
        self._declared: dict[SchemaKey, Declared] = {NO_SCHEMA: _BYTES}
        self._by_reference: dict[SchemaRef | None, Any] = {}
        self._opened: dict[SchemaKey, Any] = {}

    def get(self, key: SchemaKey) -> Any | None:
        """Return the producer for a schema; None if it is not open."""
        return self._opened.get(key)

    def latest(self, topic: TopicName) -> SchemaKey:
        """Return the schema with which new messages of a topic are most likely encoded."""
        versions = self._admin.schemas(topic)
        return SchemaKey(topic.full, versions[-1].version) if versions else NO_SCHEMA

    def open(self, key: SchemaKey) -> Any:
        """Return the producer for a schema, opened if necessary; this waits for the broker.

        Raises:
            BrokerError, pulsar.PulsarException: the broker refused.
        """
        with self._lock:
            declared = self.declare(key)
            producer = self._by_reference.get(declared.reference)
            if producer is None:
                options = dict(self._options)
                if declared.schema is not None:
                    options["schema"] = declared.schema
                producer = self._client.create_producer(
                    self._retry_topic.full,
                    enable_delay_level_topic=True,
                    delay_level_topic=self.description.topic,
                    create_level_topic=False,
                    **options,
                )
                self._by_reference[declared.reference] = producer
            self._opened[key] = producer
            return producer

    def declare(self, key: SchemaKey) -> Declared:
        """Return a schema that the retry topic has, after adding it there if it is missing.

        Raises:
            BrokerError: the broker refused.
        """
        with self._lock:
            declared = self._declared.get(key)
            if declared is None:
                declared = self._declared[key] = self._declare(key)
            return declared

    def has(self, producer: Any) -> bool:
        """Return True if a producer is one of these, and is in use."""
        with self._lock:
            return any(found is producer for found in self._by_reference.values())

    def take_all(self) -> list[Any]:
        """Return all producers, for closing; none is open afterwards."""
        with self._lock:
            producers = list(self._by_reference.values())
            self._by_reference.clear()
            self._opened.clear()
            return producers

    def _declare(self, key: SchemaKey) -> Declared:
        versions = self._admin.schemas(TopicName.parse(key.topic))
        wanted = next((each for each in versions if each.version == key.version), None)
        if wanted is None:
            log.warning(
                "version %d of the schema of %s does not exist any more: copies of its messages "
                "have no schema",
                key.version,
                key.topic,
            )
            return _BYTES
        if wanted.type not in SCHEMA_TYPES:
            # No hop could declare it. Consumers of this client receive such payloads as bytes.
            return _BYTES
        own = {_reference(each) for each in self._admin.schemas(self._retry_topic)}
        # In this order each version was compatible with those before it.
        for each in versions:
            needed = each.version <= key.version and each.type in SCHEMA_TYPES
            if needed and _reference(each) not in own:
                self._register(each)
        stored = self._admin.schemas(self._retry_topic)
        reference = registered_reference(stored, wanted.type, wanted.definition)
        return Declared(
            EncodedSchema(wanted.type, wanted.definition), reference or _reference(wanted)
        )

    def _register(self, version: SchemaVersion) -> None:
        """Add a schema to the retry topic: the client does that with a producer."""
        schema = EncodedSchema(version.type, version.definition)
        topic = self._retry_topic.full
        producer = open_producer(self._client, topic, UNBATCHED_SETTINGS, schema=schema)
        close_all([PlainPublisher(producer)])


def _reference(version: SchemaVersion) -> SchemaRef:
    return SchemaRef.of(version.type, canonical(version.definition))
