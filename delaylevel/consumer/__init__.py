"""The receiving side of an application: listeners, with retry, deduplication and filters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delaylevel.errors import from_extra

from .deduplication import Deduplication, TopicIdStore
from .listener import Listener, ListenerCounts
from .listeners import Listeners
from .message import ReceivedMessage
from .retry import Backoff, Reject, Retry

if TYPE_CHECKING:
    from .handled_ids import HandledIds, InvalidIdError

__all__ = [
    "Backoff",
    "Deduplication",
    "HandledIds",
    "InvalidIdError",
    "Listener",
    "ListenerCounts",
    "Listeners",
    "ReceivedMessage",
    "Reject",
    "Retry",
    "TopicIdStore",
]


def __getattr__(name: str) -> Any:
    if name not in ("HandledIds", "InvalidIdError"):
        raise AttributeError(f"module 'delaylevel.consumer' has no attribute {name!r}")
    with from_extra("window", f"delaylevel.consumer.{name} needs"):
        from . import handled_ids
    return getattr(handled_ids, name)
