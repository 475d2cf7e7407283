"""Options of the Spark source and sink, and settings of the job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import ConfigError, DelayLevelError
from delaylevel.model.topic_name import TopicName


@dataclass(frozen=True)
class SyncSettings:
    """The settings of a sync job.

    Attributes:
        level_topics: the level topics to serve, each by its own name or by its business topic's.
        checkpoint: the folder of the query's checkpoint: a path, or a URI of any file system that
            Hadoop knows.
        once: True to move the messages that are ready now and end; False to run until stopped.
        trigger_ms: the interval between two batches, in ms; by default a fifth of the shortest
            lead, between 0.2 and 5 s.
        master: Spark's master.
        options: further options of the source, e.g. ``failOnDataLoss``.
        spark_conf: further Spark settings.
        metrics_port: the port that serves metrics for Prometheus; 0 for any free port, None for
            no metrics.
        metrics_address: the address of the interface that serves the metrics.
    """

    level_topics: tuple[str, ...]
    checkpoint: str
    once: bool = False
    trigger_ms: int | None = None
    master: str = "local[2]"
    options: Mapping[str, str] = field(default_factory=dict)
    spark_conf: Mapping[str, str] = field(default_factory=dict)
    metrics_port: int | None = None
    metrics_address: str = "127.0.0.1"


#: The name of the source and the sink in ``format(...)``.
FORMAT = "delaylevel"
# Connection settings that a query's plan may contain. A token may not: each process reads it from
# a file or from its environment.
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
_READING = ("levelTopics", "maxOffsetsPerTrigger", "failOnDataLoss")
# The folder through which the job's program and the query's processes communicate: control.py.
_CONTROL = "controlDir"
# The source forwards what it reads: forwarding.py.
_FORWARD = "forwardInSource"
# Options that Spark adds to the user's.
_SPARKS_OWN = ("path", "checkpointlocation", "queryname")


@dataclass(frozen=True)
class SyncOptions:
    """Parsed options of the source and the sink.

    Attributes:
        connection: settings for :meth:`delaylevel.config.Connection.load`, never a token.
        max_offsets_per_trigger: maximum number of messages in a batch, over all partitions; None
            for all ready messages.
        fail_on_data_loss: True to end the query if messages were lost that it has not moved.
        forward: True if the source forwards; see :mod:`delaylevel.spark_sync.forwarding`.
        control_dir: the folder of :mod:`delaylevel.spark_sync.control`; empty for none.
    """

    connection: tuple[tuple[str, str], ...]
    level_topics: tuple[str, ...]
    max_offsets_per_trigger: int | None = None
    fail_on_data_loss: bool = True
    forward: bool = False
    # Different in each run, but no reason for a separate connection.
    control_dir: str = field(default="", compare=False)

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SyncOptions:
        """Parse the options of ``.option(…)``; names are not case-sensitive."""
        given = _known_options(options, (*_CONNECTION, *_READING, _FORWARD, _CONTROL))
        topics = [part.strip() for part in given.get("levelTopics", "").split(",") if part.strip()]
        if not topics:
            raise ConfigError(
                "option levelTopics is missing: name one level topic or several, with commas"
            )
        try:
            level_topics = tuple(sorted({TopicName.parse(topic).full for topic in topics}))
        except DelayLevelError as error:
            raise ConfigError(f"option levelTopics: {error}") from error
        return cls(
            connection=_connection(given),
            level_topics=level_topics,
            max_offsets_per_trigger=_positive(given, "maxOffsetsPerTrigger"),
            fail_on_data_loss=boolean_option(given, "failOnDataLoss", True),
            forward=boolean_option(given, _FORWARD, False),
            control_dir=given.get(_CONTROL, ""),
        )


@dataclass(frozen=True)
class WriteOptions:
    """Parsed options of the batch sink.

    Attributes:
        target: the business topic of rows that name none; empty for none.
        level_topic: the level topic; None for the business topic's own.
    """

    connection: tuple[tuple[str, str], ...]
    target: str
    level_topic: str | None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> WriteOptions:
        """Parse the options of ``.option(…)``; names are not case-sensitive."""
        given = _known_options(options, (*_CONNECTION, "target", "levelTopic"))
        return cls(_connection(given), given.get("target", ""), given.get("levelTopic"))


def _known_options(options: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    given, rest = split_options(options, names)
    unknown = [name for name in rest if name.lower() not in _SPARKS_OWN]
    if "startingoffsets" in map(str.lower, unknown):
        raise ConfigError(
            "option startingOffsets: a query without a checkpoint starts at the first message that "
            "is not acknowledged. Move the subscription instead (pulsar-admin topics reset-cursor)"
        )
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}; there are {', '.join(sorted(names))}")
    return given


def _connection(given: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((_CONNECTION[name], given[name]) for name in given if name in _CONNECTION))


def connection_options(connection: Connection) -> dict[str, str]:
    """Return a connection as options of the source and the sink, without its token."""
    found: dict[str, str] = {}
    for option, name in _CONNECTION.items():
        value = getattr(connection, name)
        if value is not None:
            found[option] = str(value).lower() if isinstance(value, bool) else str(value)
    return found


def split_options(
    options: Mapping[str, str], names: Iterable[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the options with these names, in their spelling, and all others as given."""
    spelling = {name.lower(): name for name in names}
    given: dict[str, str] = {}
    rest: dict[str, str] = {}
    for name, value in options.items():
        if name.lower() in spelling:
            given[spelling[name.lower()]] = value
        else:
            rest[name] = value
    return given, rest


def boolean_option(given: Mapping[str, str], name: str, default: bool) -> bool:
    """Return the value of an option that is true or false."""
    text = given.get(name, str(default)).strip().lower()
    if text not in ("true", "false"):
        raise ConfigError(f"option {name} is {text!r}: it is true or false")
    return text == "true"


def _positive(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not (text.isdecimal() and int(text) > 0):
        raise ConfigError(f"option {name} is {text!r}: it is a whole number above 0")
    return int(text)
