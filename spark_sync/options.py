"""The options of the Spark source and sink, spelled as those of the Kafka source are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from delaylevel.cluster.connection import Connection
from delaylevel.cluster.reader import DEFAULT_POLL_TIMEOUT_MS
from delaylevel.errors import ConfigError, DelayLevelError
from delaylevel.model.delivery import Delivery
from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName

# Connection settings that may stand in a query's plan. A token may not: it comes from a file or
# from the environment of the process that needs it.
_CONNECTION = {
    "serviceUrl": "service_url",
    "adminUrl": "admin_url",
    "tokenFile": "token_file",
    "tlsTrustCertsFile": "tls_trust_certs_file",
    "tlsCertificateFile": "tls_certificate_file",
    "tlsPrivateKeyFile": "tls_private_key_file",
    "tlsAllowInsecure": "tls_allow_insecure",
    "tlsValidateHostname": "tls_validate_hostname",
    "operationTimeoutSeconds": "operation_timeout_seconds",
}
_READING = (
    "levelTopics",
    "startingOffsets",
    "maxOffsetsPerTrigger",
    "failOnDataLoss",
    "pollTimeoutMs",
    "delivery",
)
# Where the job's program and the query's processes meet; see control.py.
_CONTROL = "controlDir"
# The source sends on what it reads, and the sink only collects what became of it.
_FORWARD = "forwardInSource"
# Spark adds these to what a user gives.
_SPARKS_OWN = ("path", "checkpointlocation", "queryname")


@dataclass(frozen=True)
class SyncOptions:
    """What the source and the sink are told.

    Attributes:
        connection: settings for :meth:`delaylevel.config.Connection.load`, never a token.
        level_topics: full names of the level topics that are moved.
        starting_offsets: where a new query starts: ``"subscription"``, ``"earliest"``, or
            positions by partition.
        max_offsets_per_trigger: how many messages a batch has at the most, over all partitions;
            None for everything that is ripe.
        fail_on_data_loss: end the query where messages are gone that it has not moved.
        poll_timeout_ms: how long a task waits for a message that the broker says is there.
        delivery: how often a message may arrive.
        forward: the source sends on; see :mod:`delaylevel.spark_sync.forwarding`.
        control_dir: the folder of :mod:`delaylevel.spark_sync.control`; empty without one.
    """

    connection: tuple[tuple[str, str], ...]
    level_topics: tuple[str, ...]
    starting_offsets: str | tuple[tuple[str, str], ...] = "subscription"
    max_offsets_per_trigger: int | None = None
    fail_on_data_loss: bool = True
    poll_timeout_ms: int = DEFAULT_POLL_TIMEOUT_MS
    delivery: Delivery = Delivery.AT_LEAST_ONCE
    forward: bool = False
    # Another one for each run, and no reason for connections of its own.
    control_dir: str = field(default="", compare=False)

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SyncOptions:
        """Read the options of ``.option(…)``; names are not case-sensitive.

        Raises:
            ConfigError: one is unknown, missing, or has a value that cannot be used.
        """
        known = {name.lower(): name for name in (*_CONNECTION, *_READING, _FORWARD, _CONTROL)}
        given: dict[str, str] = {}
        for name, value in options.items():
            if name.lower() in _SPARKS_OWN:
                continue
            if name.lower() not in known:
                raise ConfigError(
                    f"unknown option {name!r}; there are {', '.join(sorted(known.values()))}"
                )
            given[known[name.lower()]] = value
        topics = [part.strip() for part in given.get("levelTopics", "").split(",") if part.strip()]
        if not topics:
            raise ConfigError(
                "option levelTopics is missing: name one level topic or several, with commas"
            )
        try:
            names = tuple(sorted({TopicName.parse(topic).full for topic in topics}))
        except DelayLevelError as error:
            raise ConfigError(f"option levelTopics: {error}") from error
        return cls(
            connection=tuple(
                sorted((_CONNECTION[name], given[name]) for name in given if name in _CONNECTION)
            ),
            level_topics=names,
            starting_offsets=_starting_offsets(given.get("startingOffsets", "subscription")),
            max_offsets_per_trigger=_positive(given, "maxOffsetsPerTrigger"),
            fail_on_data_loss=_boolean(given, "failOnDataLoss", True),
            poll_timeout_ms=_positive(given, "pollTimeoutMs") or DEFAULT_POLL_TIMEOUT_MS,
            delivery=_delivery(given.get("delivery", Delivery.AT_LEAST_ONCE.value)),
            forward=_boolean(given, _FORWARD, False),
            control_dir=given.get(_CONTROL, ""),
        )

    def load_connection(self) -> Connection:
        """Return the connection; a token is taken from this process's environment or its file."""
        return Connection.load(**dict(self.connection))  # type: ignore[arg-type]


def connection_options(connection: Connection) -> dict[str, str]:
    """Return a connection as options of the source and the sink, without its token."""
    found: dict[str, str] = {}
    for option, name in _CONNECTION.items():
        value = getattr(connection, name)
        if value is not None:
            found[option] = str(value).lower() if isinstance(value, bool) else str(value)
    return found


def _starting_offsets(text: str) -> str | tuple[tuple[str, str], ...]:
    if text.strip().lower() in ("subscription", "earliest"):
        return text.strip().lower()
    try:
        value: Any = json.loads(text)
        if not isinstance(value, dict):
            raise TypeError
        return tuple(
            sorted(
                (TopicName.parse(topic).full, str(Position.parse(position)))
                for topic, position in value.items()
            )
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"option startingOffsets is {text!r}: write subscription, earliest, or JSON such as "
            '{"persistent://public/default/t-partition-0": "12:0"}' + f" ({error})"
        ) from error


def _positive(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not (text.isdecimal() and int(text) > 0):
        raise ConfigError(f"option {name} is {text!r}: it is a whole number above 0")
    return int(text)


def _boolean(given: Mapping[str, str], name: str, default: bool) -> bool:
    text = given.get(name)
    if text is None:
        return default
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"option {name} is {text!r}: it is true or false")
    return text.lower() == "true"


def _delivery(text: str) -> Delivery:
    try:
        return Delivery(text.lower())
    except ValueError:
        known = ", ".join(item.value for item in Delivery)
        raise ConfigError(f"option delivery is {text!r}: it is one of {known}") from None
