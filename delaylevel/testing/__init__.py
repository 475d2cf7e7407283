"""An in-memory Pulsar and a manual clock, for tests of delayed messages without a broker.

Example::

    def test_the_reminder_is_sent_three_days_later():
        with MemoryPulsar() as pulsar:
            producer = pulsar.client().create_producer("reminders", enable_delay_level_topic=True)
            producer.send(b"call Ada", deliver_after=timedelta(days=3))

            pulsar.advance(timedelta(days=2, hours=23))
            assert pulsar.delivered("reminders") == []
            pulsar.advance(timedelta(hours=1))
            assert [message.data for message in pulsar.delivered("reminders")] == [b"call Ada"]

No call blocks: a call that would have to wait raises ``pulsar.Timeout`` at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from delaylevel.testing.memory.broker import Crashed
    from delaylevel.testing.memory.client import MemoryClient

    from .admin import MemoryAdmin
    from .clock import ManualClock
    from .embedded import EmbeddedPulsar
    from .pulsar import MemoryPulsar, TopicMessage

__all__ = [
    "Crashed",
    "EmbeddedPulsar",
    "ManualClock",
    "MemoryAdmin",
    "MemoryClient",
    "MemoryPulsar",
    "TopicMessage",
]

# Name -> module. Loaded on first use: pytest imports this package in every run, for the plugin.
_LAZY = {
    "Crashed": "delaylevel.testing.memory.broker",
    "EmbeddedPulsar": "delaylevel.testing.embedded",
    "ManualClock": "delaylevel.testing.clock",
    "MemoryAdmin": "delaylevel.testing.admin",
    "MemoryClient": "delaylevel.testing.memory.client",
    "MemoryPulsar": "delaylevel.testing.pulsar",
    "TopicMessage": "delaylevel.testing.pulsar",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'delaylevel.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)  # for completion, which would not see what is not loaded yet
