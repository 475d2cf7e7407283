"""``delaylevel run``: mover and dispatcher in one service; how a service starts and tells of it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import platformdirs

from delaylevel.cli.views import output
from delaylevel.cli.views.output import note
from delaylevel.cluster import logs
from delaylevel.cluster.threads import END_S, stop_on_signals
from delaylevel.errors import ConfigError
from delaylevel.model.level_topic import LEVEL_SUFFIX, LevelTopicDescription
from delaylevel.model.topic_name import TopicName

from . import options
from .options import LOG_FORMAT, Settings, examples, pass_settings

if TYPE_CHECKING:
    from delaylevel.dispatcher.assignment import ServedGroup
    from delaylevel.dispatcher.stats import OwnerStats
    from delaylevel.mover.service import MoverStats
    from delaylevel.run import LocalService
    from delaylevel.web.reports import ProbeCheck

_LOOK_EVERY_S = 0.2
# Time between two lines on the progress: on a terminal, and in a log.
_TERMINAL_EVERY_S, _LOG_EVERY_S = 10.0, 60.0


@examples(
    "delaylevel run orders",
    "delaylevel run orders invoices --metrics-port 9109",
    "delaylevel run --namespace public/default",
)
@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@options.namespace_option()
@options.trigger
@options.dispatching
@options.metrics
@pass_settings
def run(settings: Settings, topics: tuple[str, ...], namespace: str | None, **fields: Any) -> None:
    """Move and release the messages of level topics.

    This is the mover and the dispatcher in one service, without Spark and Java. TOPIC is a business
    topic or a level topic. --namespace serves all level topics, also those created later.

    Start the command twice, on one machine or two: the second process is on standby for the mover,
    takes half of the dispatcher's work, and takes over from the first one.

    SIGTERM or Ctrl-C ends it when the messages in flight are published.
    """
    if bool(topics) == (namespace is not None):
        raise ConfigError("give topics, or --namespace to serve all level topics of a namespace")
    serve(settings, topics, namespace=namespace, **fields)


def serve(
    program: Settings,
    topics: tuple[str, ...],
    *,
    memory: int,
    remember: int,
    spill_dir: Path | None,
    processes: int,
    metrics_port: int | None,
    metrics_address: str,
    namespace: str | None = None,
    moves: bool = True,
    trigger_ms: int | None = None,
    **fields: Any,
) -> None:
    """Run the mover (if it moves) and the dispatcher of level topics until they are stopped."""
    from delaylevel.cluster.rest.admin import Admin
    from delaylevel.dispatcher import DispatchSettings
    from delaylevel.dispatcher.processes import Processes, tune_interpreter
    from delaylevel.run.service import LocalService, further_process, reporters_of

    connection = program.reachable()
    settings = DispatchSettings(
        directory=spill_dir or Path(platformdirs.user_state_dir("delaylevel")) / "dispatch",
        memory_bytes=memory << 20,
        remember=remember + remember % 2,  # for two generations of equal size
        **fields,
    )
    tune_interpreter()
    with contextlib.ExitStack() as stack:
        # Attempts on what others own fail all the time, and the client would log each of them
        # with -v. The service logs the events that matter.
        logger = logs.for_verbosity(program.verbosity if program.verbosity > 1 else 0)
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
            processes=Processes(opener, processes),
        )
        # In this order, the limit of time holds until everything is closed, and then no more.
        stack.callback(stop_on_signals(service.stop, END_S))
        stack.callback(service.close)
        if metrics_port is not None:
            from delaylevel import prometheus
            from delaylevel.run.actions import ServiceActions

            actions = ServiceActions.connect(
                connection, admin, lambda: service.descriptions, logger
            )
            served = prometheus.serve(reporters_of(service), metrics_port, metrics_address, actions)
            for line in addresses(metrics_address, stack.enter_context(served)):
                note(line)
        start = starting(
            f"{'mover and dispatcher' if moves else 'dispatcher'} for "
            f"{', '.join(topics) or f'the level topics of {namespace}'}",
            lambda: first_unmet(service.start_checks()),
            lambda: [*_serving(service, namespace), "Ctrl-C ends it."],
        )
        with start as ready:
            progress = ServiceProgress(service, ready)
            service.run(progress.show)
        progress.end()


def addresses(address: str, port: int) -> list[str]:
    """Return lines with the addresses of an HTTP service."""
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
    """Return a line for each level topic served; None for the statistics of a mover that moves."""
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


def _serving(service: LocalService, namespace: str | None) -> list[str]:
    """Return lines about the level topics that this process serves."""
    groups = () if service.dispatcher is None else service.dispatcher.groups()
    lines = serving_lines(service.descriptions, service.movers.stats(), groups)
    lines += [
        f"NOT SERVED: {name}: {reason}. It is tried again every few seconds."
        for name, reason in service.roster.refused.items()
    ]
    if namespace is not None:
        lines.append(f"Level topics that are created in {namespace} are served, too.")
    return lines


@contextlib.contextmanager
def starting(
    parts: str, waiting: Callable[[], str], serving: Callable[[], Sequence[str]] | None
) -> Iterator[threading.Event]:
    """Print a line, then the reason for waiting now and then, then that the service is ready.

    Args:
        waiting: called in another thread for the reason to wait; empty once the service is ready.
        serving: lines about what is served; None to print nothing when it is ready.

    Yields:
        An event that is set when that is printed.
    """
    ready, ended = threading.Event(), threading.Event()
    started_s = time.monotonic()

    def watch() -> None:
        line_s = started_s
        while reason := waiting():
            now_s = time.monotonic()
            if now_s - line_s >= output.LINE_EVERY_S:
                line_s = now_s
                note(f"Still starting after {now_s - started_s:.0f} s: {reason}.")
            if ended.wait(_LOOK_EVERY_S):
                return
        if serving is not None:
            note(f"Ready after {time.monotonic() - started_s:.1f} s.")
            for line in serving():
                note(line)
        ready.set()

    note(f"Starting {parts}.")
    # A thread, because the start of a service may wait for a broker.
    thread = threading.Thread(target=watch, name="starting", daemon=True)
    thread.start()
    try:
        yield ready
    finally:
        ended.set()
        thread.join()


def first_unmet(checks: Sequence[ProbeCheck]) -> str:
    """Return the first condition that is not met, and the number of others."""
    unmet = [check.text for check in checks if not check.ok]
    more = f" (and {len(unmet) - 1} more)" if len(unmet) > 1 else ""
    return unmet[0] + more if unmet else ""


def progress_lines(
    movers: Mapping[str, MoverStats],
    owners: Mapping[tuple[str, int], OwnerStats],
    releases: Mapping[str, int],
) -> list[str]:
    """Return a line for each level topic; it has the name of its business topic if it can."""
    # They need the dispatcher's extra.
    from delaylevel.dispatcher.stats import format_lateness, quantile_ms, total_lateness

    lines = []
    for topic in sorted({*movers, *releases, *(topic for topic, _ in owners)}):
        mine = {index: stats for (name, index), stats in owners.items() if name == topic}
        states = Counter(stats.state for stats in mine.values())
        # The usual state goes without saying, so that the line stays short.
        usual = states.pop("releasing", 0)
        shown = [str(usual)] if usual else []
        shown += [f"{count} {state}" for state, count in sorted(states.items())]
        mover, name = movers.get(topic), TopicName.parse(topic)
        if name.local.startswith("_") and name.local.endswith(LEVEL_SUFFIX):
            name = replace(name, local=name.local[1 : -len(LEVEL_SUFFIX)])
        moved = 0 if mover is None else sum(mover.counts.values())
        line = f"{name.short}: {moved:,} moved (mover {mover.state if mover else 'elsewhere'})"
        if shown:
            released = releases.get(topic, 0)
            line += f"; {released:,} released ({' + '.join(shown)} window partitions)"
        p99_ms = quantile_ms(total_lateness(mine.values()), 0.99) if mine else None
        if p99_ms is not None:
            line += f"; p99 {format_lateness(p99_ms)} late"
        lines.append(line)
    return lines


class ServiceProgress:
    """The progress of a service: now and then, the line of each level topic if it has changed."""

    def __init__(self, service: LocalService, ready: threading.Event) -> None:
        self._service = service
        self._ready = ready
        self._states: dict[str, tuple[str, str]] = {}
        self._told: list[str] = []
        # A log is kept, so it gets fewer lines.
        self._every_s = _TERMINAL_EVERY_S if sys.stderr.isatty() else _LOG_EVERY_S
        self._line_s = time.monotonic() + self._every_s

    def show(self) -> None:
        """Update the view; called once a second."""
        if not self._ready.is_set():
            return
        movers, dispatcher = self._service.movers.stats(), self._service.dispatcher
        for topic, stats in movers.items():
            state = stats.state, stats.holder
            before, _ = known = self._states.get(topic, ("starting", ""))
            self._states[topic] = state
            if state == known:
                continue
            if stats.state == "standby":
                note(f"{topic}: on standby, {stats.holder or 'another mover'} moves its messages")
            # The log has each failure, and a pass that succeeds again is nothing new.
            elif stats.state == "moving" and before != "failing":
                note(f"{topic}: moving its messages")
        now_s = time.monotonic()
        if now_s >= self._line_s:
            self._line_s = now_s + self._every_s
            owners = {} if dispatcher is None else dispatcher.stats()
            releases = {} if dispatcher is None else dispatcher.released()
            lines = progress_lines(movers, owners, releases)
            for line in lines:
                if line not in self._told:
                    note(line)
            self._told = lines

    def end(self) -> None:
        """Print the totals."""
        moved = sum(sum(stats.counts.values()) for stats in self._service.movers.stats().values())
        mover = f"{moved:,} messages moved, " if self._service.moves else ""
        dispatcher = self._service.dispatcher
        released = 0 if dispatcher is None else dispatcher.released().total()
        note(f"{mover}{released:,} {'' if mover else 'messages '}released.")
