"""The receiving side of an application: listeners, with retry, deduplication and filters."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from delaylevel.errors import MissingExtraError

if TYPE_CHECKING:
    from .backoff import Backoff
    from .deduplication import Deduplication
    from .failure import Reject, Retry
    from .handled_ids import HandledIds
    from .ids import InvalidIdError
    from .listener import Listener
    from .listeners import Listeners
    from .message import ReceivedMessage
    from .stats import ListenerCounts
    from .topic_ids import TopicIdStore

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
    "Backoff": ("backoff", None),
    "Deduplication": ("deduplication", None),
    "HandledIds": ("handled_ids", "window"),
    "InvalidIdError": ("ids", None),
    "Listener": ("listener", None),
    "ListenerCounts": ("stats", None),
    "Listeners": ("listeners", None),
    "ReceivedMessage": ("message", None),
    "Reject": ("failure", None),
    "Retry": ("failure", None),
    "TopicIdStore": ("topic_ids", "window"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'delaylevel.consumer' has no attribute {name!r}")
    module, extra = _LAZY[name]
    try:
        value = getattr(importlib.import_module(f".{module}", __name__), name)
    except ModuleNotFoundError as error:
        if extra is None or (error.name or "").partition(".")[0] == "delaylevel":
            raise
        raise MissingExtraError(
            f"delaylevel.consumer.{name} needs {error.name}: pip install 'delaylevel[{extra}]'"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
