"""The drop-in client: a pulsar.Client whose producers can have a delay-level topic."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

import pulsar

from delaylevel.cluster.connection import Connection
from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import LevelTopicError, StrategyMismatchError
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.level_topic import (
    FinalWindow,
    LevelTopicDescription,
    Mover,
    default_level_topic,
)
from delaylevel.model.strategy import Levels, PartitionStrategy, as_levels
from delaylevel.model.topic_name import TopicName

from .level_topic_cache import Describe
from .producer import DelayLevelProducer
from .routing import check_producer_options, level_producer_settings

StrategyArgument = Levels | PartitionStrategy | Sequence[PartitionStrategy] | None


class DelayLevelClient(pulsar.Client):
    """A ``pulsar.Client`` that can also send long-delayed messages by way of level topics.

    Args:
        service_url: as for ``pulsar.Client``; all of its other arguments are taken too.
        admin_url: the address of the admin REST interface (``http://…:8080``). With it a producer
            reads what its level topic says of itself, and creates one that is missing. Without it
            the level topic has to exist, and only its numbers of partitions are checked.
        admin: an admin client that is made already, instead of ``admin_url``.
        admin_token: the token for the admin interface, or a function that returns it.
        clock: says what time it is when a message is sent; the machine's by default.
    """

    def __init__(
        self,
        service_url: Any,
        *args: Any,
        admin_url: str | None = None,
        admin: TopicAdmin | None = None,
        admin_token: str | Callable[[], str] | None = None,
        clock: Clock | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(service_url, *args, **kwargs)
        if admin is None and admin_url is not None:
            admin = admin_beside(kwargs, admin_url, admin_token)
        self._delaylevel_admin = admin
        self._delaylevel_clock = clock or SystemClock()

    @classmethod
    def from_connection(cls, connection: Connection, **kwargs: Any) -> DelayLevelClient:
        """Return a client for configured addresses, token and TLS settings.

        Args:
            connection: see :class:`delaylevel.cluster.connection.Connection`.
            kwargs: further arguments of ``pulsar.Client``.
        """
        from delaylevel.cluster.admin import Admin

        settings = {**connection.client_kwargs(), **kwargs}
        return cls(**settings, admin=Admin.from_connection(connection))

    @property
    def admin(self) -> TopicAdmin | None:
        """The admin client, or None where no admin address was given."""
        return self._delaylevel_admin

    @overload
    def create_producer(
        self,
        topic: str,
        *args: Any,
        enable_delay_level_topic: Literal[False] = False,
        **kwargs: Any,
    ) -> pulsar.Producer: ...

    @overload
    def create_producer(
        self, topic: str, *args: Any, enable_delay_level_topic: Literal[True], **kwargs: Any
    ) -> DelayLevelProducer: ...

    def create_producer(
        self,
        topic: str,
        *args: Any,
        enable_delay_level_topic: bool = False,
        delay_level_topic: str | None = None,
        partition_strategy: StrategyArgument = None,
        mover: Mover | str = Mover.SPARK,
        final_window: FinalWindow | str = FinalWindow.TRACKER,
        create_level_topic: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Create a producer; takes every argument of ``pulsar.Client.create_producer``.

        Args:
            topic: the business topic.
            enable_delay_level_topic: off by default: what is returned then is a plain
                ``pulsar.Producer``.
            delay_level_topic: the level topic; ``<topic>-delay-level`` by default. One level topic
                may serve several business topics.
            partition_strategy: one strategy, or a list of them from coarse to fine. Left out, an
                existing level topic's own is taken, and for a new one 30 days by DAY.
            mover, final_window: of a level topic that is created now.
            create_level_topic: whether a level topic that is missing is created.

        Returns:
            A ``pulsar.Producer``, or with ``enable_delay_level_topic=True`` a
            :class:`~delaylevel.DelayLevelProducer`.

        Raises:
            StrategyMismatchError: the level topic has another strategy; both are shown.
            TargetNotAllowedError: the level topic does not carry this business topic's messages.
            LevelTopicError: it is missing and may not be created, or is not a level topic.
            UnsupportedOptionError: an option that delayed messages could not keep.
        """
        if not enable_delay_level_topic:
            return super().create_producer(topic, *args, **kwargs)
        options = given_options(pulsar.Client.create_producer, topic, args, kwargs)
        description = resolve_description(
            self._delaylevel_admin,
            self.get_topic_partitions,
            target=topic,
            level_topic=delay_level_topic,
            strategy=partition_strategy,
            mover=Mover(mover),
            final_window=FinalWindow(final_window),
            create=create_level_topic,
        )
        check_producer_options(options)
        settings = settings_with_warning(options, description)
        business = super().create_producer(topic, **options)
        return DelayLevelProducer(
            _PlainClient(super().create_producer),
            business,
            description,
            TopicName.parse(topic).full,
            settings,
            self._delaylevel_clock,
            describe_with(self._delaylevel_admin, description),
        )


def wrap(
    producer: Any,
    client: Any,
    *,
    partition_strategy: StrategyArgument = None,
    delay_level_topic: str | None = None,
    mover: Mover | str = Mover.SPARK,
    final_window: FinalWindow | str = FinalWindow.TRACKER,
    create_level_topic: bool = True,
    admin_url: str | None = None,
    admin: TopicAdmin | None = None,
    clock: Clock | None = None,
    **level_options: Any,
) -> DelayLevelProducer:
    """Give a producer that exists already a delay-level topic.

    Args:
        producer: a ``pulsar.Producer``. It goes on sending what is not parked, and is closed
            together with the wrapper.
        client: the client that made it, a ``pulsar.Client`` or a :class:`DelayLevelClient`.
        partition_strategy, delay_level_topic, mover, final_window, create_level_topic: as in
            :meth:`DelayLevelClient.create_producer`.
        admin_url, admin: the admin interface, where the client has none.
        clock: says what time it is when a message is sent.
        level_options: options of ``create_producer`` for the producers of level topics, e.g.
            ``compression_type``; those of an existing producer cannot be read.

    Raises:
        As :meth:`DelayLevelClient.create_producer`; the producer goes on working as it was.
    """
    if admin is None:
        admin = getattr(client, "admin", None)
    if admin is None and admin_url is not None:
        admin = admin_beside({}, admin_url, None)
    topic = TopicName.parse(producer.topic()).without_partition.full
    description = resolve_description(
        admin,
        client.get_topic_partitions,
        target=topic,
        level_topic=delay_level_topic,
        strategy=partition_strategy,
        mover=Mover(mover),
        final_window=FinalWindow(final_window),
        create=create_level_topic,
    )
    check_producer_options(level_options)
    return DelayLevelProducer(
        client,
        producer,
        description,
        topic,
        settings_with_warning(level_options, description),
        clock or getattr(client, "_delaylevel_clock", None) or SystemClock(),
        describe_with(admin, description),
    )


def resolve_description(
    admin: TopicAdmin | None,
    partitions_of: Callable[[str], Sequence[str]],
    *,
    target: str,
    level_topic: str | None,
    strategy: StrategyArgument,
    mover: Mover,
    final_window: FinalWindow,
    create: bool,
) -> LevelTopicDescription:
    """Return the level topic's description: read, made, or, without admin access, assumed.

    Args:
        admin: the admin interface, or None.
        partitions_of: the client's ``get_topic_partitions``.
        target: the business topic.
        level_topic: the level topic's name, or None for the default.
        strategy: what the producer is configured with, or None for whatever the topic has.
        mover, final_window: for a level topic that is made now.
        create: whether it may be made.
    """
    from delaylevel.topics import registry as topics

    name = level_topic or default_level_topic(target)
    target = TopicName.parse(target).full
    configured = as_levels(strategy) if strategy is not None else None
    wanted = LevelTopicDescription(
        topic=name,
        levels=configured or as_levels(PartitionStrategy()),
        targets=(target,),
        mover=mover,
        final_window=final_window,
    )
    if admin is None:
        return _checked_by_counts(wanted, partitions_of)
    described = topics.find(admin, wanted.topic)
    if described is None:
        if not create:
            raise LevelTopicError(
                f"level topic {wanted.topic} does not exist: create it with `delaylevel levels "
                f"create {target}`, or allow the producer to (create_level_topic=True)"
            )
        return topics.create(admin, wanted)
    if configured is not None and not described.accepts(configured):
        raise StrategyMismatchError(
            f"the producer's strategy disagrees with level topic {wanted.topic}. "
            f"Configured: {configured}. The topic's own: {described.levels}. Leave "
            "partition_strategy out to take the topic's, or name another delay_level_topic",
            configured=str(configured),
            described=str(described.levels),
        )
    described.check_target(target)
    return described


def describe_with(admin: TopicAdmin | None, description: LevelTopicDescription) -> Describe | None:
    """Return what reads a level topic's description again; None without admin access."""
    from delaylevel.topics import registry as topics

    return None if admin is None else partial(topics.find, admin, description.topic)


def given_options(
    function: Any, topic: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of create_producer that were given, positional ones by name too."""
    bound = inspect.signature(function).bind_partial(None, topic, *args, **kwargs)
    return {name: bound.arguments[name] for name in list(bound.arguments)[2:]}


def settings_with_warning(
    options: Mapping[str, Any], description: LevelTopicDescription
) -> dict[str, Any]:
    """Return the level producers' settings; a doubtful send timeout is warned about."""
    settings, warning = level_producer_settings(options, description)
    if warning:
        warnings.warn(warning, stacklevel=3)
    return settings


class _PlainClient:
    """A client reduced to making plain producers."""

    def __init__(self, create_producer: Callable[..., Any]) -> None:
        self.create_producer = create_producer


def _checked_by_counts(
    description: LevelTopicDescription, partitions_of: Callable[[str], Sequence[str]]
) -> LevelTopicDescription:
    """Return the description with the window's partitions as they are, if the levels' fit."""

    def count_of(topic: str) -> int:
        found = list(partitions_of(topic))
        return 0 if found == [topic] else len(found)

    for level in description.levels:
        topic = description.level_topic(level.index).full
        count = count_of(topic)
        if count != level.partitions:
            has = f"has {count} partitions" if count else "is not there, or has no partitions"
            raise LevelTopicError(
                f"level topic {topic} {has}; the strategy ({description.levels}) needs "
                f"{level.partitions}. Create it with `delaylevel levels create`; where it was "
                "expanded, name the longer maximum_delay; or give the client an admin_url, so that "
                "it can read and create level topics"
            )
    if description.final_window is not FinalWindow.TRACKER:
        return description
    topic = description.window_topic.full
    count = count_of(topic)
    if not count:
        raise LevelTopicError(
            f"window topic {topic} is not there, or has no partitions: name the final_window that "
            f"level topic {description.topic} was made with (final_window='broker'), or give the "
            "client an admin_url, so that it reads it there"
        )
    return replace(description, window_partitions=count)


def admin_beside(
    client_options: Mapping[str, Any], admin_url: str, token: str | Callable[[], str] | None
) -> TopicAdmin:
    """Return an admin client with the TLS settings of the Pulsar client."""
    from delaylevel.cluster.admin import Admin

    return Admin(
        admin_url,
        token=token,
        tls_trust_certs_file=client_options.get("tls_trust_certs_file_path"),
        tls_certificate_file=client_options.get("tls_certificate_file_path"),
        tls_private_key_file=client_options.get("tls_private_key_file_path"),
        tls_allow_insecure=bool(client_options.get("tls_allow_insecure_connection", False)),
        tls_validate_hostname=bool(client_options.get("tls_validate_hostname", False)),
    )
