"""The settings of a sync job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .cluster import Executors


@dataclass(frozen=True)
class SyncSettings:
    """The settings of a sync job.

    Attributes:
        level_topics: the level topics to serve, each by its own name or by its business topic's.
        checkpoint: the folder of the query's checkpoint: a path, or a URI of any file system that
            Hadoop knows.
        once: True to move the messages that are ready now and end; False to run until stopped.
        trigger_ms: the interval between two batches, in ms; by default a fifth of the shortest
            lead, between 0.2 and 5 s.
        master: Spark's master.
        options: further options of the source, e.g. ``startingOffsets``.
        spark_conf: further Spark settings.
        executors: what the executors of a cluster receive; unused with a local master.
        metrics_port: the port that serves metrics for Prometheus; 0 for any free port, None for
            no metrics.
        metrics_address: the address of the interface that serves the metrics.
    """

    level_topics: tuple[str, ...]
    checkpoint: str
    once: bool = False
    trigger_ms: int | None = None
    master: str = "local[2]"
    options: Mapping[str, str] = field(default_factory=dict)
    spark_conf: Mapping[str, str] = field(default_factory=dict)
    executors: Executors = field(default_factory=Executors)
    metrics_port: int | None = None
    metrics_address: str = "127.0.0.1"
