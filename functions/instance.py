"""Arguments of an instance's process, which the functions worker chooses.

The worker passes a ready client to a Function, but neither the token nor the addresses in it. The
worker's program for Python instances gets them as arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pulsar

from delaylevel.cluster.connection.settings import read_token_file


def argument(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of ``--name value``; None if it is missing or empty."""
    for given, value in itertools.pairwise(arguments):
        if given == f"--{name}":
            return value.strip("'") or None
    return None


def instance_token(arguments: Sequence[str]) -> str | None:
    """Return the token that the worker passed for this instance's own client; None for none.

    Args:
        arguments: arguments of the process: ``… --client_auth_params token:…`` or ``file:///…``,
            or, with the plugin for tokens, the token itself. JSON, which Java clients accept too,
            does not work with the Python client of the worker's program.

    Raises:
        ConfigError: the token file cannot be read.
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
        ConfigError: the file cannot be read, or is empty.
    """
    return read_token_file(path, f"token file {path} on this worker")


def client_settings(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Return arguments of ``pulsar.Client`` for the same client as the worker's own.

    None if the arguments of the process do not contain the cluster's address.
    """
    url = argument(arguments, "pulsar_serviceurl")
    if url is None:
        return None
    settings: dict[str, Any] = {
        "service_url": url,
        "use_tls": argument(arguments, "use_tls") == "true",
        # The worker writes the shorter name; the instance's program accepts both.
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
