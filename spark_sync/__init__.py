"""The Spark sync job: a thin host of the router."""

from .job import SparkSyncJob, SyncSettings
from .source import DelayLevelDataSource

__all__ = ["DelayLevelDataSource", "SparkSyncJob", "SyncSettings"]
