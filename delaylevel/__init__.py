"""Long-delayed messages on Apache Pulsar, routed by the client through delay-level topics."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from delaylevel.errors import DelayLevelError, from_extra

if TYPE_CHECKING:
    from delaylevel.consumer.listeners import Listeners
    from delaylevel.model.outcome import Outcome, OutcomeStatus, Receipt, Rescheduled
    from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
    from delaylevel.producer.client import DelayLevelClient, WrapWarning, wrap
    from delaylevel.producer.producer import DelayLevelProducer
    from delaylevel.structures.deduplicator import Deduplicator
    from delaylevel.structures.tracker import TimeBucketTracker

__version__ = "0.1.0"

# In a checkout, three parts of the package are folders next to this one (setup.cfg maps them).
_FOLDER = os.path.dirname(__file__)
if not os.path.isdir(os.path.join(_FOLDER, "cli")):
    __path__ = [*__path__, os.path.dirname(_FOLDER)]

__all__ = [
    "Deduplicator",
    "DelayLevelClient",
    "DelayLevelError",
    "DelayLevelProducer",
    "Levels",
    "Listeners",
    "Outcome",
    "OutcomeStatus",
    "PartitionBy",
    "PartitionStrategy",
    "Receipt",
    "Rescheduled",
    "TimeBucketTracker",
    "WrapWarning",
    "__version__",
    "wrap",
]

# Name -> (module, required extra or None). Loaded on first use, so that importing the package
# stays cheap: pytest imports it in every run, for the plugin in `delaylevel.testing`.
_LAZY: dict[str, tuple[str, str | None]] = {
    "DelayLevelClient": ("delaylevel.producer.client", None),
    "DelayLevelProducer": ("delaylevel.producer.producer", None),
    "Levels": ("delaylevel.model.strategy", None),
    "PartitionBy": ("delaylevel.model.strategy", None),
    "PartitionStrategy": ("delaylevel.model.strategy", None),
    "Listeners": ("delaylevel.consumer.listeners", None),
    "Outcome": ("delaylevel.model.outcome", None),
    "OutcomeStatus": ("delaylevel.model.outcome", None),
    "Receipt": ("delaylevel.model.outcome", None),
    "Rescheduled": ("delaylevel.model.outcome", None),
    "Deduplicator": ("delaylevel.structures.deduplicator", "window"),
    "TimeBucketTracker": ("delaylevel.structures.tracker", "window"),
    "WrapWarning": ("delaylevel.producer.client", None),
    "wrap": ("delaylevel.producer.client", None),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'delaylevel' has no attribute {name!r}")
    module, extra = _LAZY[name]
    with from_extra(extra, f"delaylevel.{name} needs"):
        value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
