"""Cancellations: the records on the wire that ask a dispatcher not to release a message.

A cancellation has the due time, the target, the ID and the key of its message. It takes the way of
a message of that due time through the levels, but always ends in the window topic, in the partition
of its message, where the dispatcher decides.
"""

from __future__ import annotations

from .envelope import CANCEL, Envelope

#: The payload of a cancellation. It is not empty, because the Python client loses empty payloads
#: that it compresses with ZLib.
PAYLOAD = b"cancel"


def cancellation(due_ms: int, target: str, message_id: str) -> Envelope:
    """Return the envelope of a cancellation.

    Args:
        due_ms: due time of the message, ms since the epoch.
        target: full name of the message's business topic.
        message_id: ID of the message.
    """
    return Envelope(due_ms, target, message_id, kind=CANCEL)
