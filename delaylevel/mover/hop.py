"""What becomes of a message that a mover has read: the part that every mover shares.

Which words are written on it at each way on, how long the broker holds it there, and whether a
business topic can be written at all. Nothing here sends, waits or acknowledges.
"""

from __future__ import annotations

from typing import Any

from delaylevel.cluster import schemas
from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import EnvelopeError, InvalidInputError
from delaylevel.model import envelope as env
from delaylevel.model.delivery import Delivery
from delaylevel.model.envelope import Envelope, SchemaRef
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, MissingTarget, Mover
from delaylevel.model.message import ParkedMessage
from delaylevel.model.router import Router
from delaylevel.model.topic_name import TopicName


def check_delivery(description: LevelTopicDescription, delivery: Delivery) -> None:
    """Raise InvalidInputError where a mover may not promise this for a level topic.

    With a tracker the dispatcher makes the end effectively once: hops before it stay at least once.
    """
    if delivery is Delivery.EFFECTIVELY_ONCE and description.final_window is FinalWindow.TRACKER:
        raise InvalidInputError(
            f"level topic {description.topic} has the final window 'tracker': a mover's hops are "
            "at least once there, and the dispatcher removes the copies by their id. Run the "
            "mover with --delivery at-least-once, and the dispatcher with `delaylevel dispatch "
            "run --delivery effectively-once`"
        )


#: Why nothing can be written to a business topic that is gone.
NO_TOPIC = "the topic does not exist"


def open_envelope(
    description: LevelTopicDescription, topic: str, message: ParkedMessage
) -> Envelope:
    """Return the envelope of a message that was read, with the id it keeps from now on.

    Args:
        description: the level topic.
        topic: the full name of the partition where the message was read.
        message: as it was read there.

    Raises:
        EnvelopeError: it cannot be understood, or its target is not one of the level topic.
    """
    envelope = Envelope.read(message.properties)
    if envelope.target not in description.targets:
        raise EnvelopeError(
            f"target {envelope.target} is not one of level topic {description.topic}"
        )
    if envelope.id is None:
        return envelope.identified(message.stable_id(topic))
    return envelope


def dead_letter_properties(message: ParkedMessage, topic: str, reason: str) -> dict[str, str]:
    """Return the properties of a message that cannot be understood: as it is, and why."""
    return {**message.properties, env.REASON: reason, env.SOURCE: message.stable_id(topic)}


def held_properties(message: ParkedMessage, envelope: Envelope, reason: str) -> dict[str, str]:
    """Return the properties of a message whose target cannot be written now."""
    application = env.application_properties(message.properties)
    properties = envelope.held_again().parked_properties(application)
    properties[env.REASON] = reason
    return properties


def missing_target_policy(description: LevelTopicDescription, reason: str) -> MissingTarget:
    """Return what becomes of a message that its target has refused for this reason."""
    if reason != NO_TOPIC:
        return MissingTarget.HOLD
    return description.on_missing_target


def abandoned_properties(message: ParkedMessage, envelope: Envelope) -> dict[str, str]:
    """Return the properties of a dead letter whose target does not exist."""
    properties = envelope.parked_properties(env.application_properties(message.properties))
    properties[env.REASON] = f"target {envelope.target} does not exist"
    return properties


def delivered_properties(message: ParkedMessage, envelope: Envelope) -> dict[str, str]:
    """Return the properties of the business message."""
    return envelope.delivered_properties(env.application_properties(message.properties))


def parked_until_ms(
    description: LevelTopicDescription, router: Router, level: int, partition: int, now_ms: int
) -> int | None:
    """Return until when the broker holds what is parked now; None where the mover waits itself."""
    if description.mover is not Mover.FUNCTION:
        return None
    return router.hand_off_ms(level, partition, now_ms)


def held_until_ms(description: LevelTopicDescription, now_ms: int) -> int | None:
    """Return until when the broker holds what is set aside now; None where the mover waits."""
    if description.mover is not Mover.FUNCTION:
        return None
    return now_ms + description.hold_pause_ms


def target_schema(admin: TopicAdmin, target: str, reference: SchemaRef | None) -> Any:
    """Return the schema for a producer of a business topic, or why it cannot be written.

    A topic that is gone is never made anew by the producer: whether it exists is asked first.

    Returns:
        A ``pulsar.schema.Schema``, or the reason as a string.
    """
    name = TopicName.parse(target)
    if not admin.topic_exists(name):
        return NO_TOPIC
    if reference is None:
        return schemas.bytes_schema()
    return schemas.find(admin, name, reference) or f"its registry has no schema {reference}"
