"""Requests of the admin REST interface about stored messages: ledgers, cursors and positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from delaylevel.errors import NotFoundError
from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName

from . import parsing as read
from .http import Rest
from .values import AcknowledgedRange, LedgerInfo, TopicMetadata

#: Parameters of requests for statistics.
STATS = {
    "getPreciseBacklog": "true",
    "subscriptionBacklogSize": "false",
    "getEarliestTimeInBacklog": "true",
}


class BaseAdmin:
    """The part of the admin client that knows where messages are stored.

    Args:
        rest: HTTP client of the admin interface.
    """

    def __init__(self, rest: Rest) -> None:
        self._rest = rest

    def partitioned_metadata(self, topic: TopicName) -> TopicMetadata:
        value = self._rest.get(f"{topic.rest_path}/partitions", checkAllowAutoCreation="false")
        return TopicMetadata(int(value["partitions"]), value.get("properties") or {})

    def internal_stats(self, partition: TopicName) -> dict[str, Any]:
        """Return the broker's own description of the ledgers and cursors of one partition.

        An open ledger has 0 entries there; ``currentLedgerEntries`` has their number.
        """
        return dict(self._rest.get(f"{partition.rest_path}/internalStats"))

    def ledgers(self, partition: TopicName) -> list[LedgerInfo]:
        return read.ledgers(self.internal_stats(partition))

    def contents(self, partition: TopicName) -> tuple[list[LedgerInfo], int]:
        """Return a partition's ledgers, and its number of entries since the broker opened it."""
        value = self.internal_stats(partition)
        return read.ledgers(value), int(value.get("entriesAddedCounter", 0))

    def mark_delete_position(self, partition: TopicName, subscription: str) -> Position:
        return Position.parse(self._cursor(partition, subscription)["markDeletePosition"])

    def acknowledged_ranges(
        self, partition: TopicName, subscription: str
    ) -> tuple[AcknowledgedRange, ...]:
        return read.acknowledged_ranges(
            self._cursor(partition, subscription).get("individuallyDeletedMessages", "")
        )

    def _cursor(self, partition: TopicName, subscription: str) -> Mapping[str, Any]:
        cursors = self.internal_stats(partition)["cursors"]
        if subscription not in cursors:
            reason = f"{partition} has no subscription {subscription!r}"
            raise NotFoundError(reason, status=404, reason=reason)
        found: Mapping[str, Any] = cursors[subscription]
        return found

    def last_message_id(self, partition: TopicName) -> Position | None:
        position = read.position(self._rest.get(f"{partition.rest_path}/lastMessageId"))
        return position if position.entry >= 0 else None

    def open_transaction_at(self, partition: TopicName) -> Position | None:
        stats = self._rest.get(f"{partition.rest_path}/stats", **STATS)
        if not stats.get("ongoingTxnCount"):
            return None
        path = partition.rest_path.removeprefix("persistent/")
        path = f"transactions/transactionBufferStats/{path}"
        answer = self._rest.request("GET", path, api="v3")
        return read.text_position(answer.json()["maxReadPosition"]).next_entry

    def message_id_at(self, partition: TopicName, publish_ms: int) -> Position | None:
        path = f"{partition.rest_path}/messageid/{max(publish_ms, 0)}"
        position = read.position(self._rest.get(path)).entry_start
        # Past the end the broker returns the position of the next message.
        last = self.last_message_id(partition)
        return position if last is not None and position <= last else None
