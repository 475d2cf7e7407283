"""The configuration of an application: its connection, and defaults of producers and listeners.

Loaded for :meth:`Listeners.from_config` only: the connection needs Pydantic, which takes long to
import.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pulsar

from delaylevel.cluster import logs
from delaylevel.cluster.connection.settings import (
    ENVIRONMENT_PREFIX,
    Connection,
    config_path,
    read_config,
)
from delaylevel.errors import ConfigError, InvalidInputError
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
_WORDS = {"true": True, "yes": True, "on": True, "1": True}
_WORDS |= {"false": False, "no": False, "off": False, "0": False}


class _Kind(NamedTuple):
    """A kind of settings."""

    check: Callable[[Any], Any]
    read: Callable[[str], Any] = str


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text")
    if not value.strip():
        raise ValueError("must not be empty")
    return value


def _number(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        return text


def _at_least(least: int) -> _Kind:
    def check(value: Any) -> int:
        # Strict, so that a number in quotes is noticed.
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError("must be a whole number")
        if value < least:
            raise ValueError(f"must be at least {least}")
        return value

    return _Kind(check, _number)


def _one_of(allowed: Mapping[str, Any]) -> _Kind:
    plain = {name.lower().replace("_", ""): value for name, value in allowed.items()}

    def check(value: Any) -> Any:
        name = value.lower().replace("_", "") if isinstance(value, str) else None
        if name not in plain:
            raise ValueError(f"is one of {', '.join(allowed)}")
        return plain[name]

    return _Kind(check)


def _retry(value: Any) -> Any:
    """Return the value of ``retry`` as `Listeners.on` takes it."""
    if isinstance(value, (bool, Backoff)):
        return value
    try:
        if isinstance(value, str):
            return Backoff(value)
        if isinstance(value, (list, tuple)):
            return Backoff(*value)
        if isinstance(value, dict):
            given = set(value)
            if {"delays"} <= given <= {"delays", "jitter"}:
                return Backoff(*value["delays"], jitter=value.get("jitter", 0.0))
            wanted = {"first", "longest", "attempts"}
            if wanted <= given <= {*wanted, "factor", "jitter"}:
                return Backoff.exponential(**value)
    except (InvalidInputError, TypeError) as error:
        raise ValueError(str(error)) from None
    raise ValueError(
        'is a list of delays such as ["10s", "5m"]; false; or a table with delays, or with first, '
        "longest and attempts"
    )


def _retry_text(text: str) -> Any:
    return _WORDS.get(text.lower(), [part.strip() for part in text.split(",")])


_FLAG = _Kind(_flag, lambda text: _WORDS.get(text.lower(), text))
Settings = Mapping[str, _Kind]
#: The table ``[producer]``: defaults of `Listeners.create_producer`.
PRODUCER_SETTINGS: Settings = {
    "enable_delay_level_topic": _FLAG,
    "create_level_topic": _FLAG,
    "compression_type": _one_of(_COMPRESSION),
    "batching_enabled": _FLAG,
    "batching_max_messages": _at_least(0),
    "batching_max_publish_delay_ms": _at_least(0),
    "block_if_queue_full": _FLAG,
    "max_pending_messages": _at_least(0),
    "send_timeout_millis": _at_least(0),
}
#: The tables ``[listeners]`` and ``[listeners.NAME]``: options of `Listeners.on`.
LISTENER_SETTINGS: Settings = {
    "subscription": _Kind(_text),
    "subscription_type": _one_of({name: name for name in _SUBSCRIPTION_TYPES}),
    "retry": _Kind(_retry, _retry_text),
    "deduplicate": _FLAG,
    "concurrency": _at_least(1),
    "batch": _at_least(1),
    "initial_position": _one_of({name: name for name in _POSITIONS}),
    "receiver_queue_size": _at_least(1),
}


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
        """Collect the settings from arguments, environment and configuration file.

        The file and its lookup are those of :meth:`.Connection.load`. Arguments override the
        environment, which overrides the file: ``DELAYLEVEL_LISTENERS_CONCURRENCY`` and
        ``DELAYLEVEL_PRODUCER_COMPRESSION_TYPE`` override ``[listeners]`` and ``[producer]``. The
        settings of a listener's name, ``[listeners.bill]`` for the handler ``bill``, override those
        of all listeners.

        Args:
            environ: the environment.
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
                    PRODUCER_SETTINGS, _table(contents, _PRODUCER, path), f"[{_PRODUCER}] in {path}"
                ),
                **_variables(_PRODUCER, PRODUCER_SETTINGS, environ),
                **_checked(PRODUCER_SETTINGS, producer or {}, "the call"),
            },
            {
                **defaults,
                **_variables(_LISTENERS, LISTENER_SETTINGS, environ),
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

    def unused_names(self, names: Sequence[str]) -> list[str]:
        """Return the names that have settings, but no listener."""
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
    options = LISTENER_SETTINGS
    named = {
        name: value
        for name, value in table.items()
        if isinstance(value, dict) and name not in options
    }
    common = {name: value for name, value in table.items() if name not in named}
    return (
        _checked(LISTENER_SETTINGS, common, f"[{_LISTENERS}] in {path}"),
        {
            name: _checked(LISTENER_SETTINGS, value, f"[{_LISTENERS}.{name}] in {path}")
            for name, value in named.items()
        },
    )


def _checked(known: Settings, values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return settings of one place, checked; never with a value in the text of an error."""
    found, wrong = {}, []
    for name, value in values.items():
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise ConfigError(f"{name} (from {place}) is not a setting: {hint}")
        try:
            found[name] = None if value is None else known[name].check(value)
        except ValueError as error:
            wrong.append(f"{name} (from {place}): {error}")
    if wrong:
        raise ConfigError("; ".join(wrong))
    return found


def _variables(table: str, known: Settings, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings in the environment."""
    prefix = f"{ENVIRONMENT_PREFIX}{table.upper()}_"
    options = {option.upper(): option for option in known}
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
        value = known[option].read(text)
        found |= _checked(known, {option: value}, f"the environment variable {variable}")
    return found
