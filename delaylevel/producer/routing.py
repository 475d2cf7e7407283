"""The routing of one producer's messages."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

from delaylevel.errors import InvalidDelayError, InvalidInputError, UnsupportedOptionError
from delaylevel.model import envelope as env
from delaylevel.model.clock import Clock, duration_ms
from delaylevel.model.due_time import LATEST_DUE_MS, due_time_ms, expiry_ms, moved_expiry_ms
from delaylevel.model.envelope import Envelope, SchemaRef
from delaylevel.model.formatting import format_instant, shell
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Mover
from delaylevel.model.outcome import Receipt, cancellation
from delaylevel.model.router import Decision, Hop, Router
from delaylevel.model.topic_name import TopicName

from .checks import DEFAULT_MAX_MESSAGE_SIZE, FRAMING, Message, SizeLimit

# Values of Route.level for messages that go into no level.
BUSINESS = -1
WINDOW = -2
# Messages without key and ID may go to any window partition. This number of them in a row go to
# the same one, so that batches fill.
_RUN = 1000
# Constants of this module are faster to read than those of another one.
_PREFIX, _PREFIX_LENGTH = env.PREFIX, len(env.PREFIX)
_DUE, _TARGET = env.DUE, env.TARGET
# As fast as `len`, and it raises a TypeError for values other than strings.
_length = str.__len__
# Bytes of the longest letter, and the letters that take as much as what surrounds a text.
_LETTER = 4
_FRAME = FRAMING // _LETTER
_PAIR = 2 * _FRAME


def check_not_expired(expires_ms: int, now_ms: int) -> None:
    """Raise InvalidDelayError if a message has expired; 0 for a message that does not expire."""
    if 0 < expires_ms <= now_ms:
        raise InvalidDelayError(
            f"the message has expired already ({format_instant(expires_ms)}); it was not sent"
        )


class Route(NamedTuple):
    """The destination of a message, and its properties there."""

    level: int  # the index; or BUSINESS, or WINDOW
    partition: int  # -1 for the business topic
    properties: dict[str, str] | None
    deliver_at_ms: int | None  # until then, the broker itself delays the message

    @property
    def parked(self) -> bool:
        """True if the message goes into a level or window topic."""
        return self.level != BUSINESS


class Routing:
    """The routing rule of one producer, for one state of the level topic."""

    def __init__(
        self,
        description: LevelTopicDescription,
        target: str,
        schema: SchemaRef | None,
        clock: Clock,
        compression: str | None = None,
        max_message_size: int = DEFAULT_MAX_MESSAGE_SIZE,
    ) -> None:
        self.description = description
        self._target = target
        # The beginning of the IDs that hops make for messages without one.
        self._made_ids = (description.topic.removeprefix("persistent://"), description.topic)
        self._schema = schema
        self._clock = clock
        self._compression = compression
        self.size_limit = SizeLimit(description, max_message_size)
        self._largest = self.size_limit.bytes
        self._router = Router(description.levels)
        self._schema_text = None if schema is None else str(schema)
        self._by_service = description.mover is Mover.SERVICE
        levels = description.levels
        # (level, unit, last partition), coarse to fine.
        self._units = tuple(
            (number, level.unit_ms, level.partitions - 1) for number, level in enumerate(levels)
        )
        self._longest_ms = levels.maximum_ms
        self._window = description.final_window is FinalWindow.TRACKER
        # A random begin: producers that start together do not all fill the same partition.
        self._unkeyed = itertools.count(random.randrange(description.window_partitions) * _RUN)

    def route(self, message: Message) -> Route:
        """Route a message; any ``delaylevel.*`` among its properties is left out."""
        now_ms = self._clock.now_ms()
        due_ms = due_time_ms(message.deliver_at, message.deliver_after, now_ms)
        expires_ms = expiry_ms(message.expires_at, message.expires_after, due_ms)
        check_not_expired(expires_ms, now_ms)
        application = env.application_properties(message.properties or {})
        message_id = message.message_id
        if message_id is not None:
            env.check_id(message_id)
        if due_ms is None:
            if message_id is not None:
                application |= {env.ID: message_id, env.TARGET: self._target}
            return Route(BUSINESS, -1, application or None, None)
        decision = self._router.decide(due_ms, now_ms)
        envelope = Envelope(
            due_ms,
            self._target,
            message_id,
            self._schema,
            compression=self._compression,
            expires_ms=expires_ms,
            replaces=message.replaces,
        )
        if decision.hop is Hop.DUE or (decision.hop is Hop.WINDOW and not self._window):
            deliver_at_ms = due_ms if decision.hop is Hop.WINDOW else None
            return Route(BUSINESS, -1, envelope.delivered_properties(application), deliver_at_ms)
        for name, value in message.not_parkable.items():
            if value:
                raise UnsupportedOptionError(
                    f"{name}={value!r} cannot be kept for a parked message: level topics are not "
                    "replicated, and have sequences of their own. Set replication on the business "
                    "topic, and give message_id= to deduplicate; the message was not sent"
                )
        parked = envelope.parked_properties(application)
        return self._parked(decision, parked, now_ms, message.partition_key, message_id)

    def route_cancellation(self, wanted: Receipt) -> Route:
        """Route a cancellation as its message, but never to the business topic."""
        # A message that was sent without an ID is named only together with the place where it was
        # found: without a key, only that tells the window partition.
        due_ms, message_id = wanted.due_ms, wanted.id
        properties = cancellation(due_ms, self._target, message_id).parked_properties({})
        if wanted.place is not None:
            stored_in = TopicName.parse(wanted.place[0])
            if stored_in.without_partition == self.description.window_topic:
                return Route(WINDOW, stored_in.partition_index or 0, properties, None)
        elif message_id.startswith(self._made_ids) and "-partition-" in message_id:
            raise InvalidInputError(
                f"{message_id!r} is a position, which is no ID: the message was sent without one. "
                f"`delaylevel pending cancel {shell(self._target)} --id {shell(message_id)}` "
                "searches for it; nothing was sent"
            )
        now_ms = self._clock.now_ms()
        decision = self._router.decide(due_ms, now_ms)
        return self._parked(decision, properties, now_ms, wanted.key, message_id)

    def route_again(
        self,
        due_ms: int,
        original: Envelope,
        application: Mapping[str, str],
        message_id: str,
        partition_key: str,
        expires_ms: int,
    ) -> Route:
        """Route the encoded payload of a parked message with a new due time, in its stead."""
        # It goes to the window even if it is due, because only the dispatcher can publish an
        # encoded payload under its schema.
        now_ms = self._clock.now_ms()
        if not expires_ms:  # as long after the due time as before
            expires_ms = moved_expiry_ms(original.expires_ms, original.due_ms, due_ms, now_ms)
        envelope = original._replace(
            due_ms=due_ms,
            id=message_id,
            attempt=0,
            compression=self._compression,
            expires_ms=expires_ms,
            replaces=original.id,
        )
        properties = envelope.parked_properties(application)
        decision = self._router.decide(due_ms, now_ms)
        return self._parked(decision, properties, now_ms, partition_key, message_id)

    def _parked(
        self,
        decision: Decision,
        properties: dict[str, str],
        now_ms: int,
        key: str | None,
        message_id: str | None,
    ) -> Route:
        """Return the route into our own topics: a level, or else the window, even if it is due."""
        if decision.hop is not Hop.PARK:
            return Route(WINDOW, self._window_partition(key, message_id), properties, None)
        hand_off_ms = None
        if not self._by_service:
            hand_off_ms = self._router.hand_off_ms(decision.level, decision.partition, now_ms)
        return Route(decision.level, decision.partition, properties, hand_off_ms)

    def route_fast(
        self,
        deliver_at: int | datetime | None,
        deliver_after: timedelta | None,
        properties: Mapping[str, str] | None,
        message_id: str | None,
        partition_key: str | None,
        ordering_key: str | None = None,
        size: int = 0,
    ) -> tuple[int, int, dict[str, str]] | None:
        """Return level, partition and properties as :meth:`route`; None if that must decide."""
        # Nearly every message takes this path, so it avoids calls and intermediate objects.
        if not self._by_service or size > self._largest:
            return None
        now_ms = self._clock.now_ms()
        if deliver_at is None and type(deliver_after) is timedelta:
            remaining = duration_ms(deliver_after)
            due_ms = now_ms + remaining
        elif deliver_after is None and type(deliver_at) is int:
            remaining, due_ms = deliver_at - now_ms, deliver_at
        else:
            found = due_time_ms(deliver_at, deliver_after, now_ms)
            if found is None:
                return None
            remaining, due_ms = found - now_ms, found
        if not 0 < remaining <= self._longest_ms or due_ms > LATEST_DUE_MS:
            return None
        letters = 0
        if properties is not None:
            if type(properties) is not dict:
                return None
            for name, value in properties.items():
                if name[:_PREFIX_LENGTH] == _PREFIX:
                    return None
                letters += len(name) + len(value) + _PAIR
            own = {**properties, _DUE: str(due_ms), _TARGET: self._target}
        else:
            own = {_DUE: str(due_ms), _TARGET: self._target}
        if partition_key is not None:
            letters += _length(partition_key) + _FRAME
        if ordering_key is not None:
            letters += _length(ordering_key) + _FRAME
        # An upper bound: only messages near the limit are measured exactly, by `route`.
        if size + _LETTER * letters > self._largest:
            return None
        if message_id is not None:
            own[env.ID] = env.check_id(message_id)
        if self._schema_text is not None:
            own[env.SCHEMA] = self._schema_text
        if self._compression is not None:
            own[env.COMPRESSION] = self._compression
        for level, unit_ms, last in self._units:
            if remaining >= unit_ms:
                partition = remaining // unit_ms - 1
                return level, partition if partition < last else last, own
        if self._window:
            return WINDOW, self._window_partition(partition_key, message_id), own
        return None

    def topic_of(self, route: Route) -> str:
        """Return the full name of the partition for a parked message."""
        if route.level == WINDOW:
            return self.description.window_topic.partition(route.partition).full
        return self.description.level_topic(route.level).partition(route.partition).full

    def _window_partition(self, key: str | None, message_id: str | None) -> int:
        """Return the partition that a mover would choose; without key and ID, any partition."""
        if key or message_id:
            return self.description.window_partition(key or "", message_id or "")
        return next(self._unkeyed) // _RUN % self.description.window_partitions
