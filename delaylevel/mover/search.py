"""The search for ready messages, which goes on without the admin interface.

The admin interface tells positions, so that a search reads few entries for their publish times.
While no address of it answers, but brokers serve the partitions, the search reads all messages from
the start instead, up to the first one that is not ready. So a mover reads ready messages twice
then. The other search passes a message whose publish time is far in the future. This one does not:
what is behind such a message waits until the admin interface answers again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

from delaylevel.cluster.failures import is_admin_away, translate_errors
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.reader import PartitionReader, entry_times
from delaylevel.cluster.repeated_warning import RepeatedWarning
from delaylevel.errors import BrokerError
from delaylevel.model.position import Position
from delaylevel.model.source_partition import SourcePartition

from .ready import ReadyBound
from .ready_queue import ReadyRange, first_due_ms, ready_range

log = logging.getLogger(__name__)

# One search reads no more messages than a mover hands off before it confirms them.
_MOST_READ = 20_000
_WAIT_MS = 1_000


class ReadySearch:
    """Finds the ready messages of the partitions that a mover has locked.

    Any number of threads may use it.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        connected: function that returns True if the partition locks are connected: brokers serve
            the partitions, whatever the admin interface does.
        subject: the mover, for warnings.
    """

    def __init__(
        self, client: Any, admin: TopicAdmin, connected: Callable[[], bool], subject: str
    ) -> None:
        self._client = client
        self._admin = admin
        self._connected = connected
        self._warning = RepeatedWarning(log, subject)

    def ready_range(
        self,
        source: SourcePartition,
        start: Position,
        now_ms: int,
        lead_ms: int,
        next_check_ms: int,
    ) -> ReadyRange:
        """Return the ready messages of a partition; see :func:`.ready_queue.ready_range`.

        Raises:
            BrokerError: neither the admin interface nor the partition can be read.
        """
        try:
            times = partial(entry_times, self._client, source.topic)
            found = ready_range(self._admin, times, source, start, now_ms, lead_ms, next_check_ms)
        except BrokerError as error:
            if not is_admin_away(error) or not self._connected():
                raise
            self._warning.failed(f"reading messages to find the ready ones, because {error}")
            return read_ready_range(self._client, source, start, now_ms, lead_ms)
        self._warning.over()
        return found


def read_ready_range(
    client: Any, source: SourcePartition, start: Position, now_ms: int, lead_ms: int
) -> ReadyRange:
    """Return the ready messages of a partition by reading them.

    Args:
        start, now_ms, lead_ms: as for :func:`delaylevel.mover.ready.ready_bound`.

    Raises:
        BrokerError: the partition cannot be read.
    """
    ready_until_ms, soon_ms = source.ready_until_ms(now_ms), now_ms + max(1, lead_ms // 2)
    end, next_check_ms, first_ms = start, now_ms, 0
    with translate_errors(), closing(PartitionReader(client, source.topic, start)) as reader:
        for _ in range(_MOST_READ):
            if end == start and not reader.has_message_available():
                message = None
            else:
                message = reader.receive(_WAIT_MS)
                if message is None and reader.has_message_available():
                    raise BrokerError(f"{source.topic} has messages but delivered none in time")
            published_ms = now_ms if message is None else message.publish_timestamp()
            if message is None or published_ms > ready_until_ms:
                # It is looked at again soon, as the publish time of one message may be wrong.
                next_check_ms = min(source.ready_ms(published_ms), soon_ms)
                break
            message_id = message.message_id()
            end = Position(message_id.ledger_id(), message_id.entry_id() + 1)
            first_ms = first_ms or published_ms
    ready_ms = source.ready_ms(first_ms) if first_ms else now_ms
    bound = ReadyBound(end, next_check_ms)
    return ReadyRange(source, bound, first_due_ms(source, ready_ms, now_ms))
