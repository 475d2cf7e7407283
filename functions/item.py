"""A message on its way through the Function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from delaylevel.model.envelope import Envelope
from delaylevel.model.message import ParkedMessage


@dataclass(slots=True, eq=False)
class Item:
    """A message on its way, from its arrival to its acknowledgement.

    Attributes:
        topic: full name of the partition that it was read from.
        message: the message as it was read; None once its next place has confirmed it.
        place: partition, ledger, entry and batch index.
        counted: field of the report to count it in, and the key (or lateness in ms).
        lag_ms: time from its hand-off time to its arrival, ms.
        properties, deliver_at_ms: properties and delivery time of the message to send.
        confirmed: True once it may be acknowledged.
        given_back: True once the broker was asked to deliver it again.
    """

    topic: str
    message_id: Any
    message: ParkedMessage | None
    place: tuple[str, int, int, int]
    envelope: Envelope | None = None
    counted: tuple[str, Any] = ("", None)
    lag_ms: int = 0
    properties: dict[str, str] | None = None
    deliver_at_ms: int | None = None
    confirmed: bool = False
    given_back: bool = False
