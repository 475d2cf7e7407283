"""The final window: read the window topic, wait for due times, and publish.

Several `Dispatcher` processes share the window partitions. A `PartitionOwner` serves one partition,
and the `journal` records its progress.
"""

from .service import Dispatcher
from .settings import DispatchSettings
from .stats import OwnerStats

#: The earlier name of `OwnerStats`.
PartitionFigures = OwnerStats

__all__ = ["DispatchSettings", "Dispatcher", "OwnerStats", "PartitionFigures"]
