"""What ``deploy`` tells the Function: the values of its user configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from delaylevel.errors import ConfigError

from .relay import DEFAULT_IN_FLIGHT

DEFAULT_RECEIVER_QUEUE = 500
# The name of a secret that holds a token for the admin interface.
TOKEN_SECRET = "delaylevel_admin_token"


@dataclass(frozen=True)
class FunctionSettings:
    """The user configuration of one Function.

    Attributes:
        level_topic: the full name of the level topic.
        admin_url: the admin interface, as the worker reaches it.
        receiver_queue: how many messages a consumer fetches ahead, for each partition.
        in_flight: the most messages that are sent and not confirmed.
        log_topic: where log lines go, beside the worker's own file; empty for nowhere.
        token_file: a file on the worker with the token of a role of the Function's own; None for
            the worker's credentials.
        tls_trust_certs_file: a file on the worker, for an ``https://`` admin interface; None for
            the one that the worker trusts the cluster by.
        tls_allow_insecure: accept certificates that nobody vouches for.
    """

    level_topic: str
    admin_url: str
    receiver_queue: int = DEFAULT_RECEIVER_QUEUE
    in_flight: int = DEFAULT_IN_FLIGHT
    log_topic: str = ""
    token_file: str | None = None
    tls_trust_certs_file: str | None = None
    tls_allow_insecure: bool = False

    def __post_init__(self) -> None:
        if self.receiver_queue < 1 or self.in_flight < 1:
            raise ConfigError("receiver queue and messages in flight must be at least 1")

    def to_config(self) -> dict[str, Any]:
        """Return it as the user configuration of a Function."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FunctionSettings:
        """Read a Function's user configuration; what is unknown is left alone.

        Raises:
            ConfigError: something is missing or wrong.
        """
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in config.items() if name in known}
        try:
            for name in ("receiver_queue", "in_flight"):
                if name in values:
                    values[name] = int(values[name])  # pulsar-admin makes 500.0 of 500
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the Function's user configuration is not ours ({error}): deploy it with "
                "`delaylevel function deploy`"
            ) from error
