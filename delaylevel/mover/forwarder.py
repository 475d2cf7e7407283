"""Hand-off of messages for a host that waits: a pass of the local mover, a task, drain, replay.

The forwarder gives messages to a :class:`~delaylevel.mover.carrier.Carrier`, limits those that are
on their way, and waits for the broker's confirmations. Its host acknowledges a source message only
after :meth:`Forwarder.flush` has returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from delaylevel.cluster.own_producers import BATCH_TOO_LARGE, not_stored
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.targets.producer import GIVE_UP_S
from delaylevel.cluster.threads import BackgroundWork, HostLoop, Starter
from delaylevel.errors import BatchTooLargeError, BrokerError, DelayLevelError, UnknownTargetError
from delaylevel.model.clock import SteadyClock, SystemClock, monotonic_s
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import SourcePartition
from delaylevel.model.router import Router

from .carrier import Carrier
from .hop import NextHop, Place

# Messages are kept until they are stored, to be set aside if their topic refuses them: no more
# than this.
MOST_MESSAGES = 10_000
MOST_BYTES = 32 * 1024 * 1024
# Number of messages and bytes between two looks at the outcomes.
_POLL_EVERY = 500
_POLL_BYTES = MOST_BYTES // 8
# Number of messages of a range for each read of the clock.
_MESSAGES_PER_TIME = 256
# A topic that only confirms slowly is waited for. Without any outcome for this time nobody can
# tell what became of the messages.
PATIENCE_S = 60.0
_POLL_S = 0.05
# Callbacks follow the end of a flush within a moment.
_OWED_S = 0.0005


class Forwarder:
    """Publishes messages to their next place, and reports the confirmed ones; for one thread.

    Args:
        refreshed: returns a description whose reading began after the messages were stored, for a
            target that ``description`` does not have; by default, such a target is unknown.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        description: LevelTopicDescription,
        clock: SteadyClock | None = None,
        router: Router | None = None,
        refreshed: Callable[[], LevelTopicDescription] | None = None,
        *,
        client_of: Callable[[str], Any] | None = None,
        start: Starter | None = None,
        connected: Callable[[], bool] = lambda: False,
    ) -> None:
        self.description = description
        clock = clock or SteadyClock(SystemClock())
        self._wall_ms, self._now_s = clock.wall_ms, monotonic_s(clock)
        self._refreshed = refreshed or (lambda: description)
        self._woken = threading.Event()
        self._background = BackgroundWork()
        next_hop = NextHop(description, router)
        self._carrier: Carrier[Any] = Carrier(
            client,
            admin,
            lambda: next_hop,
            clock,
            client_of=client_of,
            loop=HostLoop(start or self._background.start, self._now_s, self._woken.set, connected),
        )
        self._report = ForwardReport()
        # The items of stored messages, and where these are: who gives items takes them from here.
        self.placed: list[tuple[Any, Place]] = []
        # Given since the last look at the outcomes.
        self._messages = self._bytes = 0

    def forward_all(
        self, source: SourcePartition, messages: Iterable[ParkedMessage], item: Any = None
    ) -> int:
        """Publish messages to their next places; they are safe when :meth:`flush` has returned.

        After a BrokerError, acknowledge none since the last flush, and forward all of them again.
        """
        count = time_ms = 0
        give = self._carrier.give
        try:
            for message in messages:
                if not count % _MESSAGES_PER_TIME:
                    time_ms = self._wall_ms()
                count += 1
                try:
                    give(item, source, message, time_ms)
                except UnknownTargetError:
                    give(item, source, message, time_ms, self._refreshed())
                self._messages += 1
                self._bytes += message.size
                if self._messages >= _POLL_EVERY or self._bytes >= _POLL_BYTES:
                    self._make_room()
        except DelayLevelError:
            self.reset()
            raise
        return count

    def flush(self) -> ForwardReport:
        """Wait until the broker has confirmed everything that was forwarded so far.

        After a BrokerError, acknowledge none since the last flush, and forward all of them again.
        After a BatchTooLargeError, they will be sent one by one then.
        """
        try:
            self._wait(0, 0)
        except DelayLevelError:
            self.reset()
            raise
        report, self._report = self._report, ForwardReport()
        return report

    def close_targets(self) -> None:
        """Close the producers of business topics, while there is nothing to send."""
        # A connected producer would create a topic again that an operator deletes by force.
        self._carrier.targets.close()
        self._background.join()

    def close(self) -> None:
        """Close every producer; messages that were not flushed are not confirmed."""
        self._carrier.close()
        self._background.join()

    def reset(self) -> None:
        """Start again after a failure; messages that are forwarded again count once."""
        self._report = ForwardReport()
        self._messages = self._bytes = 0
        self._carrier.close()

    def _make_room(self) -> None:
        """Take the outcomes that are known; wait for some if too many messages have none."""
        self._messages = self._bytes = 0
        self._take_outcomes()
        messages, size = self._carrier.load
        if messages >= MOST_MESSAGES or size >= MOST_BYTES:
            self._wait(MOST_MESSAGES // 2, MOST_BYTES // 2)

    def _take_outcomes(self) -> bool:
        """Count the messages whose outcome is known since the last call; False if none is."""
        report, found = self._report, self._carrier.poll()
        self.placed += [(c.item, c.place) for c in found if c.item is not None and not c.reason]
        for carried in found:
            place, reason = carried.place, carried.reason
            if reason:
                error = not_stored(place.topic, reason)
                raise BatchTooLargeError(str(error)) if reason == BATCH_TOO_LARGE else error
            report.count(place.counter, carried.late_ms, carried.count)
        return bool(found)

    def _wait(self, messages: int, size: int) -> None:
        """Wait until no more messages and bytes than these have no outcome."""
        carrier = self._carrier
        reasons: dict[str, str] = {}
        quiet_s, before_s = 0.0, self._now_s()
        while True:
            self._woken.clear()
            if self._take_outcomes():
                quiet_s = 0.0
            load = carrier.load
            if load[0] <= messages and load[1] <= size:
                return
            carrier.flush()
            now_s = self._now_s()
            quiet_s += min(now_s - before_s, 1.0)  # more: this process was suspended
            before_s = now_s
            waiting = carrier.waiting()
            reasons.update((topic, reason) for topic, reason in waiting.items() if reason)
            if quiet_s > GIVE_UP_S:
                # Connected or not: the rest of the batch cannot wait any longer, and a message
                # that may be stored already is held, with its ID.
                carrier.give_up_stalled()
            if quiet_s > PATIENCE_S:
                topics = (f"{topic} ({reasons.get(topic, 'no answer')})" for topic in waiting)
                raise BrokerError(
                    f"{', '.join(topics)}: it is not known which of the messages are stored; "
                    "nothing was acknowledged, and they will be sent again"
                )
            self._woken.wait(_OWED_S if carrier.owes_answers else _POLL_S)
