"""Times of the last signs of life of a producer.

If a broker dies, another one serves its topics after the end of its session (30 s by default) and
some seconds more. The client looks for the topic again and again, but doubles the pause between two
attempts, up to a minute. So a producer that has lost its connection is replaced as soon as a broker
serves the topic.
"""

from __future__ import annotations

from collections.abc import Callable

# A throttled target has its connection, and may confirm nothing for long.
CONNECTED_STALL_S = 300.0
#: After this time without any confirmation and without a connection, the producer is given up.
GIVE_UP_S = 30.0
#: A client that has lost its connection normally has another one within this time.
RECONNECT_S = 1.0
# This process was suspended or busy for longer than this, so the target is not to blame.
_SUSPENDED_S = 1.0


class Liveness:
    """The times of the last confirmation and of the last connection, by the monotonic clock.

    Args:
        now_s: the monotonic clock, in seconds.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._polled_s = self._confirmed_s = self._connected_s = now_s()

    def opened(self) -> None:
        """Note that the producer was opened."""
        self._confirmed_s = self._connected_s = self._now_s()

    def confirmed(self) -> None:
        """Note that the oldest message was confirmed."""
        self._confirmed_s = self._now_s()

    def connected(self) -> None:
        """Note that the producer has its connection."""
        self._connected_s = self._now_s()

    def polled(self) -> None:
        """Note that this process looks at the producer, as it does again and again."""
        now_s = self._now_s()
        if now_s - self._polled_s > _SUSPENDED_S:
            self._confirmed_s = self._connected_s = now_s
        self._polled_s = now_s

    def silent_s(self, sent_s: float) -> float:
        """Return the time without a confirmation, in s.

        Args:
            sent_s: time at which the oldest message without an answer was sent.
        """
        return max(0.0, self._now_s() - max(sent_s, self._confirmed_s))

    def lost_s(self, sent_s: float) -> float:
        """Return the time without a confirmation and without a connection, in s.

        Args:
            sent_s: as for `silent_s`.
        """
        return min(self.silent_s(sent_s), self._now_s() - self._connected_s)
