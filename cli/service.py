"""The HTTP service of a command that runs until it is stopped, and the level topics it serves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from delaylevel.cli.views.output import note
from delaylevel.cli.views.tables import local
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.topic_name import TopicName

if TYPE_CHECKING:
    from delaylevel.dispatcher.assignment import ServedGroup
    from delaylevel.mover.service import MoverStats
    from delaylevel.prometheus import Collector
    from delaylevel.spark_sync import SparkSyncJob
    from delaylevel.web.reports import Actions


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
        lines.append(f"{local(item.topic)} for {target}: {'; '.join(parts)}")
    return lines


def refused_lines(
    refused: Mapping[str, str], remedy: str = "It is tried again every few seconds"
) -> list[str]:
    """Return a line for each level topic that cannot be served now."""
    return [f"NOT SERVED: {name}: {reason}. {remedy}." for name, reason in refused.items()]
