"""A listener whose failed messages are retried after minutes and hours.

python -m examples.listener_with_retries calls it for the messages of `orders`, and `delaylevel run
orders` moves the retries.
"""

from __future__ import annotations

from delaylevel.consumer import Backoff, Listeners, ReceivedMessage, Reject


class Bank:
    """A service that may not answer."""

    def __init__(self) -> None:
        self.charged: list[str] = []

    def charge(self, order: str) -> None:
        """Charge an order once."""
        self.charged.append(order)


bank = Bank()
app = Listeners.from_config()


@app.on("orders", subscription="billing", retry=Backoff("10s", "5m", "2h"), deduplicate=True)
def bill(message: ReceivedMessage) -> None:
    """Charge an order; an exception is a failed attempt."""
    if not message.data:
        raise Reject("an order without contents")  # a dead letter, without another attempt
    bank.charge(message.data.decode())


if __name__ == "__main__":
    app.run()
