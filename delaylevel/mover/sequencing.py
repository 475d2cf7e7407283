"""Sequence ids for what comes from one source partition, in its order."""

from __future__ import annotations

import time
from collections.abc import Callable

from delaylevel.errors import InvalidInputError
from delaylevel.model.delivery import Sequence, sequence_id
from delaylevel.model.source_partition import SourcePartition

# So much may be unconfirmed, and for so long, which is a part of the client's timeout.
UNSETTLED_MESSAGES = 10_000
UNSETTLED_BYTES = 32 * 1024 * 1024
SETTLE_WITHIN_S = 10.0

_HeldAlready = frozenset[tuple[str | None, int]]


class Sequencer:
    """Numbers messages, and sees to it that none is sent behind one that may have timed out.

    Nothing may be sent behind what the client has given up after its timeout: the broker would
    take the higher sequence id, and drop the lower one when it is sent again. So what is sent is
    confirmed, or has failed, long before that.

    Args:
        sequence: for which partition.
        settle: waits for the confirmation of all that was sent; raises BrokerError.
        read_held: returns (id, attempt) of what an earlier run has set aside that began with
            this number.
    """

    def __init__(
        self,
        sequence: Sequence,
        settle: Callable[[], None],
        read_held: Callable[[int], _HeldAlready],
    ) -> None:
        self._topic = sequence.topic
        self._settle = settle
        self._read_held = read_held
        self.forget()

    def forget(self) -> None:
        """Start anew: the same messages may come again."""
        self._last = 0
        self._held_already: _HeldAlready | None = None
        self.settled()

    def settled(self) -> None:
        """Nothing is unconfirmed any more."""
        self._unsettled = self._unsettled_bytes = 0
        self._settle_at_s = 0.0

    def next(
        self, source: SourcePartition, ledger: int, entry: int, batch: int, length: int
    ) -> int:
        """Return the sequence id of what is sent on next.

        Args:
            source: where it was read.
            ledger, entry, batch: its position there.
            length: of its payload, in bytes.

        Raises:
            InvalidInputError: it is not of the sequence's partition, or out of order.
            BrokerError: something that was sent before it is not confirmed.
        """
        self._unsettled += 1
        self._unsettled_bytes += length
        if self._unsettled == 1:
            self._settle_at_s = time.monotonic() + SETTLE_WITHIN_S
        elif (
            self._unsettled > UNSETTLED_MESSAGES
            or self._unsettled_bytes > UNSETTLED_BYTES
            or time.monotonic() > self._settle_at_s
        ):
            self._settle()
            self._unsettled, self._unsettled_bytes = 1, length
            self._settle_at_s = time.monotonic() + SETTLE_WITHIN_S
        if source.topic != self._topic:
            raise InvalidInputError(f"a message of {source.topic} among those of {self._topic}")
        number = sequence_id(ledger, entry, batch)
        if number <= self._last:
            raise InvalidInputError(
                f"{source.topic}: {ledger}:{entry}:{batch} comes after a later position, or twice. "
                "Effectively-once needs the rows of a partition once each and in their order"
            )
        self._last = number
        if self._held_already is None:
            self._held_already = self._read_held(number)
        return number

    def was_held(self, message_id: str | None, attempt: int) -> bool:
        """Return whether an earlier run of the same batch has set a message aside with this."""
        return (message_id, attempt) in (self._held_already or ())
