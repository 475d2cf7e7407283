"""Settings of a dispatcher."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from delaylevel.model.delivery import Delivery

#: Time for which messages wait for a target without a connection, in s; then they are held. It is
#: longer than another broker needs to take over: a session (30 s by default) and some seconds. Held
#: messages would come later than that, and not in their order.
FAILOVER_S = 60.0


@dataclass(frozen=True)
class DispatchSettings:
    """Settings of a dispatcher.

    Attributes:
        directory: directory for spill files; each process creates its own folder in it.
        delivery: at least once (batched), or effectively once (unbatched, with broker deduplication
            on every target).
        checkpoint_ms: time between two acknowledgements, in ms.
        memory_bytes: memory limit for pending payloads of each level topic.
        remember: number of IDs to remember for each target and source partition.
        cancel_grace_ms: time after its due time until which the message of a cancellation is
            waited for, in ms; then the outcome is ``unknown``.
        name: name of this dispatcher in its group; derived from host and process if None.
    """

    directory: Path
    delivery: Delivery = Delivery.AT_LEAST_ONCE
    checkpoint_ms: int = 1_000
    memory_bytes: int = 256 << 20
    remember: int = 2_000_000
    cancel_grace_ms: int = 60_000
    name: str | None = None
