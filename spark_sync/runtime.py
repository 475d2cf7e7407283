"""What one Python process of Spark keeps between tasks: client, admin client and forwarders.

The Pulsar client does not survive a fork, so everything is made on first use in the process that
uses it. A Python worker runs one task at a time.
"""

from __future__ import annotations

import gc
import os
from typing import Any

from delaylevel.cluster import client_log as _clientlog
from delaylevel.cluster.admin import Admin
from delaylevel.errors import BrokerError, ConfigError
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.mover.forwarder import Forwarder
from delaylevel.topics import registry as topics

from .options import SyncOptions

# A level topic that was changed (expanded, a target added) is seen after so long.
DESCRIPTION_LIFETIME_MS = 5000


class Runtime:
    """The connections of this process to one cluster; they live as long as the process.

    Args:
        options: where the cluster is.
    """

    def __init__(self, options: SyncOptions) -> None:
        # What is imported stays, and a message has no cycles: looking for garbage among both took
        # a sixth of a task's time.
        gc.freeze()
        gc.set_threshold(50_000, 50, 50)
        try:
            connection = options.load_connection()
            self.admin = Admin.from_connection(connection)
            self.client: Any = connection.open_client(
                logger=_clientlog.to_stderr(),
                stats_interval_in_seconds=0,  # nobody reads them, and they time each message
            )
        except ConfigError as error:
            if "token_file" not in dict(options.connection):
                raise
            # One that is being renewed may be away for a moment, which must not end the job.
            raise BrokerError(str(error)) from error
        self._clock = SystemClock()
        self._described: dict[str, tuple[int, LevelTopicDescription]] = {}
        self._forwarders: dict[str, tuple[LevelTopicDescription, Forwarder]] = {}

    def describe(self, level_topic: str) -> LevelTopicDescription:
        """Return what a level topic says of itself, at most some seconds old."""
        now_ms = self._clock.now_ms()
        read_ms, description = self._described.get(level_topic, (0, None))
        if description is None or now_ms - read_ms > DESCRIPTION_LIFETIME_MS:
            description = topics.describe(self.admin, level_topic)
            self._described[level_topic] = (now_ms, description)
        return description

    def forwarder(self, level_topic: str) -> Forwarder:
        """Return the process's forwarder for a level topic, made anew where that has changed."""
        description = self.describe(level_topic)
        known, forwarder = self._forwarders.get(level_topic, (None, None))
        if forwarder is None or known != description:
            if forwarder is not None:
                forwarder.close()
            forwarder = Forwarder(self.client, self.admin, description)
            self._forwarders[level_topic] = (description, forwarder)
        return forwarder

    def forget_forwarders(self) -> None:
        """Drop every forwarder, with whatever it has not confirmed."""
        forwarders, self._forwarders = self._forwarders, {}
        for _, forwarder in forwarders.values():
            forwarder.close()


# By process, for a fork inherits what its parent has, and by cluster: queries share connections.
_runtimes: dict[tuple[int, tuple[tuple[str, str], ...]], Runtime] = {}


def runtime(options: SyncOptions) -> Runtime:
    """Return this process's runtime for the cluster that the options name."""
    key = (os.getpid(), options.connection)
    found = _runtimes.get(key)
    if found is None:
        found = _runtimes[key] = Runtime(options)
    return found
