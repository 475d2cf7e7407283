"""Entry point for Pulsar functions workers: ``delaylevel.functions.mover.LevelMover``.

The worker passes a ready client to a Function, but neither the token nor the addresses in it. The
worker's program for Python instances gets them as arguments.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pulsar
from pulsar import Function

from delaylevel.cluster.connection.settings import TokenSource, read_token_file
from delaylevel.cluster.rest.admin import Admin
from delaylevel.errors import ConfigError

from .consumer_loop import TOKEN_SECRET, ConsumerLoop, FunctionSettings
from .relay import Relay, RelayReport


def argument(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of ``--name value``; None if it is missing or empty."""
    for given, value in itertools.pairwise(arguments):
        if given == f"--{name}":
            return value.strip("'") or None
    return None


def instance_token(arguments: Sequence[str]) -> str | None:
    """Return the token that the worker passed for this instance's own client; None for none."""
    # `token:…` or `file:///…` or, with the plugin for tokens, the token itself. JSON, which Java
    # clients accept too, does not work with the Python client of the worker's program.
    given = argument(arguments, "client_auth_params") or ""
    kind, _, rest = given.partition(":")
    if kind == "token":
        return rest
    if kind == "file":
        return worker_token_file("/" + rest.lstrip("/"))
    plugin = argument(arguments, "client_auth_plugin") or ""
    return given or None if plugin.endswith("AuthenticationToken") else None


def worker_token_file(path: str) -> str:
    """Return the token in a file on this worker."""
    return read_token_file(path, f"token file {path} on this worker")


def client_settings(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Return the arguments of the worker's own client; None if they lack the cluster's address."""
    url = argument(arguments, "pulsar_serviceurl")
    if url is None:
        return None
    settings: dict[str, Any] = {
        "service_url": url,
        "use_tls": argument(arguments, "use_tls") == "true",
        "tls_allow_insecure_connection": argument(arguments, "tls_allow_insecure") == "true",
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


class LevelMover(Function):
    """Mover of one level topic.

    The first message that the worker passes comes with the instance's client and configuration;
    from then on :class:`ConsumerLoop` does the work.

    ``context.pulsar_client`` and ``context.consumers`` are not part of Pulsar's documented
    interface. They exist in 4.0.8, and the integration tests verify that.
    """

    def __init__(self) -> None:
        self._loop: ConsumerLoop | None = None
        self._lock = threading.Lock()

    def process(self, input: Any, context: Any) -> None:  # noqa: A002  (Pulsar's own name)
        """Start the consumer loop; the broker delivers the message again to its consumer."""
        with self._lock:
            if self._loop is None or not self._loop.is_alive():
                self._loop = _consumer_loop(context)
                self._loop.start()


def _consumer_loop(context: Any) -> ConsumerLoop:
    settings = FunctionSettings.from_config(context.get_user_config_map() or {})
    token = TokenSource(_token_reader(settings, context))
    client_arguments = client_settings(sys.argv)
    if client_arguments is not None:
        # The worker's own setting is off by default, and the token must not go to another host.
        client_arguments["tls_validate_hostname"] = settings.tls_validate_hostname
    client = context.pulsar_client
    if settings.token_file is not None:
        if client_arguments is None:
            raise ConfigError(
                "the worker does not pass the cluster's address: no --pulsar_serviceurl"
            )
        client_arguments["authentication"] = token.for_client()
        client = pulsar.Client(**client_arguments)
    name = f"{context.get_function_tenant()}/{context.get_function_namespace()}"
    name = f"delaylevel-function@{name}/{context.get_function_name()}#{context.get_instance_id()}"
    logging.getLogger("delaylevel").setLevel(logging.INFO)
    admin = Admin(
        settings.admin_url,
        token=token,
        tls_trust_certs_file=settings.tls_trust_certs_file
        or argument(sys.argv, "tls_trust_cert_path"),
        tls_allow_insecure=settings.tls_allow_insecure,
        tls_validate_hostname=settings.tls_validate_hostname,
        for_service=True,
    )

    def report(found: RelayReport, relay: Relay) -> None:
        for metric, value in metrics_of(found, relay.in_flight).items():
            context.record_metric(metric, value)

    target_client = None
    if client_arguments is not None:
        target_client = partial(pulsar.Client, **client_arguments)
    replaced = context.consumers.values()
    return ConsumerLoop(client, admin, settings, name, report, target_client, replaced)


def _token_reader(settings: FunctionSettings, context: Any) -> Callable[[], str | None]:
    """Return a function that reads the Function's own token, or else the worker's."""
    if settings.token_file is not None:
        return partial(worker_token_file, settings.token_file)
    secret = context.get_secret(TOKEN_SECRET)
    return partial(instance_token, sys.argv) if not secret else lambda: str(secret)


def metrics_of(report: RelayReport, in_flight: int) -> dict[str, float]:
    """Return the user metrics of about one second."""
    # The worker keeps the sum and the number of a metric's values. The sum of a metric that ends in
    # `_total` is a count; a metric that ends in `_max` has one value for each second with events.
    if not (report.total or report.given_back or report.duplicates):
        return {}
    found = {
        **{f"{outcome}_total": count for outcome, count in report.counts().items()},
        "given_back_total": report.given_back.total(),
        "duplicates_total": report.duplicates,
        "lag_seconds_total": report.lag_total_ms / 1000,
        "lag_seconds_max": report.lag_max_ms / 1000,
        "lateness_seconds_max": max(0, report.latest_ms) / 1000,
        "in_flight": in_flight,
    }
    return {f"delaylevel_function_{name}": value for name, value in found.items()}
