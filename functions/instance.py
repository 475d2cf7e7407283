"""What the functions worker has told this instance: the arguments of its process.

A Function gets a ready client from the worker, and neither the token nor the addresses in it. The
worker's own program for Python instances has them as arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pulsar

from delaylevel.errors import ConfigError


def argument(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of ``--name value``; None where it is not there, or empty."""
    for given, value in itertools.pairwise(arguments):
        if given == f"--{name}":
            return value.strip("'") or None
    return None


def instance_token(arguments: Sequence[str]) -> str | None:
    """Return the token that the worker gave this instance for its own client, if it did.

    Args:
        arguments: of the process: ``… --client_auth_params token:…`` or ``file:///…``.

    Raises:
        ConfigError: the file cannot be read.
    """
    kind, _, rest = (argument(arguments, "client_auth_params") or "").partition(":")
    if kind == "token":
        return rest
    if kind == "file":
        path = Path("/" + rest.lstrip("/"))
        try:
            return path.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"token file {path}: {error.strerror}") from error
    return None


def client_settings(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Return what to make a ``pulsar.Client`` of that is like the worker's own for this instance.

    Args:
        arguments: of the process.

    Returns:
        Arguments of ``pulsar.Client``; None where they do not say what the cluster's address is.
    """
    url = argument(arguments, "pulsar_serviceurl")
    if url is None:
        return None
    settings: dict[str, Any] = {
        "service_url": url,
        "use_tls": argument(arguments, "use_tls") == "true",
        # The worker writes the shorter name, and the instance's program understands both.
        "tls_allow_insecure_connection": "true"
        in (
            argument(arguments, "tls_allow_insecure"),
            argument(arguments, "tls_allow_insecure_connection"),
        ),
        "tls_validate_hostname": argument(arguments, "hostname_verification_enabled") == "true",
    }
    trusted = argument(arguments, "tls_trust_cert_path")
    if trusted is not None:
        settings["tls_trust_certs_file_path"] = trusted
    plugin = argument(arguments, "client_auth_plugin")
    params = argument(arguments, "client_auth_params")
    if plugin and params:
        settings["authentication"] = pulsar.Authentication(plugin, params)
    return settings
