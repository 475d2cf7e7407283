"""Log messages for the pauses of a level topic."""

from __future__ import annotations

import logging

from delaylevel.model.formatting import exact_duration, format_instant
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.pauses import ALL, NO_PAUSES, Pauses

log = logging.getLogger(__name__)


class PauseLog:
    """The pauses that were logged, so that each begin and end is logged once."""

    def __init__(self) -> None:
        self._known: Pauses = NO_PAUSES

    def note(self, description: LevelTopicDescription) -> bool:
        """Log what has changed; return True if anything has."""
        before, now = self._known, description.pauses
        if now == before:
            return False
        self._known = now
        paused, resumed = dict(now.paused), dict(now.resumed)
        for name, since_ms in now.paused:
            if (name, since_ms) not in before.paused:
                log.warning(
                    "%s: due messages for %s wait: paused since %s; `delaylevel levels resume` "
                    "ends it",
                    description.topic,
                    _words(name),
                    format_instant(since_ms),
                )
        for name, _ in before.paused:
            if name not in paused:
                spread = resumed.get(name)
                over = f" over {exact_duration(spread.length_ms)}" if spread else ""
                log.info(
                    "%s: the pause of %s is over; what waits is released%s",
                    description.topic,
                    _words(name),
                    over,
                )
        return True


def _words(name: str) -> str:
    return "all targets" if name == ALL else name
