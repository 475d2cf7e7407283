"""The Spark sync job: a mover, and the data source and sink for Spark."""

from delaylevel.errors import from_extra

with from_extra("spark", f"{__name__} (`delaylevel run` moves messages without Spark) needs"):
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
