"""Long-delayed messages through Apache Pulsar, routed from the client's side."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from delaylevel._version import __version__
from delaylevel.errors import DelayLevelError, MissingExtraError
from delaylevel.strategy import Levels, PartitionBy, PartitionStrategy

if TYPE_CHECKING:
    from delaylevel.client import DelayLevelClient, wrap
    from delaylevel.dedup import Deduplicator
    from delaylevel.producer import DelayLevelProducer
    from delaylevel.timebucket import TimeBucketTracker

__all__ = [
    "Deduplicator",
    "DelayLevelClient",
    "DelayLevelError",
    "DelayLevelProducer",
    "Levels",
    "PartitionBy",
    "PartitionStrategy",
    "TimeBucketTracker",
    "__version__",
    "wrap",
]

# Name -> (module, the extra it needs or None). Loaded on first use, so that importing the package
# stays light.
_LAZY: dict[str, tuple[str, str | None]] = {
    "DelayLevelClient": ("delaylevel.client", None),
    "DelayLevelProducer": ("delaylevel.producer", None),
    "Deduplicator": ("delaylevel.dedup", "window"),
    "TimeBucketTracker": ("delaylevel.timebucket", "window"),
    "wrap": ("delaylevel.client", None),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'delaylevel' has no attribute {name!r}")
    module, extra = _LAZY[name]
    try:
        value = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if extra is None or (error.name or "").partition(".")[0] == "delaylevel":
            raise
        raise MissingExtraError(
            f"delaylevel.{name} needs {error.name}: pip install 'delaylevel[{extra}]'"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
