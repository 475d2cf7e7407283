"""Pauses of a level topic: the targets to which nothing is released for a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

#: The name under which a pause of all targets is stored.
ALL = "*"
# The shortest time between two releases of a spread, in ms.
_STEP_MS = 50


class Spread(NamedTuple):
    """The time over which the messages of a pause are released after its end.

    Attributes:
        begin_ms: end of the pause, ms since the epoch. Messages that were due before have waited.
        length_ms: length of the time, ms.
    """

    begin_ms: int
    length_ms: int

    @property
    def end_ms(self) -> int:
        """The time at which all of them are released, ms since the epoch."""
        return self.begin_ms + self.length_ms

    def take(self, left: int, last_ms: int, now_ms: int) -> tuple[int, int]:
        """Return the number of messages to release now, and the time of this release.

        That time, ms since the epoch, is a little earlier than now: a part of a message counts for
        the next release.

        Args:
            left: number of messages that wait, at least 1.
            last_ms: time of the last release, ms since the epoch.
        """
        if now_ms >= self.end_ms:
            return left, now_ms
        since_ms = max(last_ms, self.begin_ms)
        count = left * max(now_ms - since_ms, 0) // (self.end_ms - since_ms)
        return count, since_ms + count * (self.end_ms - since_ms) // left

    def next_ms(self, left: int, last_ms: int) -> int:
        """Return the time of the next release, ms since the epoch.

        Args:
            left: number of messages that wait, at least 1.
            last_ms: time of the last release, ms since the epoch.
        """
        since_ms = max(last_ms, self.begin_ms)
        for_one_ms = -((since_ms - self.end_ms) // left)  # rounded up
        return min(self.end_ms, since_ms + max(for_one_ms, _STEP_MS))


@dataclass(frozen=True)
class Pauses:
    """The present pauses, and the ends of earlier ones.

    Attributes:
        paused: full name of each paused target, or ``*`` for all -> begin, ms since the epoch.
        resumed: full name of each target, or ``*`` for all, whose messages are released over a time
            -> that time.
    """

    paused: tuple[tuple[str, int], ...] = ()
    resumed: tuple[tuple[str, Spread], ...] = ()

    def __bool__(self) -> bool:
        """Return True if there is anything to regard."""
        return bool(self.paused or self.resumed)

    def paused_since_ms(self, target: str) -> int | None:
        """Return the begin of a target's pause, ms since the epoch; None if it is not paused."""
        found = [since for name, since in self.paused if name in (ALL, target)]
        return min(found, default=None)

    def spread(self, target: str, now_ms: int) -> Spread | None:
        """Return the time over which a target's backlog is released; None if it is over."""
        found = [each for name, each in self.resumed if name in (ALL, target)]
        found = [each for each in found if each.begin_ms <= now_ms <= each.end_ms]
        return max(found, key=lambda each: each.end_ms, default=None)

    def pause(self, target: str, now_ms: int) -> Pauses:
        """Return the pauses with one more.

        Args:
            target: full name of the target, or ``*``.
        """
        paused = {target: now_ms, **dict(self.paused)}
        return Pauses(tuple(sorted(paused.items())), self.resumed)

    def resume(self, target: str, now_ms: int, spread_ms: int = 0) -> Pauses:
        """Return the pauses without that of a target; ``*`` ends all of them.

        Args:
            target: full name of the target, or ``*``.
            spread_ms: time over which the messages that wait are released, ms.
        """
        ended = [name for name, _ in self.paused if target in (ALL, name)]
        resumed = {name: each for name, each in self.resumed if each.end_ms > now_ms}
        for name in ended:
            resumed.pop(name, None)
            if spread_ms:
                resumed[name] = Spread(now_ms, spread_ms)
        left = tuple(item for item in self.paused if item[0] not in ended)
        return Pauses(left, tuple(sorted(resumed.items())))

    def to_json(self) -> dict[str, Any]:
        """Return the members of the stored description; none without pauses."""
        value: dict[str, Any] = {}
        if self.paused:
            value["paused"] = dict(self.paused)
        if self.resumed:
            value["resumed"] = {name: list(spread) for name, spread in self.resumed}
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Pauses:
        """Read the members of a stored description.

        Raises:
            TypeError, ValueError, AttributeError: they have another form.
        """
        paused, resumed = value.get("paused", {}), value.get("resumed", {})
        return cls(
            tuple(sorted((str(name), int(since)) for name, since in paused.items())),
            tuple(
                sorted(
                    (str(name), Spread(int(begin), int(length)))
                    for name, (begin, length) in resumed.items()
                )
            ),
        )


NO_PAUSES = Pauses()
