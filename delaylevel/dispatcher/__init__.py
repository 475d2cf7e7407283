"""The final window's service: reads the window topic, waits for due times, publishes.

`Dispatcher` shares out window partitions among those that run; a `Pump` owns one of them.
"""

from delaylevel.dispatcher.figures import PartitionFigures
from delaylevel.dispatcher.service import Dispatcher, DispatchSettings

__all__ = ["DispatchSettings", "Dispatcher", "PartitionFigures"]
