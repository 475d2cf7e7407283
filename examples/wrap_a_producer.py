"""Wrap a producer that exists, and send a message that is due in three days.

python examples/wrap_a_producer.py sends to the configured broker, or to that of
`delaylevel broker start`. `delaylevel run orders` delivers it.
"""

from __future__ import annotations

from datetime import timedelta

import pulsar

from delaylevel import DelayLevelClient, PartitionStrategy, wrap
from delaylevel.config import Connection


def remind(client: pulsar.Client, order: str) -> None:
    """Send a reminder through a producer of the application."""
    plain = client.create_producer("orders")  # your producer, with its own options
    producer = wrap(
        plain, client, partition_strategy=PartitionStrategy(maximum_delay=timedelta(days=30))
    )
    producer.send(f"pay {order}".encode(), partition_key=order, deliver_after=timedelta(days=3))
    producer.send(f"received {order}".encode(), partition_key=order)  # no delay: as before
    producer.close()


if __name__ == "__main__":
    quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    with DelayLevelClient.from_connection(Connection.load(), logger=quiet) as connected:
        remind(connected, "order-17")
        print("Sent: one message at once, and one that is due in three days.")
        print("See: delaylevel pending list orders")
