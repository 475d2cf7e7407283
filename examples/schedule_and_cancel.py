"""Schedule reminders, take one back, and give another one a later time.

python examples/schedule_and_cancel.py sends to the configured broker, or to that of
`delaylevel broker start`, and says what to look at.
"""

from __future__ import annotations

from datetime import timedelta

import pulsar

from delaylevel import DelayLevelClient
from delaylevel.config import Connection


class Reminders:
    """The reminders of an application, with their receipts."""

    def __init__(self, client: DelayLevelClient) -> None:
        self._producer = client.create_producer("bills", enable_delay_level_topic=True)
        self._receipts: dict[str, str] = {}  # in an application: a column of the orders

    def schedule(self, order: str, after: timedelta) -> None:
        """Send a reminder that can be taken back."""
        receipt = self._producer.schedule(f"pay {order}".encode(), deliver_after=after)
        self._receipts[order] = str(receipt)

    def paid(self, order: str) -> str:
        """Take the reminder back; return what became of it."""
        return str(self._producer.cancel(self._receipts[order]).status)

    def later(self, order: str, after: timedelta) -> None:
        """Replace the reminder by one with another due time."""
        moved = self._producer.reschedule(self._receipts[order], deliver_after=after)
        self._receipts[order] = str(moved.receipt)


if __name__ == "__main__":
    quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    with DelayLevelClient.from_connection(Connection.load(), logger=quiet) as connected:
        reminders = Reminders(connected)
        reminders.schedule("order-17", timedelta(days=3))
        reminders.schedule("order-18", timedelta(days=3))
        print("Two reminders are scheduled, for order-17 and order-18, in three days.")
        print("The cancellation for order-17 is", reminders.paid("order-17"))
        reminders.later("order-18", timedelta(days=5))
        print("order-18 is due in five days. See: delaylevel pending list bills")
