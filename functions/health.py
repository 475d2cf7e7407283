"""Status of a deployed Function: its instances, its level topic, and problems with remedies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from delaylevel import __version__
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import AdminError
from delaylevel.model.formatting import shell
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.topics import status as levelstatus
from delaylevel.topics.status import LevelTopicStatus, topic_problems

from .deployment import function_name, not_deployed, source_topics
from .worker import FunctionsWorker


@dataclass(frozen=True)
class InstanceStatus:
    """One instance of the Function.

    Attributes:
        number: number of the instance, from 0.
        running: True if its process answers the worker.
        restarts: number of times that the worker has restarted it.
        error: error text of the worker; empty for none.
        worker: id of the worker that runs it.
        exceptions: the latest exceptions, a line each.
    """

    number: int
    running: bool
    restarts: int = 0
    error: str = ""
    worker: str = ""
    exceptions: tuple[str, ...] = ()


@dataclass(frozen=True)
class FunctionStatus:
    """A deployed Function at one moment.

    Attributes:
        instances: the instances by number.
        level: status of its level topic.
        problems: problems with their remedies, a line each.
        misconfigured: what another deployment would mend, without it; also in ``problems``.
    """

    instances: tuple[InstanceStatus, ...]
    level: LevelTopicStatus
    problems: tuple[str, ...]
    misconfigured: tuple[str, ...] = ()

    @property
    def running(self) -> int:
        """Number of running instances."""
        return sum(instance.running for instance in self.instances)


def status(
    connection: Connection, admin: TopicAdmin, description: LevelTopicDescription, now_ms: int
) -> FunctionStatus:
    """Return the status of a Function and its level topic; nothing is acknowledged or moved.

    Args:
        now_ms: present time, ms since the epoch.

    Raises:
        LevelTopicError: the Function is not deployed.
    """
    function = function_name(description)
    with FunctionsWorker(connection) as worker:
        config = worker.config(function)
        if config is None:
            raise not_deployed(function)
        parallelism = int(config.get("parallelism", 1))
        try:
            answer, error_text = worker.status(function), ""
        except AdminError as error:  # no instance is alive, or not yet
            answer, error_text = {}, error.reason
    instances = instances_of(answer, parallelism, error_text)
    level = levelstatus.status(admin, description, now_ms)
    problems = tuple(problems_of(config, instances, level))
    return FunctionStatus(instances, level, problems, tuple(_misconfigured(config, description)))


def instances_of(
    status: Mapping[str, Any], parallelism: int, error_text: str = ""
) -> tuple[InstanceStatus, ...]:
    """Return the instances in the worker's answer.

    Args:
        status: answer to ``…/status``; empty if that failed.
        error_text: error of each instance that is not in the status.
    """
    found = {}
    for item in status.get("instances", ()):
        number, at = int(item["instanceId"]), item.get("status") or {}
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
        )
    return tuple(
        found.get(number, InstanceStatus(number, running=False, error=error_text))
        for number in range(max(parallelism, len(found)))
    )


def problems_of(
    config: Mapping[str, Any], instances: tuple[InstanceStatus, ...], level: LevelTopicStatus
) -> list[str]:
    """Return the problems with their remedies, the worst first."""
    topic = level.description.topic
    found = []
    if down := [instance for instance in instances if not instance.running]:
        found.append(_why_down(down, function_name(level.description)))
    for instance in instances:
        for line in instance.exceptions[:3]:
            found.append(f"instance {instance.number} failed: {line.splitlines()[-1]}")
    found += level.problems
    found += (
        f"{line}: run `delaylevel mover deploy {shell(topic)}` again"
        for line in _misconfigured(config, level.description)
    )
    version = (config.get("userConfig") or {}).get("version")
    if version != __version__:
        found.append(
            f"it runs delaylevel {version or 'of an unknown version'}, and this is {__version__}: "
            f"update it with `delaylevel mover deploy {shell(topic)}`"
        )
    if level.late and not down:
        found.append(
            "messages arrive late: the instances do not keep up (deploy with more --parallelism), "
            "a target is slow, or they cannot reach the admin interface (--worker-admin-url). "
            "Their log, a file on the worker, tells which"
        )
    found += (f"{one.problem}. {one.remedy.removesuffix('.')}" for one in topic_problems(level))
    return found


def _misconfigured(config: Mapping[str, Any], description: LevelTopicDescription) -> Iterator[str]:
    missing = set(source_topics(description)) - set(config.get("inputSpecs") or ())
    if missing:
        yield f"it does not read {', '.join(sorted(missing))}"
    if config.get("cleanupSubscription", True):
        yield "its cleanupSubscription is true: deleting it would delete the parked messages"


def _why_down(down: list[InstanceStatus], function: str) -> str:
    numbers = ", ".join(str(instance.number) for instance in down)
    which = f"instance {numbers} is down" if len(down) == 1 else f"instances {numbers} are down"
    worst = max(down, key=lambda instance: instance.restarts)
    return (
        f"{which} ({worst.error or 'no reason given'}): it may be just starting. If it stays down, "
        f"run `pulsar-admin functions restart --fqfn {shell(function)}`, as always after the "
        "restart of a standalone broker. If it ends again and again, the worker's Python lacks "
        "`delaylevel[functions]` (`pip install 'pulsar-client[functions]>=3.13,<3.14'`), or the "
        "archive's packages do not fit it (deploy with a Python like it, on the same kind of "
        "machine). Only the worker's own output has the traceback"
    )
