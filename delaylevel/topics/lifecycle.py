"""Operations on existing level topics: expansion, settings, deletion, orphans."""

from .deletion import PendingEntries, delete, pending_entries
from .expansion import expand, longer_levels
from .orphans import Orphan, orphans
from .settings import pause, resume, set_expiry, set_on_missing_target

__all__ = [
    "Orphan",
    "PendingEntries",
    "delete",
    "expand",
    "longer_levels",
    "orphans",
    "pause",
    "pending_entries",
    "resume",
    "set_expiry",
    "set_on_missing_target",
]
