"""Queries about pending messages: their numbers by time until due, and the messages themselves.

All queries only read. They acknowledge, move and lock nothing, and leave no subscription behind.

    with Inspector.connect(connection, "orders") as orders:
        print(orders.horizon().messages)
        table = orders.table(Selection(due=Window(from_ms, before_ms), where="size > 1000"))
"""

from delaylevel.topics.scan import Window

from .horizon import Bucket, DueWithin, Horizon
from .inspector import Inspector
from .selection import Selection

__all__ = ["Bucket", "DueWithin", "Horizon", "Inspector", "Selection", "Window"]
