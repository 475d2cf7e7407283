"""The configuration of an application: its connection, and the defaults of its listeners.

Loaded for :meth:`Listeners.from_config` only: the connection needs Pydantic, which takes long to
import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from delaylevel.cluster import logs
from delaylevel.cluster.connection.settings import (
    ENVIRONMENT_PREFIX,
    TABLE,
    Connection,
    read_config,
)
from delaylevel.errors import ConfigError, InvalidInputError
from delaylevel.producer.client import DelayLevelClient

from .listener import CHECKS


@dataclass(frozen=True)
class ApplicationConfig:
    """The settings of an application with listeners."""

    connection: Connection
    listeners: Mapping[str, Any] = field(default_factory=dict)
    by_name: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        config_file: str | os.PathLike[str] | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
        **connection: Any,
    ) -> ApplicationConfig:
        """Read the settings of listeners, and with :meth:`.Connection.load` the connection."""
        prefix = f"{ENVIRONMENT_PREFIX}{TABLE.upper()}_"
        for variable in sorted(environ):
            if variable.startswith(prefix) and environ[variable]:
                raise ConfigError(
                    f"the environment variable {variable} is not a setting: write it into "
                    f"[{TABLE}] of the configuration file"
                )
        loaded = Connection.load(config_file=config_file, environ=environ, **connection)
        path, contents = read_config(config_file, environ)
        listed = contents.get(TABLE, {})
        if not isinstance(listed, dict):
            raise ConfigError(f"{path}: {TABLE} must be a table: write [{TABLE}]")
        by_name = {
            name: _checked(value, f"[{TABLE}.{name}] in {path}")
            for name, value in listed.items()
            if isinstance(value, dict) and name not in CHECKS
        }
        common = {name: value for name, value in listed.items() if name not in by_name}
        return cls(loaded, _checked(common, f"[{TABLE}] in {path}"), by_name)

    def listener(self, name: str) -> dict[str, Any]:
        """Return the options of a listener."""
        return {**self.listeners, **self.by_name.get(name, {})}

    def open_client(self) -> DelayLevelClient:
        """Return a new client; it logs warnings to stderr. The caller closes it."""
        return DelayLevelClient.from_connection(self.connection, logger=logs.to_stderr())


def _checked(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return settings of listeners from one place, checked."""
    found = {}
    for name, value in values.items():
        if name not in CHECKS:
            known = ", ".join(CHECKS)
            raise ConfigError(f"{name} (from {place}) is not a setting: known are {known}")
        try:
            checked = CHECKS[name](value)
        except InvalidInputError as error:
            raise ConfigError(f"{name} (from {place}): {error}") from None
        found[name] = value if checked is None else checked  # `retry` may be false
    return found
