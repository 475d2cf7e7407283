"""A Function that moves a level topic; the broker's worker runs its process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psutil

from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.errors import DelayLevelError
from delaylevel.functions import deployment
from delaylevel.model.level_topic import LevelTopicDescription
from support.function_instances import instance_pids

# A worker that has just started may not know its functions yet.
_PATIENCE_S = 120.0
_AGAIN_S = 0.5


class MovingFunction:
    """The Function of one level topic, with one instance.

    The worker gives it the broker's own address, so that only its admin calls go through a proxy.
    It starts an instance again that died, half a minute later; but none after its own restart:
    there, docs/functions.md asks for `delaylevel mover restart`.

    Args:
        broker: the broker.
        description: the level topic.
        admin_url: address of the admin interface for the instance.

    Attributes:
        name: name among the processes of a run.
    """

    name = "function"

    def __init__(
        self, broker: EmbeddedBroker, description: LevelTopicDescription, admin_url: str
    ) -> None:
        self._broker = broker
        self._description = description
        self._admin_url = admin_url
        self._function = deployment.function_name(description)

    def deploy(self) -> None:
        """Register it; the worker starts the instance."""
        options = deployment.FunctionOptions(admin_url=self._admin_url)
        deployment.deploy(self._broker.connection, self._description, options)

    def restart(self) -> None:
        """Stop and start the instance, as `delaylevel mover restart` does.

        Raises:
            DelayLevelError: the worker did not do it.
        """
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                deployment.restart(self._broker.connection, self._function)
                return
            except DelayLevelError:
                if time.monotonic() > deadline_s:
                    raise
            time.sleep(_AGAIN_S)

    @property
    def pid(self) -> int | None:
        """ID of the process; None if it does not run."""
        return next((each.pid for each in self.tree()), None)

    def tree(self) -> list[psutil.Process]:
        """Return the instance, the youngest first: a dead broker leaves an earlier one behind."""
        found = []
        for pid in instance_pids(self._function, self._broker.directory):
            with contextlib.suppress(psutil.Error):
                found.append(psutil.Process(pid))
        return sorted(found, key=lambda each: each.create_time(), reverse=True)

    def kill(self, choose: Callable[[list[psutil.Process]], psutil.Process | None]) -> bool:
        """Kill one process of the tree; return False if there is none."""
        found = choose(self.tree())
        if found is not None:
            with contextlib.suppress(psutil.Error):
                found.kill()
        return found is not None

    def end(self) -> None:
        """Kill every instance, once the broker has ended."""
        for each in self.tree():
            with contextlib.suppress(psutil.Error):
                each.kill()
