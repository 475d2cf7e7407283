"""The receiving side of an application: listeners, with retry, deduplication and filters."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from delaylevel.errors import from_extra

if TYPE_CHECKING:
    from .deduplication import Deduplication, TopicIdStore
    from .handled_ids import HandledIds, InvalidIdError
    from .listener import Listener, ListenerCounts
    from .listeners import Listeners
    from .message import ReceivedMessage
    from .retry import Backoff, Reject, Retry

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

# Name -> (module, required extra or None). Loaded on first use.
_LAZY: dict[str, tuple[str, str | None]] = {
    "Backoff": ("retry", None),
    "Deduplication": ("deduplication", None),
    "HandledIds": ("handled_ids", "window"),
    "InvalidIdError": ("handled_ids", "window"),
    "Listener": ("listener", None),
    "ListenerCounts": ("listener", None),
    "Listeners": ("listeners", None),
    "ReceivedMessage": ("message", None),
    "Reject": ("retry", None),
    "Retry": ("retry", None),
    "TopicIdStore": ("deduplication", None),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'delaylevel.consumer' has no attribute {name!r}")
    module, extra = _LAZY[name]
    with from_extra(extra, f"delaylevel.consumer.{name} needs"):
        value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
