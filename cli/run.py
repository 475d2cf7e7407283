"""``delaylevel run``: mover and dispatcher in one service, without Spark."""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import platformdirs

from delaylevel.cli.views.live import Starting, first_unmet
from delaylevel.cluster import logs
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.threads import stop_on_signals
from delaylevel.errors import ConfigError
from delaylevel.model.topic_name import parse_namespace

from . import options
from .command import LOG_FORMAT, examples, pass_connection, settings_of
from .service import refused_lines, serve_metrics, serving_lines

if TYPE_CHECKING:
    from delaylevel.dispatcher import DispatchSettings
    from delaylevel.run import LocalService


@examples(
    "delaylevel run orders",
    "delaylevel run orders invoices --metrics-port 9109",
    "delaylevel run --namespace public/default",
)
@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option(
    "--namespace",
    metavar="TENANT/NAMESPACE",
    help=options.NAMESPACE,
)
@options.trigger
@options.dispatching
@options.metrics
@pass_connection
def run(
    connection: Connection,
    topics: tuple[str, ...],
    namespace: str | None,
    trigger_ms: int | None,
    metrics_port: int | None,
    metrics_address: str,
    processes: int,
    **fields: Any,
) -> None:
    """Move and release the messages of level topics.

    This is the mover and the dispatcher in one service, without Spark and Java. TOPIC is a business
    topic or a level topic. --namespace serves all level topics, also those created later.

    Start the command twice, on one machine or two: the second process is on standby for the mover,
    takes half of the dispatcher's work, and takes over from the first one.

    SIGTERM or Ctrl-C ends it when the messages in flight are published.
    """
    if bool(topics) == (namespace is not None):
        raise ConfigError("give topics, or --namespace to serve all level topics of a namespace")
    if namespace is not None:
        parse_namespace(namespace)
    settings, metrics = dispatch_settings(**fields), (metrics_port, metrics_address)
    serve(
        connection,
        topics,
        settings,
        metrics,
        processes,
        namespace=namespace,
        trigger_ms=trigger_ms,
    )


def serve(
    connection: Connection,
    topics: tuple[str, ...],
    settings: DispatchSettings,
    metrics: tuple[int | None, str],
    count: int,
    *,
    namespace: str | None = None,
    moves: bool = True,
    trigger_ms: int | None = None,
) -> None:
    """Run the mover and the dispatcher of level topics until they are stopped.

    Args:
        metrics: port and address of the HTTP service; None for no port, and no service.
        count: number of processes; 0 for one for each usable core.
        moves: False to run the dispatcher alone.
    """
    from delaylevel.cli.views.service import ServiceProgress
    from delaylevel.cluster.rest.admin import Admin
    from delaylevel.dispatcher.processes import Processes, tune_interpreter
    from delaylevel.run.service import LocalService, further_process

    tune_interpreter()
    with contextlib.ExitStack() as stack:
        # Attempts on what others own fail all the time, and the client would log each of them
        # with -v. The service logs the events that matter.
        verbosity = settings_of(click.get_current_context()).verbosity
        logger = logs.for_verbosity(verbosity if verbosity > 1 else 0)
        open_client = partial(connection.open_service_client, logger=logger)
        admin = stack.enter_context(Admin.from_connection(connection, for_service=True))
        begin_log = partial(logging.basicConfig, format=LOG_FORMAT, level=logging.getLogger().level)
        opener = partial(further_process, connection, topics, settings, namespace, begin_log)
        service = LocalService(
            open_client,
            admin,
            topics,
            settings,
            namespace=namespace,
            trigger_ms=trigger_ms,
            moves=moves,
            processes=Processes(opener, count),
        )
        stack.callback(service.close)
        stop_on_signals(service.stop)
        port, address = metrics
        if port is not None:
            from delaylevel.run.actions import ServiceActions
            from delaylevel.run.service import ServiceCollector

            actions = ServiceActions.connect(
                connection, admin, lambda: service.descriptions, logger
            )
            serve_metrics(stack, ServiceCollector(service), port, address, actions)
        served = ", ".join(topics) or f"the level topics of {namespace}"
        start = Starting(
            f"{'mover and dispatcher' if moves else 'dispatcher'} for {served}",
            lambda: first_unmet(service.start_checks()),
            lambda: [*_serving(service, namespace), "Ctrl-C ends it."],
        )
        progress = ServiceProgress(service, start)
        with start:
            service.run(progress.show)
        progress.end()


def dispatch_settings(
    memory: int, remember: int, spill_dir: Path | None, **fields: Any
) -> DispatchSettings:
    """Return the settings of a dispatcher from the values of `options.dispatching`."""
    from delaylevel.dispatcher import DispatchSettings

    return DispatchSettings(
        directory=spill_dir or Path(platformdirs.user_state_dir("delaylevel")) / "dispatch",
        memory_bytes=memory << 20,
        remember=remember + remember % 2,
        **fields,
    )


def _serving(service: LocalService, namespace: str | None) -> list[str]:
    """Return lines about the level topics that this process serves."""
    movers = {topic: stats for each in service.movers for topic, stats in each.stats().items()}
    groups = [group for each in service.dispatchers for group in each.groups()]
    lines = serving_lines(service.descriptions, movers, groups)
    lines += refused_lines(service.refused)
    if namespace is not None:
        lines.append(f"Level topics that are created in {namespace} are served, too.")
    return lines
