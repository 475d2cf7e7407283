"""Connections and forwarders of a Python process of Spark, and the ranges that its tasks read.

The Pulsar client does not survive a fork, so each process creates its own on first use. A Python
worker runs one task at a time.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from pyspark.sql.datasource import InputPartition

from delaylevel.cluster import logs
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.reader import read_range
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.targets.pool import TargetClients
from delaylevel.errors import BrokerError, ConfigError, UpgradeRequiredError
from delaylevel.model.clock import SteadyClock, SystemClock
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import Position, SourcePartition
from delaylevel.mover.forwarder import Forwarder
from delaylevel.topics import registry as topics
from delaylevel.topics.roster import DescriptionCache

from .options import SyncOptions


class Runtime:
    """Connections of this process to one cluster; they live as long as the process."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        # Imported modules stay, and messages have no cycles: collecting garbage among them took a
        # sixth of a task's time.
        gc.freeze()
        gc.set_threshold(50_000, 50, 50)
        try:
            # The token is in this process's environment, or in a file.
            connection = Connection.load(**options)
            self.admin = Admin.from_connection(connection, for_service=True)
            open_client = partial(
                connection.open_service_client,
                logger=logs.to_stderr(),
                stats_interval_in_seconds=0,  # unused, and they time each message
            )
            self.client: Any = open_client()
            self.targets = TargetClients(None, open_client)
        except ConfigError as error:
            if "token_file" not in options:
                raise
            # A token file may be missing for a moment while it is renewed: not fatal for the job.
            raise BrokerError(str(error)) from error
        self._descriptions: dict[str, DescriptionCache] = {}
        self._task_s = time.monotonic()
        # One for all tasks: a clock that is ahead is noticed by what it was before.
        self._clock = SteadyClock(SystemClock())
        self._forwarders: dict[str, Forwarder] = {}

    def start_task(self) -> None:
        """Note the start of a task: all its messages were stored before, when it was planned."""
        self._task_s = time.monotonic()

    def describe(self, level_topic: str) -> LevelTopicDescription:
        """Return the description of a level topic; a change is noticed after some seconds."""
        return self._cache(level_topic).known()

    def planned_by(self, level_topic: str) -> LevelTopicDescription:
        """Return the description of a level topic for a task, the last one that can be read."""
        try:
            return self.describe(level_topic)
        except UpgradeRequiredError:
            # The driver gives the level topic up. What it has planned is finished as planned.
            return self._cache(level_topic).latest()

    def forwarder(self, level_topic: str) -> Forwarder:
        """Return the forwarder for a level topic; a changed description gets a new one."""
        description = self.planned_by(level_topic)
        forwarder = self._forwarders.get(level_topic)
        if forwarder is None or forwarder.description != description:
            if forwarder is not None:
                forwarder.close()
            forwarder = self._forwarders[level_topic] = Forwarder(
                self.client,
                self.admin,
                description,
                self._clock,
                client_of=self.targets.of,
                refreshed=lambda: self._cache(level_topic).refresh(self._task_s),
            )
        return forwarder

    def _cache(self, level_topic: str) -> DescriptionCache:
        found = self._descriptions.get(level_topic)
        if found is None:
            found = DescriptionCache(partial(topics.describe, self.admin, level_topic))
            self._descriptions[level_topic] = found
        return found

    def reset_forwarders(self) -> None:
        """Close every forwarder and discard its unconfirmed messages."""
        forwarders, self._forwarders = self._forwarders, {}
        for forwarder in forwarders.values():
            forwarder.close()


def runtime(options: SyncOptions) -> Runtime:
    """Return this process's runtime for a cluster."""
    # By process, because a fork inherits what is open, and by cluster: queries share connections.
    return _opened(os.getpid(), options.connection)


@cache
def _opened(process: int, connection: tuple[tuple[str, str], ...]) -> Runtime:
    return Runtime(dict(connection))


@dataclass
class InputRange(InputPartition):
    """The part of a source partition that one task reads, and the time of the plan."""

    source: SourcePartition
    start: Position
    end: Position
    now_ms: int

    def read(self, options: SyncOptions) -> Generator[ParkedMessage, None, None]:
        """Yield the messages of the range."""
        client = runtime(options).client
        return read_range(client, self.source.topic, self.start, self.end)
