"""The receiving side of an application: listeners, with retry, deduplication and filters."""

from __future__ import annotations

from .listener import Deduplication, Listener, ListenerCounts, TopicIdStore
from .listeners import Listeners
from .message import ReceivedMessage
from .retry import Backoff, Reject, Retry

__all__ = [
    "Backoff",
    "Deduplication",
    "Listener",
    "ListenerCounts",
    "Listeners",
    "ReceivedMessage",
    "Reject",
    "Retry",
    "TopicIdStore",
]
