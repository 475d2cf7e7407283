"""The part of a source partition that one task of Spark reads."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

from delaylevel.cluster.reader import read_range
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import Position, SourcePartition

from .options import SyncOptions
from .runtime import runtime


@dataclass
class InputRange(InputPartition):
    """The part of a source partition that one task reads.

    Attributes:
        source: the partition.
        start: the first position.
        end: the first position after the range.
        now_ms: the time of the plan, ms since the epoch: the ``routed_at`` of the messages.
    """

    source: SourcePartition
    start: Position
    end: Position
    now_ms: int

    def read(self, options: SyncOptions) -> Generator[ParkedMessage, None, None]:
        """Yield the messages of the range."""
        return read_range(
            runtime(options).client,
            self.source.topic,
            self.start,
            self.end,
            options.poll_timeout_ms,
        )
