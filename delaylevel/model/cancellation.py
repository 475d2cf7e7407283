"""Cancellations: the records on the wire that ask a dispatcher not to release a message.

A cancellation has the due time, the target, the ID and the key of its message. It takes the way of
a message of that due time through the levels, but always ends in the window topic, in the partition
of its message, where the dispatcher decides.
"""

from __future__ import annotations

from .envelope import CANCEL, Envelope
from .level_topic import LevelTopicDescription

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


def cancellation_partition(description: LevelTopicDescription, key: str, message_id: str) -> int:
    """Return the window partition of a cancellation, which is that of its message.

    A message without a key and without an ID of its application, sent to the window topic directly,
    is in the partition that its ID names. This is part of the wire format.

    Args:
        description: description of the level topic.
        key: partition key of the message; empty for none.
        message_id: ID of the message.
    """
    if not key:
        topic, *position = message_id.rsplit(":", 3)
        prefix = description.window_topic.full.removeprefix("persistent://") + "-partition-"
        number = topic[len(prefix) :]
        if (
            len(position) == 3
            and topic.startswith(prefix)
            and number.isascii()
            and number.isdigit()
            and str(partition := int(number)) == number
            and partition < description.window_partitions
        ):
            return partition
    return description.window_partition(key, message_id)
