"""The configuration of an application: its connection, and defaults of producers and listeners.

Loaded for :meth:`Listeners.from_config` only, because Pydantic takes long to import.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pulsar
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from delaylevel.cluster import logs
from delaylevel.cluster.connection.settings import (
    ENVIRONMENT_PREFIX,
    Connection,
    config_path,
    explain,
    read_config,
)
from delaylevel.errors import ConfigError, InvalidInputError
from delaylevel.model.formatting import parse_delay
from delaylevel.producer.client import DelayLevelClient

from .retry import Backoff

_PRODUCER, _LISTENERS = "producer", "listeners"
_COMPRESSION = {
    "none": pulsar.CompressionType.NONE,
    "lz4": pulsar.CompressionType.LZ4,
    "zlib": pulsar.CompressionType.ZLib,
    "zstd": pulsar.CompressionType.ZSTD,
    "snappy": pulsar.CompressionType.SNAPPY,
}
_SUBSCRIPTION_TYPES = ("Shared", "Key_Shared", "Failover", "Exclusive")
_POSITIONS = ("earliest", "latest")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class _TableSettings(BaseModel):
    """Settings of one place; those that are not set are None."""

    # Strict, so that a number in quotes is noticed. Values may be addresses with credentials.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    def given(self) -> dict[str, Any]:
        """Return the settings that are set."""
        return {name: getattr(self, name) for name in sorted(self.model_fields_set)}


class ProducerSettings(_TableSettings):
    """Defaults of :meth:`.Listeners.create_producer`, the table ``[producer]``.

    Parameters:
        enable_delay_level_topic: True for producers that accept delayed messages.
        create_level_topic: False if level topics are not created by producers.
        compression_type: ``none``, ``lz4``, ``zlib``, ``zstd`` or ``snappy``.
        batching_enabled, batching_max_messages, batching_max_publish_delay_ms: batches.
        block_if_queue_full, max_pending_messages, send_timeout_millis: messages in flight.
    """

    enable_delay_level_topic: bool | None = None
    create_level_topic: bool | None = None
    compression_type: Any = None
    batching_enabled: bool | None = None
    batching_max_messages: int | None = None
    batching_max_publish_delay_ms: int | None = None
    block_if_queue_full: bool | None = None
    max_pending_messages: int | None = None
    send_timeout_millis: int | None = None

    @field_validator("compression_type")
    @classmethod
    def _check_compression(cls, value: Any) -> Any:
        if not isinstance(value, str) or value.lower() not in _COMPRESSION:
            raise ValueError(f"is one of {', '.join(_COMPRESSION)}")
        return _COMPRESSION[value.lower()]

    @field_validator(
        "batching_max_messages",
        "batching_max_publish_delay_ms",
        "max_pending_messages",
        "send_timeout_millis",
    )
    @classmethod
    def _check_count(cls, value: int | None) -> int | None:
        return _at_least(value, 0)


class ListenerSettings(_TableSettings):
    """Options of :meth:`.Listeners.on`, the tables ``[listeners]`` and ``[listeners.NAME]``.

    Parameters:
        subscription: name of the subscription.
        subscription_type: ``Shared``, ``Key_Shared``, ``Failover`` or ``Exclusive``.
        retry: delays between attempts, ``["10s", "5m"]``; or false; or a table with ``delays``, or
            with ``first``, ``longest`` and ``attempts``, each with ``jitter``.
        deduplicate: True to handle no message twice.
        concurrency: number of calls of the handler at the same time.
        batch: largest number of messages of a call.
        initial_position: ``earliest`` or ``latest``, for a new subscription.
        receiver_queue_size: number of messages that a consumer fetches ahead.
    """

    subscription: str | None = None
    subscription_type: str | None = None
    retry: Any = None
    deduplicate: bool | None = None
    concurrency: int | None = None
    batch: int | None = None
    initial_position: str | None = None
    receiver_queue_size: int | None = None

    @field_validator("subscription")
    @classmethod
    def _check_subscription(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("must not be empty")
        return value

    @field_validator("subscription_type")
    @classmethod
    def _check_type(cls, value: str | None) -> str | None:
        return _one_of(value, _SUBSCRIPTION_TYPES)

    @field_validator("initial_position")
    @classmethod
    def _check_position(cls, value: str | None) -> str | None:
        return _one_of(value, _POSITIONS)

    @field_validator("concurrency", "batch", "receiver_queue_size")
    @classmethod
    def _check_count(cls, value: int | None) -> int | None:
        return _at_least(value, 1)

    @field_validator("retry")
    @classmethod
    def _check_retry(cls, value: Any) -> Any:
        try:
            return _retry(value)
        except (InvalidInputError, TypeError) as error:
            raise ValueError(str(error)) from None


@dataclass(frozen=True)
class ApplicationConfig:
    """The settings of an application with listeners.

    Attributes:
        connection: the cluster.
        producer: default arguments of ``create_producer``.
        listeners: default options of listeners.
        by_name: options of single listeners, by the name of the listener.
    """

    connection: Connection
    producer: Mapping[str, Any] = field(default_factory=dict)
    listeners: Mapping[str, Any] = field(default_factory=dict)
    by_name: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        config_file: str | os.PathLike[str] | None = None,
        *,
        producer: Mapping[str, Any] | None = None,
        listeners: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] = os.environ,
        **connection: Any,
    ) -> ApplicationConfig:
        """Collect the settings from arguments, environment and configuration file.

        The file and its lookup are those of :meth:`.Connection.load`. Arguments override the
        environment, which overrides the file: ``DELAYLEVEL_LISTENERS_CONCURRENCY`` and
        ``DELAYLEVEL_PRODUCER_COMPRESSION_TYPE`` override ``[listeners]`` and ``[producer]``. The
        settings of a listener's name, ``[listeners.bill]`` for the handler ``bill``, override those
        of all listeners.

        Args:
            config_file: the configuration file.
            producer: defaults of producers, by the names of the table ``[producer]``.
            listeners: defaults of listeners, by the names of the table ``[listeners]``.
            environ: the environment.
            connection: arguments of :meth:`.Connection.load`.

        Raises:
            ConfigError: a value or file is invalid; the text names its source.
        """
        known = Connection.model_fields.keys() - {"origin"}
        unknown = connection.keys() - known
        if unknown:
            raise ConfigError(
                f"unknown settings of the connection: {', '.join(sorted(unknown))}; defaults of "
                "listeners and producers are given as listeners={...} and producer={...}"
            )
        loaded = Connection.load(config_file=config_file, environ=environ, **connection)
        path, must_exist = config_path(config_file, environ)
        contents = read_config(path, sorted(known), must_exist=must_exist)
        defaults, by_name = _tables(_table(contents, _LISTENERS, path), path)
        return cls(
            loaded,
            {
                **_checked(
                    ProducerSettings, _table(contents, _PRODUCER, path), f"[{_PRODUCER}] in {path}"
                ),
                **_variables(_PRODUCER, ProducerSettings, environ),
                **_checked(ProducerSettings, producer or {}, "the call"),
            },
            {
                **defaults,
                **_variables(_LISTENERS, ListenerSettings, environ),
                **_checked(ListenerSettings, listeners or {}, "the call"),
            },
            by_name,
        )

    def listener(self, name: str) -> dict[str, Any]:
        """Return the options of a listener.

        Args:
            name: name of the listener.
        """
        return {**self.listeners, **self.by_name.get(name, {})}

    def open_client(self) -> DelayLevelClient:
        """Return a new client; it logs warnings to stderr. The caller closes it.

        Raises:
            ConfigError: the token file cannot be read now, or is empty.
        """
        return DelayLevelClient.from_connection(self.connection, logger=logs.to_stderr())

    def unused_names(self, names: Sequence[str]) -> list[str]:
        """Return the names that have settings, but no listener.

        Args:
            names: names of the listeners.
        """
        return sorted(f"[{_LISTENERS}.{name}]" for name in self.by_name if name not in names)


def _table(contents: Mapping[str, Any], name: str, path: os.PathLike[str]) -> dict[str, Any]:
    found = contents.get(name, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: {name} must be a table: write [{name}]")
    return found


def _tables(
    table: Mapping[str, Any], path: os.PathLike[str]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the options of all listeners, and those of each name."""
    options = ListenerSettings.model_fields
    named = {
        name: value
        for name, value in table.items()
        if isinstance(value, dict) and name not in options
    }
    common = {name: value for name, value in table.items() if name not in named}
    return (
        _checked(ListenerSettings, common, f"[{_LISTENERS}] in {path}"),
        {
            name: _checked(ListenerSettings, value, f"[{_LISTENERS}.{name}] in {path}")
            for name, value in named.items()
        },
    )


def _checked(model: type[_TableSettings], values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return settings of one place, checked.

    Raises:
        ConfigError: an unknown setting, or an invalid value.
    """
    known = list(model.model_fields)
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise ConfigError(f"{name} (from {place}) is not a setting: {hint}")
    try:
        return model(**values).given()
    except ValidationError as error:
        raise ConfigError(explain(error, dict.fromkeys(values, place), place)) from None


def _variables(
    table: str, model: type[_TableSettings], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the settings in the environment."""
    prefix = f"{ENVIRONMENT_PREFIX}{table.upper()}_"
    options = {option.upper(): option for option in model.model_fields}
    found: dict[str, Any] = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(prefix) or not text:
            continue
        option = options.get(variable.removeprefix(prefix))
        if option is None:
            single = f"; settings of one listener stand in [{_LISTENERS}.NAME] of the file"
            raise ConfigError(
                f"the environment variable {variable} is not a setting: {prefix} is followed by "
                f"one of {', '.join(sorted(options))}{single if table == _LISTENERS else ''}"
            )
        place = f"the environment variable {variable}"
        found |= _checked(model, {option: _parsed(model, option, text, place)}, place)
    return found


def _parsed(model: type[_TableSettings], option: str, text: str, place: str) -> Any:
    """Return the value of an environment variable, of the type that a file has."""
    kind = str(model.model_fields[option].annotation)
    if "bool" in kind or option == "retry":
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        if option == "retry":
            return [part.strip() for part in text.split(",")]
        raise ConfigError(f"{option} (from {place}): must be true or false")
    if "int" in kind:
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"{option} (from {place}): must be a whole number") from None
    return text


def _retry(value: Any) -> Any:
    """Return the value of ``retry`` as `Listeners.on` takes it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return Backoff(value)
    if isinstance(value, (list, tuple)):
        return Backoff(*value)
    if isinstance(value, Backoff):
        return value
    if isinstance(value, dict):
        given = set(value)
        if {"delays"} <= given <= {"delays", "jitter"}:
            return Backoff(*value["delays"], jitter=value.get("jitter", 0.0))
        wanted = {"first", "longest", "attempts"}
        if wanted <= given <= {*wanted, "factor", "jitter"}:
            for name in ("first", "longest"):
                parse_delay(value[name], name)
            return Backoff.exponential(**value)
    raise InvalidInputError(
        'is a list of delays such as ["10s", "5m"]; false; or a table with delays, or with first, '
        "longest and attempts"
    )


def _one_of(value: str | None, allowed: Sequence[str]) -> str | None:
    plain = {name.lower().replace("_", ""): name for name in allowed}
    if value is None:
        return None
    found = plain.get(value.lower().replace("_", ""))
    if found is None:
        raise ValueError(f"is one of {', '.join(allowed)}")
    return found


def _at_least(value: int | None, least: int) -> int | None:
    if value is not None and value < least:
        raise ValueError(f"must be at least {least}")
    return value
