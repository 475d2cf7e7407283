"""A producer's view of its level topic, which follows an expansion without a restart."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from delaylevel.errors import BrokerError, DelayTooLongError, LevelTopicError
from delaylevel.model.level_topic import LevelTopicDescription

from .routing import Route, Routing

log = logging.getLogger(__name__)

# Reads what the level topic says of itself; None where it does not exist.
Describe = Callable[[], LevelTopicDescription | None]

LOOK_EVERY_S = 60.0
# An application that sends nothing but delays that are too long must not hammer the broker.
_REFUSED_EVERY_S = 1.0


class LevelTopicCache:
    """Places messages by what the level topic says of itself now.

    The description is read again when a delay is refused as too long, and in the background every
    minute while delayed messages are sent. What is new is gone by only if it is an expansion of
    what was known. Several threads may use it.

    Args:
        parking: places messages by the description that is known.
        describe: reads it again; None where the producer has no admin access.
        now_s: the monotonic clock.
    """

    def __init__(
        self,
        routing: Routing,
        describe: Describe | None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._routing = routing
        self._describe = describe
        self._now_s = now_s
        self._lock = threading.Lock()
        self._looked_s = now_s()
        self._looking = False

    @property
    def description(self) -> LevelTopicDescription:
        """What the level topic says of itself, as far as it is known here."""
        return self._routing.description

    def route(self, *arguments: Any, **options: Any) -> Route:
        """Decide where a message goes; arguments and errors are those of :meth:`Routing.place`."""
        self.look_sometimes()
        try:
            return self._routing.route(*arguments, **options)
        except DelayTooLongError:
            if not self.look_after_refusal():
                raise
        return self._routing.route(*arguments, **options)

    def route_common(
        self,
        deliver_at: int | datetime | None,
        deliver_after: timedelta | None,
        properties: Mapping[str, str] | None,
        message_id: str | None,
        partition_key: str | None,
    ) -> tuple[int, int, dict[str, str]] | None:
        """Place a message that has nothing unusual; as :meth:`Routing.park`."""
        if self._describe is not None and self._now_s() - self._looked_s >= LOOK_EVERY_S:
            self.look_sometimes()
        return self._routing.route_common(
            deliver_at, deliver_after, properties, message_id, partition_key
        )

    def route_cached(self, *arguments: Any, **options: Any) -> Route:
        """The same, but never ask the broker: for callers that must not wait."""
        return self._routing.route(*arguments, **options)

    def look_sometimes(self) -> None:
        """Read the description in a thread of its own, if that is long ago."""
        if self._describe is None or self._now_s() - self._looked_s < LOOK_EVERY_S:
            return
        if not self._looking:
            self._looking = True
            threading.Thread(target=self._look_once, name="delaylevel-look", daemon=True).start()

    def look_after_refusal(self) -> bool:
        """Read the description now, unless that was just done; say whether it has changed."""
        known = self._routing
        with self._lock:
            if self._routing is not known:
                return True  # another thread has seen it
            if self._describe is None or self._now_s() - self._looked_s < _REFUSED_EVERY_S:
                return False
            return self._look()

    def topic_of(self, route: Route) -> str:
        """Return the partition that a parked message goes into, for a producer that is made now.

        Raises:
            LevelTopicError: the level topic was deleted. A producer would make the partition anew,
                without a subscription, and the broker would delete what is sent there.
        """
        topic = self._routing.topic_of(route)
        if self._describe is not None:
            try:
                gone = self._describe() is None
            except LevelTopicError:
                raise
            except BrokerError:
                gone = False  # nobody can be asked; the broker itself will say
            if gone:
                raise LevelTopicError(
                    f"level topic {self.description.topic} was deleted: make it again with "
                    "`delaylevel levels create`, and the producer; the message was not sent"
                )
        return topic

    def _look_once(self) -> None:
        try:
            with self._lock:
                self._look()
        finally:
            self._looking = False

    def _look(self) -> bool:
        assert self._describe is not None
        self._looked_s = self._now_s()
        known = self._routing.description
        try:
            found = self._describe()
        except BrokerError as error:
            log.warning("%s: it cannot be read again (%s)", known.topic, error)
            return False
        if found is None:
            log.warning("level topic %s does not exist any more", known.topic)
            return False
        if found.levels == known.levels:
            return False
        if not found.accepts(known.levels) or found.mover is not known.mover:
            log.warning(
                "level topic %s is another one now (%s): make the producer again",
                known.topic,
                found.levels,
            )
            return False
        log.info("level topic %s was expanded: %s", known.topic, found.levels)
        self._routing = self._routing.with_description(found)
        return True
