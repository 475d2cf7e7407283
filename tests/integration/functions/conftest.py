"""Fixtures for tests of the Function on a real functions worker.

``connection``   a broker with a functions worker, which the other fixtures use too
``deployed``     ``deployed(description, …)``: deploy the Function; it is deleted afterwards
``collector``    ``collector(topic, …)``: collect all arriving messages in the background
``ranges``       the number of acknowledged ranges that the level topic's cursors keep
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pulsar
import pytest

from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.http import Rest
from delaylevel.errors import DelayLevelError
from delaylevel.functions import deployment
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription, Role


@pytest.fixture(scope="session")
def functions_broker(broker_with: Callable[..., EmbeddedBroker]) -> EmbeddedBroker:
    """The broker that tests of the Function share."""
    return broker_with({}, functions=True)


@pytest.fixture
def connection(functions_broker: EmbeddedBroker) -> Connection:
    patience = {"operation_timeout_seconds": 60}  # other tests share its processors
    return functions_broker.connection.model_copy(update=patience)


@pytest.fixture
def deployed(
    connection: Connection,
) -> Iterator[Callable[..., deployment.Deployed]]:
    """``deployed(description, parallelism=1, …)``; more arguments go to FunctionOptions."""
    made: list[tuple[LevelTopicDescription, str]] = []

    def deploy(description: LevelTopicDescription, **options: Any) -> deployment.Deployed:
        found = deployment.deploy(connection, description, deployment.FunctionOptions(**options))
        made.append((description, found.function))
        return found

    yield deploy
    for description, function in made:
        with contextlib.suppress(DelayLevelError):
            deployment.delete(connection, description, function)


class Collector:
    """A receiver in its own thread that keeps IDs and arrivals by body."""

    def __init__(self, client: pulsar.Client, topic: str) -> None:
        self.ids: dict[bytes, list[str | None]] = defaultdict(list)
        self.late_ms: list[int] = []
        self._stop = threading.Event()
        self._consumer = client.subscribe(
            topic,
            "application",
            consumer_type=pulsar.ConsumerType.Shared,
            initial_position=pulsar.InitialPosition.Earliest,
        )
        self._thread = threading.Thread(target=self._run, name="collector", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        clock = SystemClock()
        while not self._stop.is_set():
            try:
                message = self._consumer.receive(200)
            except pulsar.Timeout:
                continue
            except pulsar.PulsarException:
                if self._stop.is_set():
                    return
                continue
            properties = message.properties()
            self.ids[message.data()].append(properties.get("delaylevel.id"))
            self.late_ms.append(clock.now_ms() - int(properties["delaylevel.due"]))
            with contextlib.suppress(pulsar.PulsarException):
                self._consumer.acknowledge(message)

    @property
    def duplicates(self) -> int:
        """The number of received copies beyond the first of each message."""
        return sum(len(ids) - 1 for ids in list(self.ids.values()))

    def check_identities(self) -> None:
        """Check that copies of a message share one ID, and that different messages do not."""
        for body, ids in self.ids.items():
            assert None not in ids
            assert len(set(ids)) == 1, f"{body!r} arrived with the IDs {ids}"
        assert len({ids[0] for ids in self.ids.values()}) == len(self.ids)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)


@pytest.fixture
def collector(client: pulsar.Client) -> Iterator[Callable[[str], Collector]]:
    made: list[Collector] = []

    def start(topic: str) -> Collector:
        made.append(Collector(client, topic))
        return made[-1]

    yield start
    for item in made:
        item.stop()


@pytest.fixture
def ranges(connection: Connection) -> Callable[[LevelTopicDescription], int]:
    """``ranges(description)``: the most acknowledged ranges that a level's partition keeps now."""
    rest = Rest(connection.admin_url)

    def count(description: LevelTopicDescription) -> int:
        most = 0
        for member in description.members():
            if member.role is not Role.LEVEL:
                continue
            path = f"{member.topic.rest_path}/partitioned-stats"
            stats: Mapping[str, Any] = rest.get(path, perPartition="true")
            for partition in stats["partitions"].values():
                at = partition["subscriptions"][SUBSCRIPTION]
                most = max(most, int(at["nonContiguousDeletedMessagesRanges"]))
        return most

    return count
