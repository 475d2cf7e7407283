"""A producer's view of the level topic, which may expand."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.errors import BrokerError, DelayTooLongError, LevelTopicError, UpgradeRequiredError
from delaylevel.model.level_topic import LevelTopicDescription

from .routing import Routing

T = TypeVar("T")

log = logging.getLogger(__name__)

# Reads the description of a level topic; None if that does not exist.
Describe = Callable[[], LevelTopicDescription | None]

REFRESH_EVERY_S = 60.0
# Limits the reads of an application that sends only delays that are too long.
_REFUSED_EVERY_S = 1.0


class LevelTopicCache:
    """Routing by a cached description of the level topic; several threads may use it."""

    # The description is read again when a delay is refused as too long, and in the background every
    # minute while delayed messages are sent. A changed one is used only if it extends the other.

    def __init__(
        self,
        route_by: Callable[[LevelTopicDescription], Routing],
        description: LevelTopicDescription,
        describe: Describe | None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.routing = route_by(description)
        self._route_by = route_by
        self._describe = describe
        self._now_s = now_s
        self._lock = threading.Lock()
        self._read_s = now_s()
        self._warning = RepeatedWarning(log, f"level topic {description.topic}", now_s)

    def routed(self, rule: Callable[[Routing], T]) -> T:
        """Return what a function finds with the routing; errors are those of it."""
        self.refresh_if_old()
        try:
            return rule(self.routing)
        except DelayTooLongError:
            if not self.refresh():
                raise
        return rule(self.routing)

    def refresh_if_old(self) -> None:
        """Read the description in a background thread if the last read is long ago."""
        if self._now_s() - self._read_s < REFRESH_EVERY_S:
            return
        if self._describe is None or self._lock.locked():  # somebody reads it now
            return
        # The thread takes the lock itself: Ctrl-C may come between any two steps of a sender.
        refresh = partial(self.refresh, REFRESH_EVERY_S)
        with suppress(RuntimeError):  # there can be no thread now; the next message tries again
            threading.Thread(target=refresh, name="delaylevel-refresh", daemon=True).start()

    def refresh(self, every_s: float = _REFUSED_EVERY_S) -> bool:
        """Read the description unless that was just done; return True if the routing changed."""
        known = self.routing
        with self._lock:
            if self.routing is not known:
                return True  # another thread was faster
            if self._describe is None or self._now_s() - self._read_s < every_s:
                return False
            # Also if the read fails: not every message is to ask a broken admin interface.
            self._read_s = self._now_s()
            try:
                found = self._describe()
            except BrokerError as error:
                self._warning.failed(f"it cannot be read again ({error})")
                return False
            if found is None or not self._is_known(found):
                self._warning.failed(self._gone(found))
                return False
            self._warning.over()
            if known.description.accepts(found.levels):
                return False
            log.info("level topic %s was expanded: %s", found.topic, found.levels)
            self.routing = self._route_by(found)
            return True

    def check_exists(self) -> None:
        """Raise LevelTopicError if the level topic was deleted, or replaced by another one."""
        # A new producer would create a partition again that does not belong to it, without a
        # subscription, and the broker would delete the messages there.
        if self._describe is None:
            return
        try:
            found = self._describe()
        except UpgradeRequiredError:
            return  # it exists, and every version understands ordinary messages
        except LevelTopicError:
            raise
        except BrokerError:
            return  # the admin interface fails; creating the producer tells
        if found is None or not self._is_known(found):
            topic = self.routing.description.topic
            raise LevelTopicError(
                f"level topic {topic}: {self._gone(found)}; the message was not sent"
            )

    def _gone(self, found: LevelTopicDescription | None) -> str:
        """Return what became of the known level topic, and the remedy."""
        if found is not None:
            return f"it was replaced by another one ({found.levels}): create a new producer"
        command = self.routing.description.creation_command()
        return f"it was deleted: create it again with `{command}`, then a new producer"

    def _is_known(self, found: LevelTopicDescription) -> bool:
        """Return True if a description is that of the known level topic, expanded or before it."""
        known = self.routing.description
        same = found.accepts(known.levels) or known.accepts(found.levels)
        return same and found.fixed == known.fixed
