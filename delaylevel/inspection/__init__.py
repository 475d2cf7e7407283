"""Looking at what is pending: when it comes out, who it is for, and what it is.

Everything here only reads: nothing is acknowledged, moved or locked, and no subscription is left.

    with Inspector.connect(connection, "orders") as orders:
        print(orders.horizon().messages)
        table = orders.table(Selection(due=Window(from_ms, before_ms), where="size > 1000"))
"""

from delaylevel.topics.scan import Window

from .horizon import Bucket, DueWithin, Horizon, Part
from .inspector import Inspector
from .selection import Selection

__all__ = ["Bucket", "DueWithin", "Horizon", "Inspector", "Part", "Selection", "Window"]
