"""The configuration of an application: its connection, and defaults of producers and listeners.

Loaded for :meth:`Listeners.from_config` only: the connection needs Pydantic, which takes long to
import.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pulsar

from delaylevel.cluster import logs
from delaylevel.cluster.client_parts import CREATE_PRODUCER
from delaylevel.cluster.connection.settings import (
    ENVIRONMENT_PREFIX,
    Connection,
    config_path,
    read_config,
)
from delaylevel.errors import ConfigError, InvalidInputError
from delaylevel.producer.client import DelayLevelClient

from .listener import CHECKS

_PRODUCER, _LISTENERS = "producer", "listeners"
_COMPRESSION = {
    "none": pulsar.CompressionType.NONE,
    "lz4": pulsar.CompressionType.LZ4,
    "zlib": pulsar.CompressionType.ZLib,
    "zstd": pulsar.CompressionType.ZSTD,
    "snappy": pulsar.CompressionType.SNAPPY,
}


def _compression(value: Any) -> Any:
    name = value.lower() if isinstance(value, str) else None
    if name not in _COMPRESSION:
        raise InvalidInputError(f"compression_type is one of {', '.join(_COMPRESSION)}")
    return _COMPRESSION[name]


def _like_default(name: str) -> Callable[[Any], Any]:
    """Return the check of an option of ``create_producer``: the client's default has its type."""
    default = inspect.signature(CREATE_PRODUCER).parameters[name].default

    def check(value: Any) -> Any:
        if type(value) is not type(default) or (type(value) is int and value < 0):
            kind = "true or false" if type(default) is bool else "a whole number from 0 up"
            raise InvalidInputError(f"{name} is {kind}, not {value!r}")
        return value

    return check


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidInputError(f"it is true or false, not {value!r}")
    return value


Checks = Mapping[str, Callable[[Any], Any]]
#: The table ``[producer]``: defaults of `Listeners.create_producer`.
PRODUCER_SETTINGS: Checks = {
    "enable_delay_level_topic": _flag,
    "create_level_topic": _flag,
    "compression_type": _compression,
    **{
        name: _like_default(name)
        for name in (
            *("batching_enabled", "batching_max_messages", "batching_max_publish_delay_ms"),
            *("block_if_queue_full", "max_pending_messages", "send_timeout_millis"),
        )
    },
}
#: The tables ``[listeners]`` and ``[listeners.NAME]``: options of `Listeners.on`.
LISTENER_SETTINGS: Checks = {**CHECKS, "deduplicate": _flag}


@dataclass(frozen=True)
class ApplicationConfig:
    """The settings of an application with listeners."""

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
        """Collect the settings from arguments and configuration file.

        The file and its lookup, and the variables of the connection, are those of
        :meth:`.Connection.load`. Arguments override the file. The settings of a listener's name,
        ``[listeners.bill]`` for the handler ``bill``, override those of all listeners.
        """
        known = Connection.model_fields.keys() - {"origin"}
        unknown = connection.keys() - known
        if unknown:
            raise ConfigError(
                f"unknown settings of the connection: {', '.join(sorted(unknown))}; defaults of "
                "listeners and producers are given as listeners={...} and producer={...}"
            )
        for table in (_PRODUCER, _LISTENERS):
            prefix = f"{ENVIRONMENT_PREFIX}{table.upper()}_"
            for variable in sorted(environ):
                if variable.startswith(prefix) and environ[variable]:
                    raise ConfigError(
                        f"the environment variable {variable} is not a setting: write it into "
                        f"[{table}] of the configuration file, or give it to "
                        f"from_config({table}={{...}})"
                    )
        loaded = Connection.load(config_file=config_file, environ=environ, **connection)
        path, must_exist = config_path(config_file, environ)
        contents = read_config(path, sorted(known), must_exist=must_exist)
        listed = _table(contents, _LISTENERS, path)
        by_name = {
            name: _checked(LISTENER_SETTINGS, value, f"[{_LISTENERS}.{name}] in {path}")
            for name, value in listed.items()
            if isinstance(value, dict) and name not in LISTENER_SETTINGS
        }
        common = {name: value for name, value in listed.items() if name not in by_name}
        return cls(
            loaded,
            {
                **_checked(
                    PRODUCER_SETTINGS, _table(contents, _PRODUCER, path), f"[{_PRODUCER}] in {path}"
                ),
                **_checked(PRODUCER_SETTINGS, producer or {}, "the call"),
            },
            {
                **_checked(LISTENER_SETTINGS, common, f"[{_LISTENERS}] in {path}"),
                **_checked(LISTENER_SETTINGS, listeners or {}, "the call"),
            },
            by_name,
        )

    def listener(self, name: str) -> dict[str, Any]:
        """Return the options of a listener."""
        return {**self.listeners, **self.by_name.get(name, {})}

    def open_client(self) -> DelayLevelClient:
        """Return a new client; it logs warnings to stderr. The caller closes it."""
        return DelayLevelClient.from_connection(self.connection, logger=logs.to_stderr())


def _table(contents: Mapping[str, Any], name: str, path: os.PathLike[str]) -> dict[str, Any]:
    found = contents.get(name, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: {name} must be a table: write [{name}]")
    return found


def _checked(known: Checks, values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return settings of one place, checked."""
    found, wrong = {}, []
    for name, value in values.items():
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise ConfigError(f"{name} (from {place}) is not a setting: {hint}")
        try:
            checked = None if value is None else known[name](value)
            found[name] = value if checked is None else checked  # `retry` may be false
        except InvalidInputError as error:
            wrong.append(f"{name} (from {place}): {error}")
    if wrong:
        raise ConfigError("; ".join(wrong))
    return found
