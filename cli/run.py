"""``delaylevel run``: mover and dispatcher in one service; how a service starts and tells of it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.topic_name import TopicName

from . import options
from .options import LOG_FORMAT, Settings, examples, pass_settings

if TYPE_CHECKING:
    from delaylevel.run import LocalService

_LOOK_EVERY_S = 0.2
# Time between two lines on the progress.
_TOTALS_EVERY_S = 60.0


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
            from delaylevel.inspection import Inspector
            from delaylevel.producer.client import DelayLevelClient
            from delaylevel.run.actions import ServiceActions

            actions = ServiceActions(
                admin,
                lambda: service.descriptions,
                partial(Inspector.connect, connection, client_options={"logger": logger}),
                partial(DelayLevelClient.from_connection, connection, logger=logger),
            )
            served = prometheus.serve(reporters_of(service), metrics_port, metrics_address, actions)
            note(http_note(metrics_address, stack.enter_context(served)))
        start = starting(
            f"{'mover and dispatcher' if moves else 'dispatcher'} for "
            f"{', '.join(topics) or f'the level topics of {namespace}'}",
            lambda: next((one.text for one in service.start_checks() if not one.ok), ""),
            lambda: [
                *serving_lines(
                    service.descriptions,
                    service.roster.refused,
                    "It is tried again every few seconds.",
                ),
                "Ctrl-C ends it.",
            ],
        )
        with start as ready:
            progress = ServiceProgress(service, ready)
            service.run(progress.show)
        progress.end()


def http_note(address: str, port: int) -> str:
    """Return a line with the address of an HTTP service."""
    return f"Status page at http://{address}:{port}/, metrics at /metrics."


def serving_lines(
    descriptions: Iterable[LevelTopicDescription], refused: Mapping[str, str], then: str
) -> list[str]:
    """Return a line for each level topic that is served, and for each that is not."""
    lines = []
    for item in descriptions:
        first, *more = item.targets or ("",)
        target = TopicName.parse(first).short + (f" and {len(more)} more" if more else "")
        lines.append(f"{item.name.short} for {target}")
    return lines + [f"NOT SERVED: {name}: {reason}. {then}" for name, reason in refused.items()]


@contextlib.contextmanager
def starting(
    parts: str, waiting: Callable[[], str], serving: Callable[[], Sequence[str]]
) -> Iterator[threading.Event]:
    """Print the reason for waiting now and then, and lines about what is served; set an event then.

    Another thread asks for the reason, which is empty once the service is ready.
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


class ServiceProgress:
    """The progress of a service: who moves, if that changes, and the totals now and then."""

    def __init__(self, service: LocalService, ready: threading.Event) -> None:
        self._service = service
        self._ready = ready
        self._holders: dict[str, str] = {}  # of movers on standby
        self._told = ""
        self._told_s = time.monotonic()

    def show(self) -> None:
        """Print what is new; called once a second."""
        if not self._ready.is_set():
            return
        for topic, stats in self._service.movers.stats().items():
            if stats.state not in ("standby", "moving"):
                continue  # the log has each failure
            holder = (stats.holder or "another mover") if stats.state == "standby" else ""
            if holder != self._holders.get(topic, ""):
                moves = f"on standby, {holder} moves" if holder else "moving"
                note(f"{topic}: {moves} its messages")
            self._holders[topic] = holder
        if time.monotonic() - self._told_s >= _TOTALS_EVERY_S:
            self._told_s = time.monotonic()
            if self._totals() != self._told:
                self.end()

    def end(self) -> None:
        """Print the totals."""
        self._told = self._totals()
        note(self._told)

    def _totals(self) -> str:
        moved = sum(sum(stats.counts.values()) for stats in self._service.movers.stats().values())
        mover = f"{moved:,} messages moved, " if self._service.moves else ""
        dispatcher = self._service.dispatcher
        released = 0 if dispatcher is None else dispatcher.released().total()
        return f"{mover}{released:,} {'' if mover else 'messages '}released."
