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

from delaylevel.testing.memory.client import MemoryClient

from .admin import MemoryAdmin
from .clock import ManualClock
from .pulsar import MemoryPulsar, TopicMessage

__all__ = ["ManualClock", "MemoryAdmin", "MemoryClient", "MemoryPulsar", "TopicMessage"]
