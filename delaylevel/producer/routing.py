"""Where one producer's messages go and what is written on them: the wrapper's pure part."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from delaylevel.errors import UnsupportedOptionError
from delaylevel.model import envelope as env
from delaylevel.model.clock import Clock
from delaylevel.model.delivery import LARGEST_BATCH
from delaylevel.model.due_time import due_time_ms
from delaylevel.model.envelope import Envelope, SchemaRef
from delaylevel.model.formatting import exact_duration
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Mover
from delaylevel.model.router import Hop, Router

# What stands for a level where a message goes into none.
BUSINESS = -1
WINDOW = -2
# So many messages in a row that may go anywhere go to one window partition: batches fill there.
_RUN = 1000
_PREFIX_LENGTH = len(env.PREFIX)
_SHORTEST_SEND_TIMEOUT_MS = 5000
_LONGEST_SEND_TIMEOUT_MS = 30_000

# Arguments of send that mean nothing on the way through a level topic.
NOT_PARKABLE = ("sequence_id", "replication_clusters", "disable_replication")

_REFUSED_OPTIONS = {
    "encryption_key": "a mover would have to decrypt and encrypt anew what it sends on",
    "crypto_key_reader": "a mover would have to decrypt and encrypt anew what it sends on",
    "chunking_enabled": "a mover reads whole messages; keep bodies below the broker's limit",
    "message_router": "a mover cannot call it; give a partition_key and the hash decides, "
    "the same for delayed and undelayed messages",
}


class Route(NamedTuple):
    """Where a message is sent, and what is written on it.

    Attributes:
        level: the level's index; ``BUSINESS`` (-1) for the business topic itself, ``WINDOW`` (-2)
            for the window topic.
        partition: the partition of the level's or the window topic; -1 for the business topic.
        properties: all properties of the message; None for none.
        deliver_at_ms: until when the broker itself holds it; None for not at all.
    """

    level: int
    partition: int
    properties: dict[str, str] | None
    deliver_at_ms: int | None

    @property
    def parked(self) -> bool:
        """Whether it goes into a level or window topic."""
        return self.level != BUSINESS


class Routing:
    """Places the messages of one producer.

    Args:
        description: the level topic.
        target: the full name of the business topic.
        schema: what payloads are encoded with; None for plain bytes.
        clock: the producer's own.
    """

    def __init__(
        self,
        description: LevelTopicDescription,
        target: str,
        schema: SchemaRef | None,
        clock: Clock,
    ) -> None:
        self.description = description
        self._target = target
        self._schema = schema
        self._clock = clock
        self._router = Router(description.levels)
        self._schema_text = None if schema is None else str(schema)
        self._spark = description.mover is Mover.SPARK
        levels = description.levels
        # (unit, last partition), coarse to fine.
        self._units = tuple((level.unit_ms, level.partitions - 1) for level in levels)
        self._longest_ms = levels.maximum_ms
        self._window = description.final_window is FinalWindow.TRACKER
        self._anywhere = itertools.count(random.randrange(description.window_partitions) * _RUN)

    def route(
        self,
        deliver_at: int | datetime | None,
        deliver_after: timedelta | None,
        properties: Mapping[str, str] | None,
        message_id: str | None,
        partition_key: str | None = None,
        **unsupported: Any,
    ) -> Route:
        """Decide where a message goes.

        Args:
            deliver_at, deliver_after: as in :func:`~delaylevel.model.due_time.due_time_ms`.
            properties: the application's; ``delaylevel.*`` is left out.
            message_id: an id that the application gives, or None.
            partition_key: the message's key, or None.
            unsupported: options of send that a parked message cannot have, with their values.

        Raises:
            InvalidDelayError, DelayTooLongError, UnsupportedOptionError: nothing may be sent.
        """
        now_ms = self._clock.now_ms()
        due_ms = due_time_ms(deliver_at, deliver_after, now_ms)
        if due_ms is None:
            return Route(BUSINESS, -1, _undelayed(properties, message_id), None)
        decision = self._router.decide(due_ms, now_ms)
        application = env.application_properties(properties or {})
        envelope = Envelope(
            due_ms,
            self._target,
            env.check_id(message_id) if message_id is not None else None,
            self._schema,
        )
        if decision.hop is not Hop.PARK and not (self._window and decision.hop is Hop.WINDOW):
            deliver_at_ms = due_ms if decision.hop is Hop.WINDOW else None
            properties = envelope.delivered_properties(application)
            return Route(BUSINESS, -1, properties, deliver_at_ms)
        if unsupported:
            _check_parkable(unsupported)
        if decision.hop is Hop.WINDOW:
            partition = self._window_partition(partition_key, message_id)
            return Route(WINDOW, partition, envelope.parked_properties(application), None)
        hand_off_ms = None
        if self.description.mover is Mover.FUNCTION:
            hand_off_ms = self._router.hand_off_ms(decision.level, decision.partition, now_ms)
        return Route(
            decision.level, decision.partition, envelope.parked_properties(application), hand_off_ms
        )

    def route_common(
        self,
        deliver_at: int | datetime | None,
        deliver_after: timedelta | None,
        properties: Mapping[str, str] | None,
        message_id: str | None,
        partition_key: str | None,
    ) -> tuple[int, int, dict[str, str]] | None:
        """Place a message that is parked and has nothing unusual: as :meth:`place` does.

        In as few steps as can be: nearly every message takes this way.

        Returns:
            Level, partition and properties of the :class:`Route`; None where :meth:`place` has
            to look at it.

        Raises:
            InvalidDelayError, InvalidInputError: as there.
        """
        if not self._spark:
            return None
        now_ms = self._clock.now_ms()
        if type(deliver_at) is int and deliver_after is None:
            due_ms = deliver_at
        else:
            found = due_time_ms(deliver_at, deliver_after, now_ms)
            if found is None:
                return None
            due_ms = found
        remaining = due_ms - now_ms
        if not 0 < remaining <= self._longest_ms:
            return None
        if properties:
            for name in properties:
                if name[:_PREFIX_LENGTH] == env.PREFIX:
                    return None
            own = {**properties, env.DUE: str(due_ms), env.TARGET: self._target}
        else:
            own = {env.DUE: str(due_ms), env.TARGET: self._target}
        if message_id is not None:
            own[env.ID] = env.check_id(message_id)
        if self._schema_text is not None:
            own[env.SCHEMA] = self._schema_text
        for level, (unit_ms, last) in enumerate(self._units):
            if remaining >= unit_ms:
                partition = remaining // unit_ms - 1
                return level, partition if partition < last else last, own
        if self._window:
            return WINDOW, self._window_partition(partition_key, message_id), own
        return None

    def with_description(self, description: LevelTopicDescription) -> Routing:
        """Return the same for what the level topic says of itself now."""
        return Routing(description, self._target, self._schema, self._clock)

    def topic_of(self, route: Route) -> str:
        """Return the full name of the partition that a parked message goes into."""
        if route.level == WINDOW:
            return self.description.window_topic.partition(route.partition).full
        return self.description.level_topic(route.level).partition(route.partition).full

    def _window_partition(self, key: str | None, message_id: str | None) -> int:
        """Return where the mover would put it; without key and id it has no copies elsewhere."""
        if key or message_id:
            return self.description.window_partition(key or "", message_id or "")
        return next(self._anywhere) // _RUN % self.description.window_partitions


def _undelayed(
    properties: Mapping[str, str] | None, message_id: str | None
) -> dict[str, str] | None:
    if message_id is not None:
        own = env.application_properties(properties or {})
        own[env.ID] = env.check_id(message_id)
        return own
    if not properties:
        return None
    return env.application_properties(properties)


def _check_parkable(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if not value:
            continue
        if name == "sequence_id":
            raise UnsupportedOptionError(
                f"sequence_id={value!r} cannot be kept for a message that is parked: partitions "
                "of the level topic count for themselves, and the broker would drop a lower one "
                "in silence. Give message_id= instead, by which consumers can deduplicate; "
                "the message was not sent"
            )
        raise UnsupportedOptionError(
            f"{name}={value!r} does not survive the way through a level topic, which is not "
            "replicated; set replication on the business topic; the message was not sent"
        )


def check_producer_options(options: Mapping[str, Any]) -> None:
    """Refuse producer options that would not hold for delayed messages.

    Args:
        options: arguments of ``pulsar.Client.create_producer`` that were given, by name.

    Raises:
        UnsupportedOptionError: one of them; the text says why and what to do instead.
    """
    for name, reason in _REFUSED_OPTIONS.items():
        if options.get(name):
            raise UnsupportedOptionError(
                f"{name} cannot be combined with a delay-level topic: {reason}"
            )
    access_mode = options.get("access_mode")
    if access_mode is not None and str(access_mode).rpartition(".")[2] != "Shared":
        raise UnsupportedOptionError(
            f"access_mode {access_mode} would lock out the mover (or dispatcher), which publishes "
            "to the same topic what has become due: use Shared"
        )


def level_producer_settings(
    options: Mapping[str, Any], description: LevelTopicDescription
) -> tuple[dict[str, Any], str | None]:
    """Return the arguments for producers of level topics, made from the application's own.

    Producers of the window topic have the same, and publish in batches always
    (:func:`window_producer_settings`).

    Args:
        options: arguments of ``pulsar.Client.create_producer`` that were given, by name.
        description: the level topic.

    Returns:
        The arguments, and a warning for the application or None.

    Raises:
        UnsupportedOptionError: a send timeout of 0 or below.
    """
    kept = (
        "compression_type",
        "max_pending_messages",
        "block_if_queue_full",
        "batching_max_publish_delay_ms",
        "batching_max_allowed_size_in_bytes",
        "properties",
    )
    settings: dict[str, Any] = {name: options[name] for name in kept if name in options}
    settings["batching_enabled"] = description.mover is Mover.SPARK
    settings["batching_max_messages"] = min(
        int(options.get("batching_max_messages", 1000)), LARGEST_BATCH
    )
    lead_ms = description.levels.smallest_lead_ms
    timeout_ms = options.get("send_timeout_millis")
    warning = None
    if timeout_ms is None:
        timeout_ms = min(max(lead_ms, _SHORTEST_SEND_TIMEOUT_MS), _LONGEST_SEND_TIMEOUT_MS)
    elif timeout_ms <= 0:
        raise UnsupportedOptionError(
            f"send_timeout_millis={timeout_ms} cannot be combined with a delay-level topic: a "
            "message that waits in the client without an end lies behind younger ones in its "
            "partition and is handed off too late; set it to at most the lead "
            f"({exact_duration(lead_ms)})"
        )
    elif timeout_ms > lead_ms:
        warning = (
            f"send_timeout_millis={timeout_ms} is above the lead of the level topic "
            f"({exact_duration(lead_ms)}): a message that waits so long in the client can be "
            "handed off late"
        )
    settings["send_timeout_millis"] = timeout_ms
    return settings, warning


def counts_by_way(sent: Sequence[int], description: LevelTopicDescription) -> dict[str, int]:
    """Name the counts of a producer.

    Args:
        sent: messages by :attr:`Route.level`, whose negative values count from the end; of
            length levels + 2.
        description: the level topic.

    Returns:
        By the level's unit (``DAY``), ``window``, and ``straight`` for the business topic.
    """
    named = {level.name: sent[level.index] for level in description.levels}
    return {**named, "window": sent[WINDOW], "straight": sent[BUSINESS]}


def window_producer_settings(level_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for producers of the window topic, made from the levels'.

    Nothing there is held back by the broker, so that a Function's level topic has batches there.
    """
    return {**level_settings, "batching_enabled": True}
