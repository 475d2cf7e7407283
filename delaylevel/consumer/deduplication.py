"""Deduplication of received messages: the option of a listener, and the IDs of messages.

The promise, for one subscription of one topic: once a message has been handled and its ID saved, no
message with this ID is handled again, as long as the ID is one of the last capacity/2 saved ones.
Only successful handlings are saved, so a retry is never mistaken for a copy. The ID is saved before
the message is acknowledged. A crash between the end of the handler and the end of `save` therefore
lets the message be handled once more; a later crash does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delaylevel.errors import InvalidInputError, from_extra

if TYPE_CHECKING:
    from .handled_ids import HandledIds, TopicIdStore

DEFAULT_CAPACITY = 10_000_000


@dataclass(frozen=True)
class Deduplication:
    """Deduplication of the messages of a listener.

    Args:
        by: function of the received message that returns its ID: a text that is not empty, or an
            integer of 64 bits. None for ``message.id`` together with the key. It must return the
            same ID for every copy of a message, and should not depend on anything else.
        capacity: maximum number of remembered IDs, even; the last half of them is certain. A text
            takes 8 bytes of memory, consecutive integers much less.
        store: None to forget all IDs at the end of the process, or a
            `TopicIdStore`.

    Raises:
        InvalidInputError: an argument that cannot be used.
    """

    by: Callable[[Any], str | int] | None = None
    capacity: int = DEFAULT_CAPACITY
    store: TopicIdStore | None = None

    def __post_init__(self) -> None:
        if self.by is not None and not callable(self.by):
            raise InvalidInputError(
                f"by must be a function of the message that returns its ID, got {self.by!r}"
            )
        capacity = self.capacity
        if isinstance(capacity, bool) or not isinstance(capacity, int):
            raise InvalidInputError(f"capacity must be an integer, got {capacity!r}")
        if capacity < 2 or capacity % 2:
            raise InvalidInputError(f"capacity must be even and at least 2, got {capacity}")
        store = self.store
        if store is not None and (isinstance(store, type) or not hasattr(store, "open")):
            raise InvalidInputError(f"store must be a TopicIdStore or None, got {store!r}")

    @classmethod
    def from_option(cls, option: object) -> Deduplication | None:
        """Return the deduplication that a listener's option ``deduplicate`` means.

        Args:
            option: True for the defaults, False for none, or a `Deduplication`.

        Raises:
            InvalidInputError: any other value.
        """
        if option is False:
            return None
        if option is True:
            return cls()
        if isinstance(option, cls):
            return option
        raise InvalidInputError(
            f"deduplicate must be True, False or a Deduplication, got {option!r}"
        )

    def open(self, client: Any, topic: str, subscription: str) -> HandledIds:
        """Open the handled IDs of a subscription of a business topic, and load the stored ones.

        Raises:
            MissingExtraError: numpy or pyroaring is not installed.
            DelayLevelError: the store cannot be used; the text says why.
        """
        with from_extra("window", "deduplication needs"):
            from .handled_ids import HandledIds
        log = None
        if self.store is not None:
            log = self.store.open(client, topic, subscription)
        return HandledIds(self.by, self.capacity, log)
