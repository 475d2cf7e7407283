"""The Function's user configuration, which ``deploy`` writes and each instance reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from delaylevel.errors import ConfigError

from .relay import DEFAULT_IN_FLIGHT

DEFAULT_RECEIVER_QUEUE = 500
# Name of a secret with a token for the admin interface.
TOKEN_SECRET = "delaylevel_admin_token"


@dataclass(frozen=True)
class FunctionSettings:
    """The user configuration of one Function.

    Attributes:
        level_topic: full name of the level topic.
        admin_url: address of the admin interface, as the worker reaches it.
        log_topic: topic for log lines, besides the worker's own file; empty for none.
        tls_allow_insecure: True to accept any certificate.
        tls_validate_hostname: False to accept a certificate of another host; for the admin
            interface, and for the Function's own clients.
        receiver_queue, in_flight, token_file, tls_trust_certs_file: as in
            :class:`delaylevel.functions.deployment.FunctionOptions`.
    """

    level_topic: str
    admin_url: str
    receiver_queue: int = DEFAULT_RECEIVER_QUEUE
    in_flight: int = DEFAULT_IN_FLIGHT
    log_topic: str = ""
    token_file: str | None = None
    tls_trust_certs_file: str | None = None
    tls_allow_insecure: bool = False
    tls_validate_hostname: bool = True

    def __post_init__(self) -> None:
        if self.receiver_queue < 1 or self.in_flight < 1:
            raise ConfigError("receiver queue and messages in flight must be at least 1")

    def to_config(self) -> dict[str, Any]:
        """Return the values as the user configuration of a Function."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FunctionSettings:
        """Read a Function's user configuration, and ignore unknown keys.

        Raises:
            ConfigError: a value is missing or wrong.
        """
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in config.items() if name in known}
        try:
            for name in ("receiver_queue", "in_flight"):
                if name in values:
                    values[name] = int(values[name])  # pulsar-admin turns 500 into 500.0
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the Function's user configuration cannot be read ({error}): deploy it with "
                "`delaylevel mover deploy`"
            ) from error
