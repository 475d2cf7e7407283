"""The final window's service: reads the window topic, waits for due times, publishes.

`Dispatcher` shares out window partitions among those that run; a `PartitionOwner` owns one of them.
"""

from .service import Dispatcher, DispatchSettings
from .stats import OwnerStats

#: The earlier name of `OwnerStats`.
PartitionFigures = OwnerStats

__all__ = ["DispatchSettings", "Dispatcher", "OwnerStats", "PartitionFigures"]
