"""The final window: read the window topic, wait for due times, and publish.

Several `Dispatcher` processes share the window partitions. A `PartitionOwner` serves one partition,
and the `journal` records its progress.
"""

from delaylevel.errors import MissingExtraError

try:
    from .owner import DispatchSettings
    from .service import Dispatcher
    from .stats import OwnerStats
except ModuleNotFoundError as error:
    if (error.name or "").startswith("delaylevel"):
        raise
    raise MissingExtraError(
        f"a dispatcher needs {error.name}: pip install 'delaylevel[window]'", name=error.name
    ) from error

__all__ = ["DispatchSettings", "Dispatcher", "OwnerStats"]
