"""The program of a Function's instance: ``delaylevel.functions.mover.LevelMover``.

The worker passes messages to a Python Function one by one, through a queue of one between two
threads. That costs twice as much as all the rest. So the instance opens its own consumer on the
same Shared subscription, and then closes the worker's consumers.

The worker also passes a ready client, but neither the token nor the addresses in it. Its program
for Python instances gets them as arguments.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pulsar
from pulsar import Function

from delaylevel.cluster.client_parts.cores import consumer_core
from delaylevel.cluster.connection.settings import TokenSource, read_token_file
from delaylevel.cluster.failures import close_quietly, error_name
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.cluster.reader import KEEP_ENCRYPTED
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.targets.pool import TargetClients
from delaylevel.errors import DelayLevelError
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription
from delaylevel.topics import registry as topics

from .deployment import FunctionSettings, check_movable, source_topics
from .relay import Relay, RelayReport

log = logging.getLogger(__name__)

# Messages to fetch ahead for each partition.
_RECEIVER_QUEUE = 500
_POLL_EVERY = 64
_IDLE_MS = 500
_BUSY_MS = 2
_NO_ROOM_S = 0.002
_RETRY_S = 5.0
_REPORT_S = 1.0
_REDELIVERY_MS = 10_000
_QUEUES_TOTAL = 20_000


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


def client_settings(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of the worker's own client."""
    settings: dict[str, Any] = {
        "service_url": argument(arguments, "pulsar_serviceurl"),
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
    """Mover of one level topic."""

    # The first message that the worker passes comes with the instance's client and configuration.
    # ``context.pulsar_client`` and ``context.consumers`` are not part of Pulsar's documented
    # interface. They exist in 4.0.8, and the integration tests verify that.

    def __init__(self) -> None:
        self._loop: ConsumerLoop | None = None
        self._lock = threading.Lock()

    def process(self, input: Any, context: Any) -> None:  # noqa: A002  (Pulsar's own name)
        """Start the consumer loop; the broker delivers the message again to its consumer."""
        with self._lock:
            if self._loop is None or not self._loop.is_alive():
                self._loop = ConsumerLoop(context)
                self._loop.start()


class ConsumerLoop(threading.Thread):
    """Thread that moves the messages of one level topic until its client is closed."""

    def __init__(self, context: Any) -> None:
        super().__init__(name="delaylevel-consumer-loop", daemon=True)
        logging.getLogger("delaylevel").setLevel(logging.INFO)
        self._instance = context  # Python 3.14 has its own `_context` in a thread
        settings = FunctionSettings.from_config(context.get_user_config_map() or {})
        self._level_topic = settings.level_topic
        self._warning = RepeatedWarning(log, f"level topic {settings.level_topic}")
        token = TokenSource(
            partial(instance_token, sys.argv)
            if settings.token_file is None
            else partial(worker_token_file, settings.token_file)
        )
        client_arguments = client_settings(sys.argv)
        # The worker's own setting is off by default, and the token must not go to another host.
        client_arguments["tls_validate_hostname"] = settings.tls_validate_hostname
        if settings.token_file is not None:
            client_arguments["authentication"] = token.for_client()
        self._target_client = partial(pulsar.Client, **client_arguments)
        self._client: Any = context.pulsar_client
        if settings.token_file is not None:
            self._client = self._target_client()
        self._admin = Admin(
            settings.admin_url,
            token=token,
            tls_trust_certs_file=settings.tls_trust_certs_file
            or argument(sys.argv, "tls_trust_cert_path"),
            tls_allow_insecure=settings.tls_allow_insecure,
            tls_validate_hostname=settings.tls_validate_hostname,
            for_service=True,
        )
        # They are closed as soon as the loop has its own; the broker then delivers their
        # unacknowledged messages to that one.
        self._replaces = list(context.consumers.values())

    def run(self) -> None:
        """Move messages; begin again after a failure."""
        while True:
            try:
                self._move()
            except pulsar.AlreadyClosed:
                log.info("the client is closed: this instance stops")
                return
            except (DelayLevelError, pulsar.PulsarException) as error:
                self._warning.failed(f"not moving ({error_name(error)}): {error}")
            except Exception:
                log.exception("not moving: this should not happen")
            time.sleep(_RETRY_S)

    def _describe(self) -> LevelTopicDescription:
        description = topics.describe(self._admin, self._level_topic)
        check_movable(description)
        return description

    def _move(self) -> None:
        description = self._describe()
        context = self._instance
        name = f"{context.get_function_tenant()}/{context.get_function_namespace()}"
        name += f"/{context.get_function_name()}#{context.get_instance_id()}"
        consumer = self._client.subscribe(
            source_topics(description),
            SUBSCRIPTION,
            consumer_type=pulsar.ConsumerType.Shared,
            initial_position=pulsar.InitialPosition.Earliest,
            receiver_queue_size=_RECEIVER_QUEUE,
            max_total_receiver_queue_size_across_partitions=_QUEUES_TOTAL,
            negative_ack_redelivery_delay_ms=_REDELIVERY_MS,
            consumer_name=f"delaylevel-function@{name}",
            **KEEP_ENCRYPTED,
        )
        targets = TargetClients(self._client, self._target_client)
        relay = Relay(
            self._client,
            self._admin,
            description,
            consumer,
            describe=self._describe,
            target_client=targets.of,
        )
        try:
            while self._replaces:
                close_quietly(self._replaces.pop(), "consumer")
            log.info("moving %s (%s)", description.topic, description.levels)
            self._receive(consumer, relay)
        finally:
            relay.carrier.close()
            close_quietly(consumer, "consumer")
            targets.close()

    def _receive(self, consumer: Any, relay: Relay) -> None:
        received = 0
        receive = consumer_core(consumer).receive
        report_at_s = relay.now_s() + _REPORT_S
        while True:
            if relay.has_room:
                try:
                    message = receive(_BUSY_MS if relay.unacknowledged else _IDLE_MS)
                except pulsar.Timeout:
                    received = _POLL_EVERY
                else:
                    relay.offer(message)
                    received += 1
            else:
                time.sleep(_NO_ROOM_S)
                received = _POLL_EVERY
            if received >= _POLL_EVERY:
                received = 0
                relay.poll()
                if relay.now_s() >= report_at_s:
                    report_at_s = relay.now_s() + _REPORT_S
                    self._warning.over()
                    report = metrics_of(relay.take_report(), relay.in_flight)
                    for metric, value in report.items():
                        self._instance.record_metric(metric, value)


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
