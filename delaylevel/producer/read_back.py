"""A parked message, read back from the place that stored it."""

from __future__ import annotations

from typing import Any

import pulsar

from delaylevel.cluster.reader import read_range
from delaylevel.errors import EnvelopeError, InvalidInputError
from delaylevel.model.envelope import Envelope
from delaylevel.model.message import ParkedMessage
from delaylevel.model.outcome import Receipt

_REMEDY = "give the new message's body=; nothing was sent"


def read_back(client: Any, receipt: Receipt) -> tuple[ParkedMessage, Envelope]:
    """Return the stored message of a receipt.

    The broker keeps it until the mover or dispatcher has acknowledged everything of its ledger.

    Args:
        client: a ``pulsar.Client``.
        receipt: that of the message.

    Raises:
        InvalidInputError: the message is not there any more, or the receipt does not tell where.
        pulsar.PulsarException: the partition cannot be read.
    """
    place = receipt.place
    if place is None:
        raise InvalidInputError(
            f"the receipt of message {receipt.id!r} does not tell where it is stored: {_REMEDY}"
        )
    if receipt.sent_directly:
        raise InvalidInputError(
            f"message {receipt.id!r} was due when it was sent, and went straight to "
            f"{receipt.target}: {_REMEDY}"
        )
    topic, position = place
    try:
        for message in read_range(client, topic, position, position.next_entry):
            envelope = Envelope.read(message.properties, message.stable_id(topic))
            found = envelope.id, envelope.target, message.key
            if found == (receipt.id, receipt.target, receipt.key):
                return message, envelope
    except EnvelopeError as error:
        raise InvalidInputError(
            f"message {receipt.id!r} is unreadable at {receipt.stored_at} ({error}): {_REMEDY}"
        ) from error
    except pulsar.TopicNotFound:
        pass
    raise InvalidInputError(
        f"message {receipt.id!r} is not stored at {receipt.stored_at} any more, because its ledger "
        f"is deleted: {_REMEDY}"
    )
