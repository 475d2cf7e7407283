"""Fixes that a test takes away, to see that a run then fails.

Only `part` calls this. Each function puts a former fault back into the process. A function that
knows which messages it harms writes their names down, so that the test can tell them from messages
that are late because the machine is busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .ledger import NAME

_HARMED = Path("harmed")


def harmed(folder: Path) -> set[str]:
    """Return the names of the messages that the processes wrote down, by their common folder."""
    found = (path.read_text().split() for path in folder.glob(f"*/{_HARMED}"))
    return {name for names in found for name in names}


def _note_harmed(names: Iterable[str]) -> None:
    with _HARMED.open("a") as file:
        file.writelines(f"{name}\n" for name in names)


def deleted_target() -> None:
    """Write to a target that was deleted and created again, and keep idle producers of it."""
    from delaylevel.cluster.targets import pool, receivers

    receivers.has_receivers = lambda *_: True
    pool.TargetPool.close_idle = lambda *_: None  # type: ignore[method-assign, assignment]


def full_disk() -> None:
    """Forget a batch that the disk refuses, and acknowledge it."""
    from delaylevel.dispatcher.delay_queue import Accepted, OfferQueue

    offer = OfferQueue._offer_waiting

    def forget(self: OfferQueue) -> Accepted:
        accepted = offer(self)
        if self.refusal is None:
            return accepted
        _note_harmed(map(_name, self._waiting.popleft().records))
        self.refusal = None
        return accepted._replace(batches=accepted.batches + 1)

    OfferQueue._offer_waiting = forget  # type: ignore[method-assign]


def _name(record: tuple[Any, ...]) -> str:
    """Return the name of a message that a dispatcher has read; empty for a cancellation."""
    properties = next((field for field in record if isinstance(field, Mapping)), {})
    return properties.get(NAME, "")


def unclear_refusal() -> None:
    """Take every refusal of a target as a proof that it has stored nothing."""
    from delaylevel.cluster.targets.opener import OpeningError, Refusal

    of = OpeningError.of.__func__  # type: ignore[attr-defined]

    def certain(cls: type[OpeningError], error: Exception) -> OpeningError:
        found: OpeningError = of(cls, error)
        if found.kind is Refusal.REFUSED:
            return cls(Refusal.GONE, found.reason)
        return found

    OpeningError.of = classmethod(certain)  # type: ignore[method-assign, assignment]


def new_target() -> None:
    """Take a target for unknown if the description of five seconds ago does not have it."""
    from delaylevel.mover import hop
    from delaylevel.topics.roster import DescriptionCache

    properties = hop.dead_letter_properties

    def noted(message: Any, *place: str) -> dict[str, str]:
        _note_harmed([message.properties.get(NAME, "")])
        return properties(message, *place)

    hop.dead_letter_properties = noted
    DescriptionCache.read_since = (  # type: ignore[method-assign]
        lambda self, _since_s: self.latest()
    )


FIXES: dict[str, Callable[[], None]] = {
    "deleted-target": deleted_target,
    "full-disk": full_disk,
    "unclear-refusal": unclear_refusal,
    "new-target": new_target,
}


def take_away(name: str) -> None:
    """Take a fix away; nothing for an empty name."""
    if name:
        FIXES[name]()
