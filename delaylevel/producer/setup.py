"""The level topic of a new producer: found, created, or checked without admin access."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import InvalidInputError, LevelTopicError, StrategyMismatchError
from delaylevel.model.clock import Clock
from delaylevel.model.level_topic import (
    FinalWindow,
    LevelTopicDescription,
    Mover,
    default_level_topic,
)
from delaylevel.model.strategy import Levels, PartitionStrategy, as_levels
from delaylevel.model.topic_name import TopicName
from delaylevel.topics import registry

from .client_errors import PulsarInvalidTopicError
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

    def created(self) -> ProducerSetup:
        """Create the level topic if it is missing; return the setup with its description.

        The application's own producer is opened first: if the broker refuses that, nothing is
        left behind.
        """
        if self.create is None:
            return self
        return self._replace(description=self.create(), create=None)


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
        level_topic, strategy, mover, final_window, create, max_message_size: as in
            :meth:`~delaylevel.DelayLevelClient.create_producer`.
    """
    check_producer_options(options)
    check_max_message_size(max_message_size)
    try:
        target = TopicName.parse(topic).full
    except InvalidInputError as error:
        raise PulsarInvalidTopicError(str(error)) from None
    configured = as_levels(strategy) if strategy is not None else None
    wanted = LevelTopicDescription(
        topic=level_topic or default_level_topic(topic),
        levels=configured or as_levels(PartitionStrategy()),
        targets=(target,),
        mover=Mover(mover),
        final_window=FinalWindow(final_window),
    )
    create_missing = describe = None
    if admin is None:
        description = _checked_by_counts(wanted, partitions_of)
    else:
        found = _found(admin, wanted, target, configured, create)
        if found is None:
            create_missing = partial(registry.create, admin, wanted)
        description = found or wanted
        describe = partial(registry.find, admin, description.topic)
    settings, warning = level_producer_settings(options, description)
    if admin is not None and create_missing is not None:
        registry.check_creatable(admin, wanted)
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
                f"level topic {wanted.topic} does not exist: create it with `delaylevel levels "
                f"create {target}`, or allow the producer to (create_level_topic=True)"
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


def _checked_by_counts(
    description: LevelTopicDescription, partitions_of: Callable[[str], Sequence[str]]
) -> LevelTopicDescription:
    """Check the partition counts of the levels; return the description with the window's count."""

    def count_of(topic: str) -> int:
        found = list(partitions_of(topic))
        return 0 if found == [topic] else len(found)

    for level in description.levels:
        topic = description.level_topic(level.index).full
        count = count_of(topic)
        if count != level.partitions:
            has = f"has {count} partitions" if count else "does not exist or is not partitioned"
            raise LevelTopicError(
                f"level topic {topic} {has}; the strategy ({description.levels}) needs "
                f"{level.partitions}. Create it with `delaylevel levels create`; if it was "
                "expanded, name the longer maximum_delay; or give the client an admin_url, so that "
                "it can read and create level topics"
            )
    if description.final_window is not FinalWindow.TRACKER:
        return description
    topic = description.window_topic.full
    count = count_of(topic)
    if not count:
        raise LevelTopicError(
            f"window topic {topic} does not exist or is not partitioned: name the final_window of "
            f"level topic {description.topic} (final_window='broker'), or give the client an "
            "admin_url, so that it can read it"
        )
    return replace(description, window_partitions=count)
