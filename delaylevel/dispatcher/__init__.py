"""The final window's service: reads the window topic, waits for due times, publishes.

`Dispatcher` shares out window partitions among those that run; a `Pump` owns one of them.
"""

from .service import Dispatcher, DispatchSettings
from .stats import PartitionFigures

__all__ = ["DispatchSettings", "Dispatcher", "PartitionFigures"]
