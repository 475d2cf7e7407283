"""Schema of a producer for a business topic."""

from __future__ import annotations

from typing import Any

from delaylevel.cluster import schemas
from delaylevel.cluster.port import TopicAdmin
from delaylevel.model.envelope import SchemaRef
from delaylevel.model.topic_name import TopicName

#: The reason for holding a message whose business topic does not exist.
NO_TOPIC = "the topic does not exist"


def target_schema(admin: TopicAdmin, target: TopicName, reference: SchemaRef | None) -> Any:
    """Return the schema for a producer of a business topic, or the reason why there is none.

    The schema is a ``pulsar.schema.Schema``, the reason a string.
    """
    if reference is None:
        return schemas.bytes_schema()
    return schemas.find(admin, target, reference) or f"its registry has no schema {reference}"
