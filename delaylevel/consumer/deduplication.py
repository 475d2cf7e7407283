"""Deduplication of received messages: the option of a listener.

The promise, for one subscription of one topic: once a message has been handled and its ID saved, no
message with this ID is handled again, as long as the ID is one of the last capacity/2 saved ones.
Only successful handlings are saved, so a retry is never mistaken for a copy. The ID is saved before
the message is acknowledged. A crash between the end of the handler and the end of `save` therefore
lets the message be handled once more; a later crash does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from delaylevel.errors import InvalidInputError


class TopicIdStore:
    """A topic for the handled IDs of one listener, shared by all its processes.

    It is named ``<topic>-<subscription>-handled``, and created if it does not exist.

    Args:
        timeout_s: time after which a message is acknowledged although the broker has not confirmed
            its ID, in s.
    """

    def __init__(self, *, timeout_s: float = 30.0) -> None:
        if not timeout_s > 0:
            raise InvalidInputError(f"timeout_s must be a positive number, got {timeout_s!r}")
        self.timeout_s = timeout_s


@dataclass(frozen=True)
class Deduplication:
    """Deduplication of the messages of a listener.

    Args:
        by: function of the received message that returns its ID: a text that is not empty, or an
            integer of 64 bits. None for ``message.id`` together with the key. It must return the
            same ID for every copy of a message, and should not depend on anything else.
        capacity: maximum number of remembered IDs, even; the last half of them is certain. A text
            takes 8 bytes of memory, consecutive integers much less.
        store: None to forget all IDs at the end of the process, or a `TopicIdStore`.

    Raises:
        InvalidInputError: an argument that cannot be used.
    """

    by: Callable[[Any], str | int] | None = None
    capacity: int = 10_000_000
    store: TopicIdStore | None = None

    def __post_init__(self) -> None:
        if self.by is not None and not callable(self.by):
            raise InvalidInputError(
                f"by must be a function of the message that returns its ID, got {self.by!r}"
            )
        capacity = self.capacity
        whole = isinstance(capacity, int) and not isinstance(capacity, bool)
        if not whole or capacity < 2 or capacity % 2:
            raise InvalidInputError(f"capacity must be an even integer from 2 on, got {capacity!r}")
        if not isinstance(self.store, (TopicIdStore, type(None))):
            raise InvalidInputError(f"store must be a TopicIdStore or None, got {self.store!r}")
