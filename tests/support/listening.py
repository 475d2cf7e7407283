"""Listeners that run in the process of a test."""

from __future__ import annotations

import threading
from typing import Any

from delaylevel.consumer import Listeners
from support.world import RealWorld


class AppRunner:
    """An application with listeners, in a thread of the test.

    Attributes:
        app: the application.
    """

    def __init__(self, world: RealWorld, **options: Any) -> None:
        self._world = world
        self.app = Listeners(world.client(), **options)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> AppRunner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            self.app.run()
        except BaseException as error:
            self._error = error

    def start(self) -> None:
        """Run the application, and wait until all consumers are subscribed."""
        self._thread = threading.Thread(target=self._run, name="application")
        self._thread.start()
        self._world.eventually(self.ready, "the listeners")

    def ready(self) -> bool:
        """Return True if all listeners are subscribed."""
        if self._error is not None:
            raise self._error
        states = self.app.health().values()  # of those that have started
        return len(states) == len(self.app.listeners) and all(each.subscribed for each in states)

    def stop(self) -> None:
        """Stop the application gracefully."""
        if self._thread is not None:
            self.app.stop()
            self._thread.join(60)
            assert not self._thread.is_alive()
            self._thread = None
        if self._error is not None:
            raise self._error
