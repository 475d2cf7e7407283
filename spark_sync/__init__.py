"""The Spark sync job: a mover, and the data source and sink for Spark."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from delaylevel.errors import from_extra

if TYPE_CHECKING:
    from .job import SparkSyncJob, default_checkpoint
    from .options import SyncSettings, connection_options
    from .source import DelayLevelDataSource, pending

__all__ = [
    "DelayLevelDataSource",
    "SparkSyncJob",
    "SyncSettings",
    "connection_options",
    "default_checkpoint",
    "pending",
]

_MODULES = {
    "DelayLevelDataSource": "source",
    "SparkSyncJob": "job",
    "SyncSettings": "options",
    "connection_options": "options",
    "default_checkpoint": "job",
    "pending": "source",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    what = f"{__name__}.{name} (`delaylevel run` moves messages without Spark) needs"
    with from_extra("spark", what):
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
