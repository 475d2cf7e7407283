"""The drop-in client: a pulsar.Client whose producers can have a delay-level topic; and ``wrap``.

The options of a ``pulsar.Producer`` cannot be read from it. The application confirms what is
assumed of them, or is warned.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import pulsar

from delaylevel.cluster.client_parts import CLIENT, CREATE_PRODUCER
from delaylevel.cluster.client_parts.cores import (
    check_create_producer,
    client_core,
    schema_of,
    service_url,
)
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.failures import close_quietly
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.rest.credentials import admin_credentials
from delaylevel.cluster.rest.http import RestOptions
from delaylevel.errors import InvalidInputError
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.level_topic import FinalWindow, Mover
from delaylevel.model.topic_name import TopicName

from .checks import DEFAULT_MAX_MESSAGE_SIZE
from .client_calls import client_errors
from .producer import DelayLevelProducer
from .scheduling import BaseProducer
from .setup import (
    LevelTopicChoice,
    ProducerSetup,
    StrategyArgument,
    given_options,
    prepare,
    taken_choice,
)

if TYPE_CHECKING:
    from typing_extensions import Self


class WrapWarning(UserWarning):
    """Options of a wrapped producer that :func:`wrap` cannot read, and assumes to be off."""


_ASSUMED = (
    "wrap() assumes that the producer neither encrypts, splits nor routes its messages, and is "
    "Shared; confirm it with plain_producer=True"
)


@functools.cache  # once in this process
def warn_of_assumptions() -> None:
    """Warn the caller of wrap() that options of the producer are assumed."""
    warnings.warn(_ASSUMED, WrapWarning, stacklevel=4)


def check_pair(producer: Any, client: Any, *, for_asyncio: bool = False) -> None:
    """Refuse a producer that is closed, cannot be wrapped, or is not of this client."""
    if isinstance(producer, BaseProducer):
        raise InvalidInputError(
            f"the producer of {producer.topic()} has a delay-level topic already: use it as it is"
        )
    calls = getattr(producer, "send", None), getattr(client, "create_producer", None)
    if any(each is None or inspect.iscoroutinefunction(each) != for_asyncio for each in calls):
        raise InvalidInputError(
            "give wrap() a producer, then the client that created it: delaylevel.asyncio.wrap() "
            "those of pulsar.asyncio, delaylevel.wrap() others"
        )
    # A producer keeps the core of its client, not the client.
    if client_core(client) is client_core(producer):
        return
    addresses = [service_url(producer), service_url(client)]
    if None not in addresses and addresses[0] != addresses[1]:
        raise InvalidInputError(
            f"the producer is connected to {addresses[0]}, and the client to {addresses[1]}: give "
            "wrap() the client that created the producer"
        )


class BaseClient:
    """The admin interface and clock of a client; the base class before a Pulsar client."""

    _client: Any

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
        given = inspect.signature(CLIENT.__init__).bind_partial(None, service_url, *args).arguments
        # Pulsar's own default is not to verify host names.
        if "tls_validate_hostname" not in given:
            kwargs.setdefault("tls_validate_hostname", True)
        self._delaylevel_options = {**given, **kwargs}
        super().__init__(service_url, *args, **kwargs)  # type: ignore[call-arg]
        # Closed with the client, unless it is the application's own.
        self._delaylevel_own_admin: Admin | None = None
        if admin is None and admin_url is not None:
            admin = admin_for(self._delaylevel_options, admin_url, admin_token)
            self._delaylevel_own_admin = admin
        self._delaylevel_admin = admin
        self._delaylevel_clock = clock or SystemClock()

    @classmethod
    def from_connection(cls, connection: Connection, **kwargs: Any) -> Self:
        """Return a client for configured addresses, token and TLS settings.

        Args:
            connection: see :class:`delaylevel.cluster.connection.settings.Connection`.
            kwargs: further arguments of the Pulsar client.
        """
        settings = {**connection.client_kwargs(), **kwargs}
        admin = Admin.from_connection(connection)
        client = cls(**settings, admin=admin)
        client._delaylevel_own_admin = admin
        return client

    @property
    def admin(self) -> TopicAdmin | None:
        """The admin client; None if no admin address was given."""
        return self._delaylevel_admin

    def _close_admin(self) -> None:
        """Close the connections of the admin client, unless it is the application's own."""
        if self._delaylevel_own_admin is not None:
            self._delaylevel_own_admin.close()

    def _prepare(
        self, topic: str, options: Mapping[str, Any], choice: LevelTopicChoice
    ) -> ProducerSetup:
        partitions_of = self._client.get_topic_partitions
        clock = self._delaylevel_clock
        return prepare(topic, options, self._delaylevel_admin, partitions_of, clock, choice)


class DelayLevelClient(BaseClient, pulsar.Client):
    """A ``pulsar.Client`` that can also send long-delayed messages through level topics.

    Args:
        service_url: as for ``pulsar.Client``; all of its other arguments are accepted, too.
        admin_url: the address of the admin REST interface (``http://…:8080``), or those of several
            brokers (``http://one:8080,two:8080``), so that it works while one of them is away. With
            it, a producer reads the description of its level topic, and creates a missing one.
            Without it, the level topic must exist, under its default name or the name that the
            producer gives, and only its numbers of partitions are checked.
        admin: an existing admin client, instead of ``admin_url``.
        admin_token: the token for the admin interface, or a function that returns it. By default,
            the admin interface gets the credentials of ``authentication`` if that is an
            ``AuthenticationToken`` or ``AuthenticationTLS``; with any other, give the token here.
        clock: source of the time at which a message is sent; the machine's by default.
        tls_validate_hostname: as for ``pulsar.Client``, but True by default: the client compares
            the host name with the certificate, for ``pulsar+ssl://`` and the admin address.
    """

    def close(self) -> None:
        """Close the client with its producers, consumers and admin connections."""
        try:
            super().close()
        finally:
            self._close_admin()

    def shutdown(self) -> None:
        """Close everything at once, without waiting for what is not finished yet."""
        try:
            super().shutdown()
        finally:
            self._close_admin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @overload
    def create_producer(
        self, topic: str, *args: Any, enable_delay_level_topic: Literal[False] = ..., **kwargs: Any
    ) -> pulsar.Producer: ...

    @overload
    def create_producer(
        self, topic: str, *args: Any, enable_delay_level_topic: Literal[True], **kwargs: Any
    ) -> DelayLevelProducer: ...

    def create_producer(
        self, topic: str, *args: Any, enable_delay_level_topic: bool = False, **kwargs: Any
    ) -> Any:
        """Create a producer; every argument of ``pulsar.Client.create_producer`` is accepted.

        Args:
            topic: the business topic.
            enable_delay_level_topic: False (the default) for a plain ``pulsar.Producer``.
            delay_level_topic: the level topic; by default the existing one of the business topic,
                or ``_<topic>-delay-level`` for a new one. One level topic may serve several
                business topics.
            delay_level_namespace: the namespace (``tenant/namespace``) of the level topic; that of
                the business topic by default. Consumers with a pattern for all topics of the
                business topic's namespace do not receive parked messages from another one.
            partition_strategy: one strategy, or a list of them from coarse to fine. By default,
                the strategy of the existing level topic, or 30 days by DAY for a new one.
            mover, final_window: properties of a new level topic.
            create_level_topic: True to create a missing level topic.
            max_message_size: the broker's ``maxMessageSize``, in bytes; 5 MiB by default, as in
                brokers. Larger messages are not parked; ``send`` raises an error.

        Returns:
            A ``pulsar.Producer``, or with ``enable_delay_level_topic=True`` a
            :class:`~delaylevel.DelayLevelProducer`.

        Raises:
            StrategyMismatchError: the level topic has another strategy; both are shown.
            TargetNotAllowedError: the level topic does not carry this business topic's messages.
            LevelTopicError: the topic is missing and may not be created, or is not a level topic.
            UnsupportedOptionError: an option that delayed messages could not keep.
            ValueError, TypeError: an argument of a wrong type, as with ``pulsar.Client``.
            pulsar.PulsarException: the broker refused. Our own errors about the broker are of this
                class, too. No level topic was created in any of these cases.
        """
        choice = taken_choice(kwargs)
        if not enable_delay_level_topic:
            return super().create_producer(topic, *args, **kwargs)
        options = given_options(CREATE_PRODUCER, topic, args, kwargs)
        check_create_producer(topic, options)
        with client_errors():
            setup = self._prepare(topic, options, choice)
            create_producer = super().create_producer
            business = create_producer(topic, **options)
            try:
                setup = setup.created(schema_of(business), self)
                return DelayLevelProducer(create_producer, business, setup)
            except BaseException:
                close_quietly(business, "producer")
                raise


def wrap(
    producer: Any,
    client: Any,
    *,
    partition_strategy: StrategyArgument = None,
    delay_level_topic: str | None = None,
    delay_level_namespace: str | None = None,
    mover: Mover | str = Mover.SERVICE,
    final_window: FinalWindow | str = FinalWindow.TRACKER,
    create_level_topic: bool = True,
    admin_url: str | None = None,
    admin: TopicAdmin | None = None,
    max_message_size: int = DEFAULT_MAX_MESSAGE_SIZE,
    plain_producer: bool = False,
    **producer_options: Any,
) -> DelayLevelProducer:
    """Add a delay-level topic to an existing producer.

    The options of the given producer cannot be read from it: give all that differ from the defaults
    here, too, for the producers of level topics. Delayed messages cannot be encrypted, for example;
    unless you confirm with ``plain_producer`` that the producer is plain, the first call in a
    process warns of this with a :class:`WrapWarning`.

    Args:
        producer: a ``pulsar.Producer``. It still sends the messages that are not parked, and is
            closed together with the wrapper.
        client: the client that created it, a ``pulsar.Client`` or a :class:`DelayLevelClient`.
        partition_strategy, delay_level_topic, delay_level_namespace, mover, final_window,
            create_level_topic: as in :meth:`DelayLevelClient.create_producer`.
        admin_url: the address of the admin interface, if the client has none; name several brokers
            (``http://one:8080,two:8080``), so that it works while one of them is away. The
            credentials of a :class:`DelayLevelClient` are used there; any other client's cannot be
            read.
        admin: instead of ``admin_url``, an admin client with its own credentials; you close it.
        max_message_size: the broker's ``maxMessageSize``, in bytes.
        plain_producer: True to confirm that the producer has no encryption, no chunks, no message
            router, and the access mode Shared, and is for the whole topic.
        producer_options: the other options with which the producer was created, by their names in
            ``pulsar.Client.create_producer``. These apply to level topics: ``compression_type``,
            ``send_timeout_millis`` (by default the lead, from 5 to 30 s), ``max_pending_messages``,
            the options of batches (of at most 1,024 messages), ``properties``, and
            ``block_if_queue_full`` (True by default; give False if callbacks send messages, because
            they must not wait). Refused are ``encryption_key``, ``crypto_key_reader``,
            ``chunking_enabled``, ``message_router`` and any ``access_mode`` but Shared. All others
            do not concern level topics.

    Raises:
        TypeError: an option that ``pulsar.Client.create_producer`` does not have.
        InvalidInputError: the arguments are swapped, for asyncio, wrapped already, or of different
            clusters.
        As :meth:`DelayLevelClient.create_producer`; the producer works as before.
    """
    arguments = locals()  # the asyncio form binds them to the same names
    topic, options, prepared = wrap_request(CREATE_PRODUCER, arguments)
    check_create_producer(topic, options)
    with client_errors():
        setup = prepared(client.get_topic_partitions)
        # The client's own method is known to do nothing else, so it opens without a thread.
        plain: Any = (
            super(DelayLevelClient, client) if isinstance(client, DelayLevelClient) else client
        )
        setup = setup.created(schema_of(producer), client)
        return DelayLevelProducer(plain.create_producer, producer, setup)


def wrap_request(
    create_producer: Any, arguments: Mapping[str, Any], *, for_asyncio: bool = False
) -> tuple[str, dict[str, Any], Callable[[Callable[[str], Any]], ProducerSetup]]:
    """Return topic, options and :func:`.prepare` for the arguments of :func:`wrap`, by name."""
    producer, client = arguments["producer"], arguments["client"]
    check_pair(producer, client, for_asyncio=for_asyncio)
    if not arguments["plain_producer"]:
        warn_of_assumptions()
    topic = TopicName.parse(producer.topic()).without_partition.full
    given = given_options(create_producer, topic, (), arguments["producer_options"])
    options = {"block_if_queue_full": True, **given}
    admin, own = arguments["admin"] or getattr(client, "admin", None), None
    if admin is None and arguments["admin_url"] is not None:
        known = getattr(client, "_delaylevel_options", {})  # those of another client: none
        admin = own = admin_for(known, arguments["admin_url"], None)
    clock = getattr(client, "_delaylevel_clock", None) or SystemClock()
    choice = LevelTopicChoice(*(arguments[field] for field in LevelTopicChoice._fields))

    def prepared(find: Callable[[str], Any]) -> ProducerSetup:
        setup = prepare(topic, options, admin, find, clock, choice)
        return setup._replace(own_admin=own)

    return topic, options, prepared


#: The arguments of :func:`wrap`.
WRAP_SIGNATURE = inspect.signature(wrap)


def admin_for(
    client_options: Mapping[str, Any], admin_url: str, token: str | Callable[[], str] | None
) -> Admin:
    """Return an admin client with the credentials and TLS settings of the Pulsar client."""
    options = RestOptions(
        tls_trust_certs_file=client_options.get("tls_trust_certs_file_path"),
        tls_certificate_file=client_options.get("tls_certificate_file_path"),
        tls_private_key_file=client_options.get("tls_private_key_file_path"),
        tls_allow_insecure=bool(client_options.get("tls_allow_insecure_connection", False)),
        tls_validate_hostname=bool(client_options.get("tls_validate_hostname", True)),
    )
    if token is not None:
        options["token"] = token
    else:
        options.update(admin_credentials(client_options.get("authentication")))
    return Admin(admin_url, **options)
