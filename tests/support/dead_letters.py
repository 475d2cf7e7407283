"""Helpers that the tests of dead letters share."""

from __future__ import annotations

from datetime import timedelta

from delaylevel.model.strategy import Levels, PartitionStrategy

MINUTES = Levels(PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(minutes=5)))
