"""The Function as a Pulsar functions worker runs it: ``delaylevel.functions.mover.LevelMover``."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pulsar
from pulsar import Function

from delaylevel.cluster.admin import Admin
from delaylevel.cluster.token import TokenSource
from delaylevel.errors import ConfigError

from .consumer_loop import ConsumerLoop
from .instance import argument, client_settings, instance_token, worker_token_file
from .relay import Relay, RelayReport
from .settings import TOKEN_SECRET, FunctionSettings

log = logging.getLogger(__name__)

CLASS_NAME = f"{__name__}.LevelMover"


class LevelMover(Function):
    """Moves the messages of one level topic.

    Needs the guarantee MANUAL. The first message that the worker hands over says where the
    instance's client and configuration are; from then on :class:`ConsumerLoop` does the work.

    ``context.pulsar_client`` and ``context.consumers`` are not part of Pulsar's documented
    interface. They are as they are here in 4.0.8, and the integration tests hold on to them.
    """

    def __init__(self) -> None:
        self._engine: ConsumerLoop | None = None
        self._lock = threading.Lock()

    def process(self, input: Any, context: Any) -> None:  # noqa: A002  (Pulsar's own name)
        """Start the engine; a message that comes this way is delivered to it anew.

        Args:
            input: is not used: the engine reads what the message really holds.
            context: the worker's.
        """
        with self._lock:
            if self._engine is None or not self._engine.alive:
                self._engine = _engine(context)
                self._engine.start(replaces=context.consumers.values())


def _engine(context: Any) -> ConsumerLoop:
    settings = FunctionSettings.from_config(context.get_user_config_map() or {})
    token = TokenSource(_token_reader(settings, context))
    like_it = client_settings(sys.argv)
    client = context.pulsar_client
    if settings.token_file is not None:
        if like_it is None:
            raise ConfigError(
                "the worker does not say where the cluster is: no --pulsar_serviceurl"
            )
        like_it["authentication"] = token.for_client()
        client = pulsar.Client(**like_it)
    name = f"{context.get_function_tenant()}/{context.get_function_namespace()}"
    name = f"delaylevel-function@{name}/{context.get_function_name()}#{context.get_instance_id()}"
    if settings.log_topic:
        _log_to(client, settings.log_topic, context.get_instance_id())
    admin = Admin(
        settings.admin_url,
        token=token,
        tls_trust_certs_file=settings.tls_trust_certs_file
        or argument(sys.argv, "tls_trust_cert_path"),
        tls_allow_insecure=settings.tls_allow_insecure,
    )

    def report(found: RelayReport, stream: Relay) -> None:
        for metric, value in metrics_of(found, stream.in_flight).items():
            context.record_metric(metric, value)

    target_client = partial(pulsar.Client, **like_it) if like_it is not None else None
    return ConsumerLoop(client, admin, settings, name, report, target_client)


def _token_reader(settings: FunctionSettings, context: Any) -> Callable[[], str | None]:
    """Return what reads the token: the Function's own, or else the one that the worker gives it."""
    if settings.token_file is not None:
        return partial(worker_token_file, settings.token_file)
    secret = context.get_secret(TOKEN_SECRET)
    return partial(instance_token, sys.argv) if not secret else lambda: str(secret)


def metrics_of(report: RelayReport, in_flight: int) -> dict[str, float]:
    """Return the user metrics of about one second.

    The worker keeps the sum and the number of the values of a metric: the sums of those that end in
    ``_total`` are counts; ``_max`` has one value for each second in which there was something to
    report.
    """
    found: dict[str, float] = {}
    if report.total or report.given_back or report.duplicates:
        found = {
            "window_total": report.window,
            "due_total": report.due,
            "parked_total": report.parked.total(),
            "held_total": report.held.total(),
            "dead_total": report.dead.total(),
            "dropped_total": report.dropped.total(),
            "given_back_total": report.given_back.total(),
            "duplicates_total": report.duplicates,
            "lag_seconds_total": report.lag_total_ms / 1000,
            "lag_seconds_max": report.lag_max_ms / 1000,
            "lateness_seconds_max": max(0, report.latest_ms) / 1000,
            "in_flight": in_flight,
        }
    return {f"delaylevel_function_{name}": value for name, value in found.items()}


class _TopicHandler(logging.Handler):
    """Sends log lines to a topic; what cannot be sent is in the worker's file all the same."""

    def __init__(self, producer: Any, instance: str) -> None:
        super().__init__(logging.INFO)
        self._producer = producer
        self.setFormatter(
            logging.Formatter(f"%(asctime)s [{instance}] %(levelname)s %(name)s: %(message)s")
        )

    def emit(self, record: logging.LogRecord) -> None:
        """Send a line."""
        try:
            self._producer.send_async(self.format(record).encode(), None)
        except Exception:
            self.handleError(record)


def _log_to(client: Any, topic: str, instance: str) -> None:
    ours = logging.getLogger("delaylevel")
    ours.setLevel(logging.INFO)
    for handler in ours.handlers[:]:
        ours.removeHandler(handler)
    try:
        producer = client.create_producer(topic, max_pending_messages=1000)
    except Exception as error:  # moving matters more than its log
        log.warning("no log topic: %s", error)
        return
    ours.addHandler(_TopicHandler(producer, instance))
