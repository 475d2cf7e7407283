"""The final window: read the window topic, wait for due times, and publish.

Several `Dispatcher` processes share the window partitions. A `PartitionOwner` serves one partition,
and the `journal` records its progress.
"""

from delaylevel.errors import from_extra

with from_extra("window", "a dispatcher needs"):
    from .owner import DispatchSettings
    from .service import Dispatcher
    from .stats import OwnerStats

__all__ = ["DispatchSettings", "Dispatcher", "OwnerStats"]
