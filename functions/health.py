"""How a deployed Function stands, and in plain words what is wrong and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from delaylevel import __version__
from delaylevel.cluster.connection import Connection
from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import AdminError
from delaylevel.model.formatting import format_duration
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.topics import status as levelstatus
from delaylevel.topics.status import LevelTopicStatus

from .consumer_loop import source_topics
from .deployment import not_deployed
from .worker import FunctionsWorker

_METRIC = "user_metric_delaylevel_function_"
_COUNTS = {
    "forwarded": ("window", "due"),
    "parked_again": ("parked",),
    "held": ("held",),
    "dead_lettered": ("dead",),
    "given_back": ("given_back",),
}
_CONSUMER = "delaylevel-function@"


@dataclass(frozen=True)
class InstanceStatus:
    """One instance of the Function.

    Attributes:
        number: which, from 0.
        running: whether its process answers the worker.
        restarts: how often the worker has started it anew.
        error: what the worker says of it; empty for nothing.
        worker: the worker that runs it.
        exceptions: the latest exceptions, a line each.
        counts: what it has done since it was started, by name: ``forwarded``, ``parked_again``,
            ``held``, ``dead_lettered``, ``given_back``.
        late_ms: the mean lateness at hand-off; None where nothing was handed off.
    """

    number: int
    running: bool
    restarts: int = 0
    error: str = ""
    worker: str = ""
    exceptions: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    late_ms: int | None = None


@dataclass(frozen=True)
class FunctionStatus:
    """A deployed Function at one moment.

    Attributes:
        function: ``tenant/namespace/name``.
        config: as the worker has it.
        instances: one each, by number.
        level: how its level topic stands.
        problems: what is wrong and the remedy, a line each.
    """

    function: str
    config: Mapping[str, Any]
    instances: tuple[InstanceStatus, ...]
    level: LevelTopicStatus
    problems: tuple[str, ...]

    @property
    def running(self) -> int:
        """How many instances run."""
        return sum(instance.running for instance in self.instances)


def status(
    connection: Connection,
    admin: TopicAdmin,
    description: LevelTopicDescription,
    function: str,
    now_ms: int,
) -> FunctionStatus:
    """Look at a Function and its level topic; nothing is acknowledged or moved.

    Args:
        connection: the cluster.
        admin: its admin interface.
        description: the level topic.
        function: ``tenant/namespace/name``.
        now_ms: the present, ms since the epoch.

    Raises:
        LevelTopicError: it is not deployed.
    """
    with FunctionsWorker(connection) as worker:
        config = worker.config(function)
        if config is None:
            raise not_deployed(function)
        parallelism = int(config.get("parallelism", 1))
        try:
            said, trouble = worker.status(function), ""
        except AdminError as error:  # no instance is alive, or not yet
            said, trouble = {}, error.reason
        stats = worker.stats(function)
    instances = instances_of(said, stats, parallelism, trouble)
    level = levelstatus.status(admin, description, now_ms)
    return FunctionStatus(
        function, config, instances, level, tuple(problems_of(config, instances, level))
    )


def instances_of(
    status: Mapping[str, Any], stats: Mapping[str, Any], parallelism: int, trouble: str = ""
) -> tuple[InstanceStatus, ...]:
    """Read the worker's answers.

    Args:
        status: of ``…/status``; empty where it failed.
        stats: of ``…/stats``; may be empty.
        parallelism: how many instances there are to be.
        trouble: why there is no status.
    """
    metrics = {
        int(item["instanceId"]): (item.get("metrics") or {}).get("userMetrics") or {}
        for item in stats.get("instances", ())
    }
    found = {}
    for item in status.get("instances", ()):
        number, at = int(item["instanceId"]), item.get("status") or {}
        mine = metrics.get(number, {})
        counts = {
            name: round(sum(mine.get(f"{_METRIC}{metric}_total_sum", 0) for metric in summed))
            for name, summed in _COUNTS.items()
        }
        late = mine.get(f"{_METRIC}lag_seconds_total_sum")
        exceptions = [
            str(entry.get("exceptionString", "")).strip()
            for kind in ("latestUserExceptions", "latestSystemExceptions")
            for entry in at.get(kind) or ()
        ]
        found[number] = InstanceStatus(
            number=number,
            running=bool(at.get("running")),
            restarts=int(at.get("numRestarts", 0)),
            error=str(at.get("error") or ""),
            worker=str(at.get("workerId") or ""),
            exceptions=tuple(dict.fromkeys(line for line in exceptions if line)),
            counts=counts,
            late_ms=round(late * 1000 / counts["forwarded"])
            if late and counts["forwarded"]
            else None,
        )
    return tuple(
        found.get(number, InstanceStatus(number, running=False, error=trouble))
        for number in range(max(parallelism, len(found)))
    )


def problems_of(
    config: Mapping[str, Any], instances: tuple[InstanceStatus, ...], level: LevelTopicStatus
) -> list[str]:
    """Return what is wrong, in plain words and with the remedy, the worst first.

    Args:
        config: the Function's, as the worker has it.
        instances: of :func:`instances_of`.
        level: its level topic.
    """
    topic = level.description.topic
    found = []
    down = [instance for instance in instances if not instance.running]
    if down:
        found.append(_why_down(down, topic))
    for instance in instances:
        for line in instance.exceptions[:3]:
            found.append(f"instance {instance.number} failed: {line.splitlines()[-1]}")
    found += level.problems
    missing = set(source_topics(level.description)) - set(config.get("inputSpecs") or ())
    if missing:
        found.append(
            f"it does not read {', '.join(sorted(missing))}: run `delaylevel function deploy "
            f"{topic}` again"
        )
    if config.get("cleanupSubscription", True):
        found.append(
            "cleanupSubscription is true: deleting the function would delete what is parked; run "
            f"`delaylevel function deploy {topic}`, which sets it to false"
        )
    version = (config.get("userConfig") or {}).get("version")
    if version != __version__:
        found.append(
            f"it runs delaylevel {version or 'of an unknown version'}, and this is {__version__}: "
            f"`delaylevel function deploy {topic}` brings it up to date"
        )
    lead_ms = level.description.levels.smallest_lead_ms
    if level.late and not down:
        found.append(_why_behind(level, topic, lead_ms))
    if level.held_entries:
        found.append(
            f"{level.held_entries:,} messages are held because their target could not be written; "
            "they follow when it can be: the log says which (`delaylevel function logs "
            f"{topic}`)"
        )
    if level.dead_letter_entries:
        found.append(
            f"{level.dead_letter_entries:,} messages could not be understood and are in "
            f"{level.description.dead_letter_topic}; each says why in delaylevel.reason"
        )
    return found


def _why_down(down: list[InstanceStatus], topic: str) -> str:
    numbers = ", ".join(str(instance.number) for instance in down)
    which = f"instance {numbers} is down" if len(down) == 1 else f"instances {numbers} are down"
    again = f"`delaylevel function restart {topic}`"
    worst = max(down, key=lambda instance: instance.restarts)
    if worst.restarts > 1:
        return (
            f"{which}; the worker has started it {worst.restarts} times in vain: most likely "
            "modules are missing. The worker's python3 needs `pip install "
            "'pulsar-client[functions]'` and pip on its PATH, and the archive's wheels must fit it "
            "(deploy with --worker-python and --worker-platform where it is another than here). "
            "Only the worker's own output has the traceback"
        )
    if worst.error:
        return (
            f"{which} ({worst.error}): it is just starting, or its process ended at once. If it "
            f"stays so, {again}; after the restart of a standalone broker that is always needed"
        )
    return f"{which}, without a reason given: {again}"


def _why_behind(level: LevelTopicStatus, topic: str, lead_ms: int) -> str:
    late = (
        f"hand-offs are {format_duration(level.behind_ms)} behind, more than the lead of "
        f"{format_duration(lead_ms)}: messages arrive late"
    )
    readers = [name for row in level.mover_rows for name in row.consumers]
    if readers and all(name.startswith(_CONSUMER) for name in readers):
        return (
            f"{late}. The instances work and do not keep up: raise --parallelism with "
            "`delaylevel function deploy`, or see whether a target is slow "
            f"(`delaylevel function logs {topic}`)"
        )
    return (
        f"{late}, and the instances do not take messages yet: look at `delaylevel function logs "
        f"{topic}`; an instance that cannot reach the admin interface (--worker-admin-url), or may "
        "not use it, says so there"
    )
