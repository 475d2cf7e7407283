"""Fixtures for tests of the Function on a real functions worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import DelayLevelError
from delaylevel.functions import deployment
from delaylevel.model.level_topic import LevelTopicDescription, Mover
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.world import RealWorld

TWO_LEVELS = Levels(
    [
        PartitionStrategy(partition_by=timedelta(seconds=4), maximum_delay=timedelta(seconds=16)),
        PartitionStrategy(partition_by=timedelta(seconds=1), maximum_delay=timedelta(seconds=6)),
    ]
)


@pytest.fixture
def connection(broker_with: Callable[..., EmbeddedBroker]) -> Connection:
    """The address of the broker that tests of the Function share."""
    patience = {"operation_timeout_seconds": 60}  # other tests share its processors
    return broker_with(functions=True).connection.model_copy(update=patience)


@pytest.fixture
def description(world: RealWorld) -> LevelTopicDescription:
    """A level topic that a Function moves."""
    return world.level_topic(TWO_LEVELS, mover=Mover.FUNCTION, hold_pause_ms=2000)


@pytest.fixture
def producer(world: RealWorld, description: LevelTopicDescription) -> Any:
    return world.producer(description.targets[0], partition_strategy=description.levels)


@pytest.fixture
def deployed(
    connection: Connection,
) -> Iterator[Callable[..., deployment.Deployed]]:
    """``deployed(description, parallelism=1, …)``; more arguments go to FunctionOptions."""
    made: list[LevelTopicDescription] = []

    def deploy(description: LevelTopicDescription, **options: Any) -> deployment.Deployed:
        found = deployment.deploy(connection, description, deployment.FunctionOptions(**options))
        made.append(description)
        return found

    yield deploy
    for description in made:
        with contextlib.suppress(DelayLevelError):
            deployment.delete(connection, description)
