"""Rules for the next hop of a message, shared by every mover and the dispatcher.

They give the properties of the message at each hop, the time until which the broker holds it
there, and the schema of its business topic. Nothing here sends, waits or acknowledges.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from delaylevel.cluster.failures import TOO_LARGE
from delaylevel.cluster.targets.receivers import NO_TOPIC
from delaylevel.errors import EnvelopeError, UnknownTargetError
from delaylevel.model import envelope as env
from delaylevel.model.due_time import is_expired
from delaylevel.model.envelope import Envelope
from delaylevel.model.level_topic import (
    Expired,
    FinalWindow,
    LevelTopicDescription,
    MissingTarget,
    Mover,
)
from delaylevel.model.message import ParkedMessage, Payload
from delaylevel.model.position import SourcePartition
from delaylevel.model.retries import RETRY_ID
from delaylevel.model.router import Hop, Router

# The window topic among the levels.
_WINDOW = -1


def open_envelope(
    description: LevelTopicDescription, topic: str, message: ParkedMessage
) -> Envelope:
    """Return the envelope of a message, with the id that the message keeps from now on.

    After an UnknownTargetError, the target may be new: see `Carrier.give`.
    """
    properties = message.properties
    # Computed only if needed, and given to read(): this runs for every message.
    fallback_id = None if env.ID in properties else message.stable_id(topic)
    envelope = Envelope.read(properties, fallback_id)
    if envelope.kind is not None and description.final_window is not FinalWindow.TRACKER:
        raise EnvelopeError(
            f"{env.KIND} is {envelope.kind!r}: no dispatcher decides about such records in level "
            f"topic {description.topic}, which has the final window "
            f"{description.final_window.value!r}"
        )
    if envelope.target not in description.known_targets:
        raise UnknownTargetError(
            f"target {envelope.target} is not one of level topic {description.topic}"
        )
    return envelope


def dead_letter_properties(message: ParkedMessage, topic: str, reason: str) -> dict[str, str]:
    """Return the properties of a message that cannot be read: its own, the reason and its place."""
    return {
        **message.properties,
        env.REASON: env.bounded_reason(reason),
        env.SOURCE: message.stable_id(topic),
    }


class Place(NamedTuple):
    """The next place of a message, and its entry in the report."""

    counter: str
    counted_by: Any
    topic: str  # a partition of our own, or the target; empty for a message that is dropped
    is_ours: bool = True


class Placed(NamedTuple):
    """A message at its next place."""

    place: Place
    properties: dict[str, str]
    deliver_at_ms: int | None = None


# The broker releases a message up to a tick early. A message that it would release at once is not
# parked again and again, but goes to the final window (of units of a second or so).
_BROKER_TICK_MS = 1000


# Longest time for which a topic that was missing counts as missing if its messages are not held.
_MISSING_MS = 1000


class NextHop:
    """The next hop of each message of one level topic."""

    def __init__(self, description: LevelTopicDescription, router: Router | None = None) -> None:
        self.description = description
        self._router = router or Router(description.levels)
        self._tracked = description.final_window is FinalWindow.TRACKER
        # With a Function, the broker holds what is parked; the other movers wait themselves.
        self._held_by_broker = description.mover is Mover.FUNCTION
        self._places: dict[tuple[int, int], Place] = {}
        self._targets: dict[tuple[str, bool], Place] = {}

    def place(
        self, source: SourcePartition, message: ParkedMessage, envelope: Envelope, now_ms: int
    ) -> tuple[Place, dict[str, str], int | None]:
        """Return the next place of a message that has not expired; what `Placed` has."""
        due_ms = envelope.due_ms
        kind, level, partition = self._router.decide(due_ms, now_ms, source.level)
        if kind is Hop.PARK:
            until_ms = None
            if self._held_by_broker:
                until_ms = self._router.hand_off_ms(level, partition, now_ms)
            if until_ms is None or until_ms - now_ms > _BROKER_TICK_MS:
                place = self._places.get((level, partition)) or self._member(level, partition)
                return place, envelope.parked_again_properties(message.properties), until_ms
        if self._tracked:
            # The broker never holds a message there; the dispatcher publishes overdue ones at once.
            assert envelope.id is not None  # the first hop adds it
            partition = self.description.window_partition(message.key, envelope.id)
            place = self._places.get((_WINDOW, partition)) or self._member(_WINDOW, partition)
            return place, envelope.parked_again_properties(message.properties), None
        due = kind is Hop.DUE
        target = envelope.target, due
        place = self._targets.get(target) or self._targets.setdefault(
            target, Place("due" if due else "window", None, envelope.target, is_ours=False)
        )
        application = env.application_properties(message.properties)
        return place, envelope.delivered_properties(application), None if due else due_ms

    def _member(self, level: int, partition: int) -> Place:
        described = self.description
        if level == _WINDOW:
            place = Place("window", None, described.window_topic.partition(partition).full)
        else:
            topic = described.level_topic(level).partition(partition)
            place = Place("parked", (described.topic, level, partition), topic.full)
        self._places[level, partition] = place
        return place


def set_aside(
    description: LevelTopicDescription,
    message: Payload,
    envelope: Envelope,
    reason: str,
    now_ms: int,
) -> Placed:
    """Return the place of a message whose target cannot be written now, for this reason."""
    # A message that is too large becomes a dead letter, whatever the policy: it would be refused
    # again and again.
    if reason == TOO_LARGE:
        return too_large(description, message, envelope, envelope.target)
    if is_expired(reason):
        if description.expired is Expired.DROP:
            return Placed(Place("expired", envelope.target, ""), {})
        letter = _readable_dead_letter(description, message, envelope, reason)
        place = letter.place._replace(counter="expired", counted_by=envelope.target)
        return letter._replace(place=place)
    policy = description.on_missing_target if reason == NO_TOPIC else MissingTarget.HOLD
    if policy is MissingTarget.DROP and RETRY_ID in message.properties:
        policy = MissingTarget.DEAD_LETTER  # the original of a retry is acknowledged
    if policy is MissingTarget.DROP:
        return Placed(Place("dropped", envelope.target, ""), {})
    if policy is MissingTarget.DEAD_LETTER:
        missing = f"target {envelope.target} does not exist"
        return _readable_dead_letter(description, message, envelope, missing)
    application = env.application_properties(message.properties)
    properties = {
        **envelope._replace(attempt=envelope.attempt + 1).parked_properties(application),
        env.REASON: env.bounded_reason(reason),
    }
    topic = description.held_topic.partition(0).full
    # Every mover but a Function waits itself.
    by_broker = description.mover is Mover.FUNCTION
    until_ms = now_ms + description.hold_pause_ms if by_broker else None
    return Placed(Place("held", envelope.target, topic), properties, until_ms)


def pause_s(description: LevelTopicDescription, reason: str) -> float:
    """Return for how long a target is left alone after a refusal for this reason, in s."""
    pause_ms = description.hold_pause_ms
    if reason == NO_TOPIC and description.on_missing_target is not MissingTarget.HOLD:
        # Once the topic exists, nothing may be lost for it.
        pause_ms = min(pause_ms, _MISSING_MS)
    return pause_ms / 1000


def too_large(
    description: LevelTopicDescription, message: Payload, envelope: Envelope, topic: str
) -> Placed:
    """Return the place of a message that is too large for a topic: its target, or one of ours."""
    # It keeps its envelope, so that it can be replayed once the limit is raised. It may be too
    # large for the dead-letter topic, too: see `delaylevel.cluster.own_producers`.
    return _readable_dead_letter(description, message, envelope, f"too large for {topic}")


def _readable_dead_letter(
    description: LevelTopicDescription, message: Payload, envelope: Envelope, reason: str
) -> Placed:
    application = env.application_properties(message.properties)
    properties = {
        **envelope.parked_properties(application),
        env.REASON: env.bounded_reason(reason),
    }
    topic = description.dead_letter_topic.partition(0).full
    return Placed(Place("dead", reason, topic), properties)


def dead_letter(
    description: LevelTopicDescription, message: ParkedMessage, topic: str, reason: str
) -> Placed:
    """Return the place of a message whose envelope cannot be read."""
    properties = dead_letter_properties(message, topic, reason)
    own = description.dead_letter_topic.partition(0).full
    return Placed(Place("dead", reason, own), properties)
