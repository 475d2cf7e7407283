"""What the functions worker has told this instance: the arguments of its process.

A Function gets a ready client from the worker, and neither the token nor the addresses in it. The
worker's own program for Python instances has them as arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pulsar

from delaylevel.cluster.token import read_token_file


def argument(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of ``--name value``; None where it is not there, or empty."""
    for given, value in itertools.pairwise(arguments):
        if given == f"--{name}":
            return value.strip("'") or None
    return None


def instance_token(arguments: Sequence[str]) -> str | None:
    """Return the token that the worker gave this instance for its own client, if it did.

    Args:
        arguments: of the process: ``… --client_auth_params token:…`` or ``file:///…``, or with
            the plugin for tokens the token itself. JSON, which a Java client takes as well, is
            nothing to the Python client that the worker's program makes of it.

    Raises:
        ConfigError: the file cannot be read.
    """
    given = argument(arguments, "client_auth_params") or ""
    kind, _, rest = given.partition(":")
    if kind == "token":
        return rest
    if kind == "file":
        return worker_token_file("/" + rest.lstrip("/"))
    plugin = argument(arguments, "client_auth_plugin") or ""
    return given or None if plugin.endswith("AuthenticationToken") else None


def worker_token_file(path: str) -> str:
    """Return the token in a file on this worker.

    Raises:
        ConfigError: it cannot be read, or is empty.
    """
    return read_token_file(path, f"token file {path} on this worker")


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
