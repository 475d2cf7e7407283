"""The threads of a listener that receive its messages, and their consumers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .host import left_s
from .listener import Listener
from .subscribed import Subscribed

#: Functions that return a new consumer, given its number: of new messages, and of retried copies.
Subscribe = Sequence[Callable[[int], Any]]


class ReceivingThreads:
    """The threads that receive the messages of one listener.

    A subclass fills ``sources`` and ``threads``.

    Attributes:
        listener: the listener.
        sources: the consumers.
        threads: the threads that receive from them.
        stopping: event that ends the threads.
    """

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.stopping = threading.Event()
        self.sources: list[Subscribed] = []
        self.threads: list[threading.Thread] = []

    def consumers(self, subscribe: Subscribe, count: int) -> list[list[Subscribed]]:
        """Return the consumers of new messages, and those of retried copies; add them to all."""
        found = [
            [
                Subscribed(partial(opened, number), f"{what} of {self.listener}", self.stopping)
                for number in range(count)
            ]
            for opened, what in zip(subscribe, ("messages", "retries"), strict=False)
        ]
        self.sources += [source for sources in found for source in sources]
        return found

    def start(self) -> None:
        """Subscribe, and start the threads.

        Raises:
            pulsar.PulsarException: a subscription cannot be opened.
        """
        for source in self.sources:
            source.start()
        for thread in self.threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """True while all threads run."""
        return all(thread.is_alive() for thread in self.threads)

    @property
    def ready(self) -> bool:
        """True while all consumers are subscribed and connected."""
        return all(source.ready for source in self.sources)

    def stop(self) -> None:
        """Receive no more messages."""
        self.stopping.set()

    def join(self, until_s: float) -> bool:
        """Wait for the threads; return True if all of them have ended.

        Args:
            until_s: time to stop waiting, by ``time.monotonic()``.
        """
        started = [thread for thread in self.threads if thread.ident is not None]
        for thread in started:
            thread.join(left_s(until_s))
        return not any(thread.is_alive() for thread in started)

    def close(self) -> None:
        """Close the consumers."""
        for source in self.sources:
            source.close()
