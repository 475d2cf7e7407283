"""The setup of a new producer: its level topic, its options, and a warning if nobody delivers."""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pulsar

from delaylevel.cluster.failures import may_pass
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.publisher import (
    OWN_SEQUENCE_SETTINGS,
    compression_name,
    compression_settings,
)
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.schemas import reference_to, registered_reference
from delaylevel.errors import (
    BrokerError,
    InvalidInputError,
    LevelTopicError,
    StrategyMismatchError,
    UnsupportedOptionError,
)
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.delivery import LARGEST_BATCH
from delaylevel.model.envelope import SchemaRef
from delaylevel.model.formatting import exact_duration
from delaylevel.model.level_topic import (
    FinalWindow,
    LevelTopicDescription,
    Mover,
    Role,
    default_level_topic,
)
from delaylevel.model.strategy import Levels, PartitionStrategy, as_levels
from delaylevel.model.topic_name import TopicName
from delaylevel.topics import registry
from delaylevel.topics.hosts import missing_hosts
from delaylevel.topics.status import status

from .checks import DEFAULT_MAX_MESSAGE_SIZE, SMALLEST_MAX_MESSAGE_SIZE
from .client_calls import as_client_error
from .level_topic_cache import Describe

log = logging.getLogger(__name__)

#: Pause before the look for a mover and a dispatcher, in s. One that starts together with the
#: application, or again after a failure, is ready by then.
LOOK_AFTER_S = 30.0

# Level topics that this process has looked at, by process: threads do not survive a fork.
_looked: set[tuple[int, str]] = set()


def warn_if_undelivered(
    admin: TopicAdmin, target: str, description: LevelTopicDescription
) -> threading.Thread | None:
    """Look once, in a thread, if something delivers a level topic's messages; log it if not."""
    key = (os.getpid(), description.topic)
    if key in _looked:
        return None
    _looked.add(key)

    def look() -> None:
        try:
            at = status(admin, description, SystemClock().now_ms(), roles=(Role.LEVEL, Role.WINDOW))
            for missing in missing_hosts(admin, at, target):
                log.warning("%s", missing)
        except Exception as error:  # a producer goes on without it
            log.debug("level topic %s: %r", description.topic, error)

    thread = threading.Timer(LOOK_AFTER_S, look)
    thread.daemon = True
    with suppress(RuntimeError):  # no thread can be started: a producer goes on without it
        thread.start()
    return thread


def found_by_counts(
    partitions_of: Callable[[str], Sequence[str]], description: LevelTopicDescription
) -> LevelTopicDescription:
    """Return a level topic with its number of window partitions; check those of its levels."""

    def count(topic: str) -> int:
        try:
            found = list(partitions_of(topic))
        except pulsar.TopicNotFound:
            return 0  # the answer for a namespace that does not exist
        return 0 if found == [topic] else len(found)

    for level in description.levels:
        topic = description.level_topic(level.index).full
        partitions = count(topic)
        if partitions != level.partitions:
            raise LevelTopicError(
                f"level topic {topic} has {partitions or 'no'} partitions; the strategy "
                f"({description.levels}) needs {level.partitions}. Give the client an admin_url, "
                "so that it can read and create level topics, or the producer the topic's own "
                "delay_level_topic and partition_strategy, or create it with "
                f"`{description.creation_command()}`"
            )
    if description.final_window is not FinalWindow.TRACKER:
        return description
    topic = description.window_topic.full
    partitions = count(topic)
    if not partitions:
        raise LevelTopicError(
            f"window topic {topic} has no partitions: give the producer the topic's own "
            "final_window ('broker'), or the client an admin_url, so that it can read it"
        )
    return replace(description, window_partitions=partitions)


_SHORTEST_SEND_TIMEOUT_MS = 5000
_LONGEST_SEND_TIMEOUT_MS = 30_000

_REFUSED = {
    "encryption_key": "a mover would have to decrypt every message and encrypt it again",
    "crypto_key_reader": "a mover would have to decrypt every message and encrypt it again",
    "chunking_enabled": "a mover reads whole messages; keep bodies below the broker's limit",
    "message_router": "a mover cannot call it; give a partition_key and the hash decides, "
    "the same for delayed and undelayed messages",
}
_KEPT = (
    "compression_type",
    "max_pending_messages",
    "block_if_queue_full",
    "batching_max_publish_delay_ms",
    "batching_max_allowed_size_in_bytes",
    "properties",
)


def given_options(
    create_producer: Any, topic: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a client's method that were given, by name, without the topic."""
    bound = inspect.signature(create_producer).bind_partial(None, topic, *args, **kwargs)
    return {name: bound.arguments[name] for name in list(bound.arguments)[2:]}


def producer_settings(
    options: Mapping[str, Any], description: LevelTopicDescription
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments for producers of levels and of the window."""
    settings: dict[str, Any] = {name: options[name] for name in _KEPT if name in options}
    # It replaces ZLib, with which the client loses messages without a payload.
    settings |= compression_settings(compression_name(options.get("compression_type")))
    settings |= OWN_SEQUENCE_SETTINGS
    settings["batching_enabled"] = bool(options.get("batching_enabled", True))
    settings["batching_max_messages"] = min(
        int(options.get("batching_max_messages", 1000)), LARGEST_BATCH
    )
    lead_ms = description.levels.smallest_lead_ms
    timeout_ms = options.get("send_timeout_millis")
    if timeout_ms is None:
        timeout_ms = min(max(lead_ms, _SHORTEST_SEND_TIMEOUT_MS), _LONGEST_SEND_TIMEOUT_MS)
    elif timeout_ms <= 0:
        raise UnsupportedOptionError(
            f"send_timeout_millis={timeout_ms}: a message that waits in the client without a limit "
            "ends up behind younger ones in its partition and is handed off too late; set it to at "
            f"most the lead ({exact_duration(lead_ms)})"
        )
    elif timeout_ms > lead_ms:
        log.warning(
            "send_timeout_millis=%s is above the lead of level topic %s (%s): a message that waits "
            "in the client for longer than the lead can be handed off late",
            timeout_ms,
            description.topic,
            exact_duration(lead_ms),
        )
    settings["send_timeout_millis"] = timeout_ms
    if description.mover is Mover.SERVICE:
        return settings, settings
    # The broker delays the messages of a Function's levels one by one, so they are not batched.
    return {**settings, "batching_enabled": False}, settings


StrategyArgument = Levels | PartitionStrategy | Sequence[PartitionStrategy] | None


class ProducerSetup(NamedTuple):
    """The level topic of one producer, and the settings for it."""

    description: LevelTopicDescription
    target: str
    level_settings: Mapping[str, Any]
    window_settings: Mapping[str, Any]
    clock: Clock
    describe: Describe | None  # None without admin access
    max_message_size: int = DEFAULT_MAX_MESSAGE_SIZE
    missing: bool = False  # it does not exist yet
    reference: SchemaRef | None = None  # once the business topic is open; None for bytes
    admin: TopicAdmin | None = None
    reading: Any = None  # a pulsar.Client for readers, which only blocks threads that call it
    own_admin: Admin | None = None  # closed with the producer

    def created(self, schema: Any, reading: Any) -> ProducerSetup:
        """Create the level topic if it is missing; return the setup with its description."""
        # The application's own producer is opened first: if the broker refuses that, nothing is
        # left behind, and its schema is registered.
        admin, description = self.admin, self.description
        reference = own = reference_to(schema)
        if own is not None and admin is not None:
            # The registry keeps the first of several texts that it takes for equal. With the
            # reference to another one, a message would be held for ever. Who may not read the
            # registry has to hope that its text is the one here.
            try:
                versions, text = admin.schemas(TopicName.parse(self.target)), schema.schema_info()
                reference = registered_reference(versions, own.type, text.schema()) or own
            except BrokerError as error:
                if may_pass(error):
                    raise
        if admin is not None and self.missing:
            description = registry.create(admin, description)
        # In the in-memory Pulsar, movers and dispatchers run only while a test lets time pass.
        if isinstance(admin, Admin):
            warn_if_undelivered(admin, self.target, description)
        return self._replace(description=description, reference=reference, reading=reading)


class LevelTopicChoice(NamedTuple):
    """Arguments of ``create_producer`` that choose the level topic."""

    delay_level_topic: str | None = None
    delay_level_namespace: str | None = None
    partition_strategy: StrategyArgument = None
    mover: Mover | str = Mover.SERVICE
    final_window: FinalWindow | str = FinalWindow.TRACKER
    create_level_topic: bool = True
    max_message_size: int = DEFAULT_MAX_MESSAGE_SIZE


def taken_choice(arguments: dict[str, Any]) -> LevelTopicChoice:
    """Take the arguments of ``create_producer`` that choose the level topic from the others."""
    fields = LevelTopicChoice._fields
    return LevelTopicChoice(**{name: arguments.pop(name) for name in fields if name in arguments})


def prepare(
    topic: str,
    options: Mapping[str, Any],
    admin: TopicAdmin | None,
    partitions_of: Callable[[str], Sequence[str]],
    clock: Clock,
    choice: LevelTopicChoice,
) -> ProducerSetup:
    """Find the level topic of a producer, or check that it can be created; change nothing."""
    for name, reason in _REFUSED.items():
        if options.get(name):
            raise UnsupportedOptionError(
                f"{name} cannot be combined with a delay-level topic: {reason}"
            )
    access_mode = options.get("access_mode", pulsar.ProducerAccessMode.Shared)
    if access_mode != pulsar.ProducerAccessMode.Shared:
        raise UnsupportedOptionError(
            f"access_mode {access_mode} would lock out the mover (or dispatcher), which publishes "
            "due messages to the same topic: use Shared"
        )
    size = choice.max_message_size
    if type(size) is not int or size < SMALLEST_MAX_MESSAGE_SIZE:
        raise InvalidInputError(
            f"max_message_size={size!r} is not a limit for messages: give the broker's "
            f"maxMessageSize, a number of bytes from {SMALLEST_MAX_MESSAGE_SIZE} up"
        )
    level_topic, level_namespace = choice.delay_level_topic, choice.delay_level_namespace
    if level_topic is not None and level_namespace is not None:
        raise InvalidInputError(
            "give delay_level_topic or delay_level_namespace: a topic's name has its namespace"
        )
    try:
        target = TopicName.parse(topic).full
    except InvalidInputError as error:
        raise as_client_error(error, pulsar.Result.InvalidTopicName) from None
    strategy = choice.partition_strategy
    configured = None if strategy is None else as_levels(strategy)
    wanted = LevelTopicDescription(
        topic=level_topic or default_level_topic(target, level_namespace),
        levels=configured or as_levels(PartitionStrategy()),
        targets=(target,),
        mover=Mover(choice.mover),
        final_window=FinalWindow(choice.final_window),
    )
    describe, missing = None, False
    if admin is None:
        description = found_by_counts(partitions_of, wanted)
    else:
        if level_topic is None:
            wanted = replace(wanted, topic=registry.default_name(admin, target, level_namespace))
        found = _found(admin, wanted, target, configured, choice.create_level_topic)
        description, missing = found or wanted, found is None
        describe = partial(registry.find, admin, description.topic)
    settings, window_settings = producer_settings(options, description)
    if admin is not None and missing:
        registry.check_creatable(admin, wanted)
    return ProducerSetup(
        description,
        target,
        settings,
        window_settings,
        clock,
        describe,
        size,
        missing,
        admin=admin,
    )


def _found(
    admin: TopicAdmin,
    wanted: LevelTopicDescription,
    target: str,
    configured: Levels | None,
    create: bool,
) -> LevelTopicDescription | None:
    """Return the level topic if it suits the producer; None if it is missing and may be created."""
    found = registry.find(admin, wanted.topic)
    if found is None:
        if not create:
            raise LevelTopicError(
                f"level topic {wanted.topic} does not exist: create it with "
                f"`{wanted.creation_command()}`, or allow the producer to (create_level_topic=True)"
            )
        return None
    if configured is not None and not found.accepts(configured):
        raise StrategyMismatchError(
            f"the producer's strategy disagrees with level topic {wanted.topic}. "
            f"Configured: {configured}. The topic's own: {found.levels}. Leave "
            "partition_strategy out to use the topic's, or name another delay_level_topic"
        )
    found.check_target(target)
    return found
