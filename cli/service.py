"""A command that runs until it is stopped: its service, its HTTP addresses, and what it serves."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import platformdirs

from delaylevel.cli.views.live import Starting, first_unmet
from delaylevel.cli.views.output import note
from delaylevel.cluster import logs
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.threads import END_S, stop_on_signals
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.topic_name import TopicName

from .command import LOG_FORMAT, settings_of

if TYPE_CHECKING:
    from delaylevel.dispatcher import DispatchSettings
    from delaylevel.dispatcher.assignment import ServedGroup
    from delaylevel.mover.service import MoverStats
    from delaylevel.prometheus import Collector
    from delaylevel.run import LocalService
    from delaylevel.spark_sync import SparkSyncJob
    from delaylevel.web.reports import Actions


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
        # In this order, the limit of time holds until everything is closed, and then no more.
        stack.callback(stop_on_signals(service.stop, END_S))
        stack.callback(service.close)
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


def serve_metrics(
    stack: contextlib.ExitStack,
    collector: Collector,
    port: int,
    address: str,
    actions: Actions | None = None,
) -> None:
    """Serve metrics, probes and the status page until the stack is closed; print the addresses."""
    from delaylevel.prometheus import serve

    served = stack.enter_context(serve(collector, port, address, actions))
    for line in _addresses(served, address):
        note(line)


def job_addresses(job: SparkSyncJob) -> list[str]:
    """Return lines with the addresses of the HTTP service of a Spark job, if it has one."""
    if job.http_address is None:
        return []
    address, port = job.http_address
    return _addresses(port, address)


def _addresses(port: int, address: str) -> list[str]:
    from delaylevel.web.reports import TOKEN_VARIABLE, tokens
    from delaylevel.web.server import is_loopback

    status = f"Status page and live queries need {TOKEN_VARIABLE} in the environment."
    if is_loopback(address) or any(tokens(os.environ)):
        status = f"Status page at http://{address}:{port}/"
    return [f"Metrics at http://{address}:{port}/metrics", status]


def serving_lines(
    descriptions: Iterable[LevelTopicDescription],
    movers: Mapping[str, MoverStats | None],
    groups: Iterable[ServedGroup],
) -> list[str]:
    """Return a line for each level topic that a process serves.

    Args:
        movers: statistics of this process's movers, by level topic; None for a mover that has the
            lock.
    """
    groups_of = {group.description.topic: group for group in groups}
    lines = []
    for item in descriptions:
        first, *more = item.targets or ("",)
        target = TopicName.parse(first).short + (f" and {len(more)} more" if more else "")
        parts = []
        if item.topic in movers:
            stats = movers[item.topic]
            if stats is not None and stats.state == "standby":
                parts.append(f"levels on standby for {stats.holder or 'another mover'}")
            else:
                count = sum(level.partitions for level in item.levels)
                parts.append(f"levels with {count} partitions")
        group = groups_of.get(item.topic)
        if group is not None:
            held, of = len(group.stats), item.window_partitions
            share = f"window with {held} of {of} partitions"
            parts.append(share if held else "window on standby")
        lines.append(f"{item.name.short} for {target}: {'; '.join(parts)}")
    return lines


def refused_lines(
    refused: Mapping[str, str], remedy: str = "It is tried again every few seconds"
) -> list[str]:
    """Return a line for each level topic that cannot be served now."""
    return [f"NOT SERVED: {name}: {reason}. {remedy}." for name, reason in refused.items()]


def _serving(service: LocalService, namespace: str | None) -> list[str]:
    """Return lines about the level topics that this process serves."""
    movers = {topic: stats for each in service.movers for topic, stats in each.stats().items()}
    groups = [group for each in service.dispatchers for group in each.groups()]
    lines = serving_lines(service.descriptions, movers, groups)
    lines += refused_lines(service.roster.refused)
    if namespace is not None:
        lines.append(f"Level topics that are created in {namespace} are served, too.")
    return lines
