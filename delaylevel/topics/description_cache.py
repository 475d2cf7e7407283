"""A running host's copy of the description of its level topic."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from delaylevel.cluster.failures import is_admin_away
from delaylevel.errors import BrokerError, UpgradeRequiredError
from delaylevel.model.level_topic import LevelTopicDescription

#: Age from which a description is read again, in s. Hosts look once a second: they notice changes
#: within five seconds.
LIFETIME_S = 3.5
#: The shortest time between two reads that unknown targets cause, in s.
REFRESH_EVERY_S = 0.25


class DescriptionCache:
    """The description of a level topic, which its hosts read again while they run.

    Targets may be added at any time, and a client sends to a new target at once. So a target is
    unknown only if it is missing from a description whose reading began after the message was
    stored. No wall clock is needed for that: a host notes the monotonic time at which it knows of a
    message, and asks for a description that was read since.

    Several threads may use one cache.

    Args:
        read: function that reads the description from the broker.
        description: description that was read before; by default it is read now.
        now_s: the monotonic clock, in seconds.
        wait: function that waits for a number of seconds.

    Attributes:
        failing: True if the last read failed.

    Raises:
        BrokerError: the description cannot be read.
    """

    def __init__(
        self,
        read: Callable[[], LevelTopicDescription],
        description: LevelTopicDescription | None = None,
        *,
        now_s: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._read = read
        self._now_s = now_s
        self._wait = wait
        self.failing = False
        self._lock = threading.Lock()  # held during a read
        self._tried_s = now_s()
        # The description, and the time at which its reading began: one value, so that a thread
        # that does not hold the lock never sees one without the other.
        self._known = (description, float("-inf")) if description else (read(), self._tried_s)
        self._fresh_until_s = self._tried_s + LIFETIME_S
        if description is not None:
            self._tried_s = float("-inf")

    def latest(self) -> LevelTopicDescription:
        """Return the description as it was read last."""
        return self._known[0]

    def current(self) -> LevelTopicDescription:
        """Return the description; read it again if the last read is some seconds ago.

        If another thread is reading it, return the latest one.

        Raises:
            BrokerError: the description cannot be read. For the next seconds, the calls return the
                latest one: a failing admin interface does not stop the host.
            UpgradeRequiredError: the level topic is described in a later format.
                Every call reads and raises, because the host must not continue.
        """
        if self._now_s() < self._fresh_until_s:
            return self.latest()
        if not self._lock.acquire(blocking=False):
            return self.latest()
        try:
            return self._read_now()
        finally:
            self._lock.release()

    def known(self) -> LevelTopicDescription:
        """Return the description as :meth:`current` does; the latest one without an answer.

        Raises:
            BrokerError, UpgradeRequiredError: as for :meth:`current`, if the admin interface
                answers.
        """
        try:
            return self.current()
        except BrokerError as error:
            if not is_admin_away(error):
                raise
            return self.latest()

    def read_since(self, since_s: float) -> LevelTopicDescription | None:
        """Return the description if its reading began at a time or later; None otherwise.

        Nothing is read, and the call does not wait.

        Args:
            since_s: monotonic time in s.
        """
        description, read_s = self._known
        return description if read_s >= since_s else None

    def refresh(self, since_s: float) -> LevelTopicDescription:
        """Return a description whose reading began at a time or later; read it if necessary.

        The call first waits for the shortest time between two reads. One read answers all threads
        that wait for it.

        Args:
            since_s: monotonic time in s, not later than now.

        Raises:
            BrokerError: the description cannot be read; nothing is known about its targets.
        """
        with self._lock:
            found = self.read_since(since_s)
            if found is not None:
                return found
            pause_s = self._tried_s + REFRESH_EVERY_S - self._now_s()
            if pause_s > 0:
                self._wait(pause_s)
            return self._read_now()

    def _read_now(self) -> LevelTopicDescription:
        self._tried_s = self._now_s()
        self.failing = True
        lifetime_s = LIFETIME_S
        try:
            self._known = (self._read(), self._tried_s)
            self.failing = False
        except UpgradeRequiredError:
            lifetime_s = 0.0
            raise
        finally:
            self._fresh_until_s = self._now_s() + lifetime_s
        return self.latest()
