"""A mover's warning about subscriptions on its topics that are not ours."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.threads import Starter, in_thread
from delaylevel.model.level_topic import LevelTopicDescription

from .subscriptions import read_foreign_subscriptions

log = logging.getLogger(__name__)

#: Interval between two checks, in s.
CHECK_EVERY_S = 300.0
#: Interval between two warnings about the same subscriptions, in s.
WARN_EVERY_S = 3600.0


class ForeignSubscriptionWatch:
    """The regular check of one level topic for subscriptions that are not ours.

    It runs in the background and never disturbs its host: a failing request means no warning.

    Args:
        now_s: the monotonic clock, in seconds.
        start: function that runs a check in the background.
    """

    def __init__(
        self,
        admin: TopicAdmin,
        *,
        now_s: Callable[[], float] = time.monotonic,
        start: Starter = in_thread,
    ) -> None:
        self._admin = admin
        self._now_s = now_s
        self._start = start
        self._check_at_s = float("-inf")
        self._warn_at_s = float("-inf")
        self._known: set[tuple[str, str]] = set()

    def look(self, description: LevelTopicDescription) -> None:
        """Start a check in the background if it is time; hosts call it at every opportunity."""
        now_s = self._now_s()
        if now_s >= self._check_at_s:
            self._check_at_s = now_s + CHECK_EVERY_S
            self._start(partial(self._check, description))

    def _check(self, description: LevelTopicDescription) -> None:
        try:
            found = read_foreign_subscriptions(self._admin, description)
        except Exception as error:  # the host goes on, whatever the admin interface does
            log.debug("subscriptions of %s are not known: %r", description.topic, error)
            return
        names = {(item.name, item.topic.full) for item in found}
        now_s = self._now_s()
        if not names - self._known and (not names or now_s < self._warn_at_s):
            return
        self._known |= names
        self._warn_at_s = now_s + WARN_EVERY_S
        log.warning(
            "level topic %s: %s. `delaylevel doctor %s` names the remedies",
            description.topic,
            "; ".join(map(str, found)),
            description.topic,
        )
