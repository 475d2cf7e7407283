"""The level topic of a new producer: found, created, or checked without admin access."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from delaylevel.cluster.admin import Admin
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.schemas import reference_to, registered_reference
from delaylevel.cluster.values import SchemaVersion
from delaylevel.errors import (
    BrokerError,
    InvalidInputError,
    LevelTopicError,
    StrategyMismatchError,
)
from delaylevel.model.clock import Clock
from delaylevel.model.envelope import SchemaRef
from delaylevel.model.level_topic import (
    FinalWindow,
    LevelTopicDescription,
    Mover,
    default_level_topics,
)
from delaylevel.model.strategy import Levels, PartitionStrategy, as_levels
from delaylevel.model.topic_name import TopicName
from delaylevel.topics import registry

from .client_errors import PulsarInvalidTopicError
from .counts import PartitionCounts, creation_command
from .delivery_watch import WATCHES
from .level_topic_cache import Describe
from .options import (
    check_max_message_size,
    check_producer_options,
    level_producer_settings,
    window_producer_settings,
)
from .size_limit import DEFAULT_MAX_MESSAGE_SIZE

StrategyArgument = Levels | PartitionStrategy | Sequence[PartitionStrategy] | None


class ProducerSetup(NamedTuple):
    """The level topic of one producer, and the settings for it.

    Attributes:
        description: the level topic.
        target: full name of the business topic.
        level_settings: arguments for the producers of level topics.
        clock: source of the time at which a message is sent.
        describe: function that reads the description again; None without admin access.
        warning: a warning for the application, or None.
        max_message_size: the broker's ``maxMessageSize``, in bytes.
        window_settings: arguments for the producers of the window topic; None for those of the
            levels, batched.
        create: function that creates the missing level topic; None if it exists.
        watch: function that looks now and then whether something delivers the messages of a level
            topic; None without a broker.
        registered: function that returns the versions of the business topic's schema; None without
            admin access.
        reference: the schema of the payloads, once the business topic is open; None for bytes.
        admin: the admin interface, or None.
        reading: a ``pulsar.Client`` for readers, which only blocks threads that call it.
        schema: the schema of the application's own producer, once this is open.
    """

    description: LevelTopicDescription
    target: str
    level_settings: Mapping[str, Any]
    clock: Clock
    describe: Describe | None
    warning: str | None
    max_message_size: int = DEFAULT_MAX_MESSAGE_SIZE
    window_settings: Mapping[str, Any] | None = None
    create: Callable[[], LevelTopicDescription] | None = None
    watch: Callable[[LevelTopicDescription], None] | None = None
    registered: Callable[[], Sequence[SchemaVersion]] | None = None
    reference: SchemaRef | None = None
    admin: TopicAdmin | None = None
    reading: Any = None
    schema: Any = None

    def created(self, schema: Any) -> ProducerSetup:
        """Create the level topic if it is missing; return the setup with its description.

        The application's own producer is opened first: if the broker refuses that, nothing is
        left behind, and its schema is registered.

        Args:
            schema: the schema of the application's own producer.
        """
        description = self.description if self.create is None else self.create()
        if self.watch is not None:
            self.watch(description)
        reference = self._reference_to(schema)
        return self._replace(
            description=description, create=None, reference=reference, schema=schema
        )

    def _reference_to(self, schema: Any) -> SchemaRef | None:
        """Return the reference to a schema: to its registered version, if the registry can be read.

        The registry keeps the first of several texts that it takes for equal.
        """
        own = reference_to(schema)
        if own is None or self.registered is None:
            return own
        try:
            versions = self.registered()
        except BrokerError:
            return own
        return registered_reference(versions, own.type, schema.schema_info().schema()) or own


def prepare(
    topic: str,
    options: Mapping[str, Any],
    admin: TopicAdmin | None,
    partitions_of: Callable[[str], Sequence[str]],
    clock: Clock,
    *,
    level_topic: str | None,
    strategy: StrategyArgument,
    mover: Mover | str,
    final_window: FinalWindow | str,
    create: bool,
    level_namespace: str | None = None,
    max_message_size: int = DEFAULT_MAX_MESSAGE_SIZE,
) -> ProducerSetup:
    """Find the level topic of a producer, or check that it can be created; derive the settings.

    Nothing is created or changed on the broker: :meth:`ProducerSetup.created` does that.

    Args:
        topic: the business topic.
        options: arguments of ``pulsar.Client.create_producer`` that were given, by name.
        admin: the admin interface, or None.
        partitions_of: the client's ``get_topic_partitions``.
        clock: source of the time at which a message is sent.
        level_topic, strategy, mover, final_window, create, level_namespace, max_message_size: as
            in :meth:`~delaylevel.DelayLevelClient.create_producer`.
    """
    check_producer_options(options)
    check_max_message_size(max_message_size)
    if level_topic is not None and level_namespace is not None:
        raise InvalidInputError(
            f"delay_level_topic is {level_topic!r} and delay_level_namespace is "
            f"{level_namespace!r}: give one of them; the name of a topic contains its namespace"
        )
    try:
        target = TopicName.parse(topic).full
    except InvalidInputError as error:
        raise PulsarInvalidTopicError(str(error)) from None
    configured = as_levels(strategy) if strategy is not None else None
    names = (level_topic,) if level_topic else default_level_topics(target, level_namespace)
    wanted = LevelTopicDescription(
        topic=names[0],
        levels=configured or as_levels(PartitionStrategy()),
        targets=(target,),
        mover=Mover(mover),
        final_window=FinalWindow(final_window),
    )
    create_missing = describe = None
    if admin is None:
        description = PartitionCounts(partitions_of).choose(wanted, names)
    else:
        if level_topic is None:
            wanted = replace(wanted, topic=registry.default_name(admin, target, level_namespace))
        found = _found(admin, wanted, target, configured, create)
        if found is None:
            create_missing = partial(registry.create, admin, wanted)
        description = found or wanted
        describe = partial(registry.find, admin, description.topic)
    settings, warning = level_producer_settings(options, description)
    if admin is not None and create_missing is not None:
        registry.check_creatable(admin, wanted)
    # In the in-memory Pulsar, movers and dispatchers run only while a test lets time pass.
    watch = None
    if isinstance(admin, Admin) and describe is not None:
        watch = partial(_watch, admin, target, describe)
    window_settings = window_producer_settings(settings, options)
    return ProducerSetup(
        description,
        target,
        settings,
        clock,
        describe,
        warning,
        max_message_size,
        window_settings,
        create_missing,
        watch,
        None if admin is None else partial(admin.schemas, TopicName.parse(target)),
        admin=admin,
    )


def _watch(
    admin: Admin, target: str, describe: Describe, description: LevelTopicDescription
) -> None:
    WATCHES.add(admin, description, target, describe)


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
            like = registry.similar(admin, TopicName.parse(target))
            raise LevelTopicError(
                f"level topic {wanted.topic} does not exist{like}: create it with "
                f"`{creation_command(wanted)}`, or allow the producer to (create_level_topic=True)"
            )
        return None
    if configured is not None and not found.accepts(configured):
        raise StrategyMismatchError(
            f"the producer's strategy disagrees with level topic {wanted.topic}. "
            f"Configured: {configured}. The topic's own: {found.levels}. Leave "
            "partition_strategy out to use the topic's, or name another delay_level_topic",
            configured=str(configured),
            described=str(found.levels),
        )
    found.check_target(target)
    return found
