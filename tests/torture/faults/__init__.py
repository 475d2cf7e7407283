"""The faults: what can be broken, a module for each group.

A fault is injected into the scene, lasts for a random time, and is undone. It says itself when it
is not possible, for example because there is no process of its kind. More than one fault may be
there at the same time, except for those that need the rest of the scene in order (`alone`). One
that fails half-way is undone as far as it came.
"""

from __future__ import annotations

from . import broker, clocks, disk, network, operations, processes, targets, tokens
from .fault import Fault, Undo

ALL: tuple[Fault, ...] = (
    *processes.FAULTS,
    *broker.FAULTS,
    *network.FAULTS,
    *targets.FAULTS,
    *operations.FAULTS,
    *clocks.FAULTS,
    *disk.FAULTS,
    *tokens.FAULTS,
)

__all__ = ["ALL", "Fault", "Undo", "named"]


def named(names: tuple[str, ...]) -> tuple[Fault, ...]:
    """Return the faults with these names; all if there are none.

    Raises:
        ValueError: a name is unknown.
    """
    known = {fault.name: fault for fault in ALL}
    unknown = set(names) - known.keys()
    if unknown:
        raise ValueError(f"no fault {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return tuple(known[name] for name in names) or ALL
