"""Dispatchers for the level topics that tests create."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pulsar

from delaylevel.cluster.rest.admin import Admin
from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.errors import DelayLevelError
from delaylevel.model.level_topic import MEMBER_PROPERTY, FinalWindow, LevelTopicDescription
from delaylevel.model.topic_name import TopicName

from .broker import SuiteBroker

log = logging.getLogger(__name__)

_LOOK_S = 0.3
# A test sends soon after it has created its producer. Older level topics are not looked at.
_YOUNG_S = 60.0
_TENANTS = ("public", "private")


class Dispatchers:
    """A thread that starts a dispatcher for each level topic whose window has a message."""

    def __init__(self, broker: SuiteBroker, client: pulsar.Client, folder: Path) -> None:
        self._client = client
        self._admin = Admin(broker.admin_url, token=broker.superuser)
        self._broker = broker
        self._folder = folder
        self._stopping = threading.Event()
        self._seen: set[str] = set()
        self._young: dict[str, tuple[float, LevelTopicDescription]] = {}
        self._services: list[Dispatcher] = []
        self._threads = [threading.Thread(target=self._run, daemon=True)]

    def start(self) -> None:
        """Start the thread."""
        self._threads[0].start()

    def stop(self) -> None:
        """End all dispatchers and the thread."""
        self._stopping.set()
        self._threads[0].join()
        for service in self._services:
            service.stop()
        for thread in self._threads:
            thread.join()
        self._admin.close()

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            with contextlib.suppress(DelayLevelError):
                self._look()

    def _look(self) -> None:
        """Find new level topics, and those of the young ones that have messages in the window."""
        now = time.monotonic()
        for namespace in self._broker.namespaces(_TENANTS):
            for name in self._admin.list_partitioned_topics(namespace):
                if name.full not in self._seen:
                    with contextlib.suppress(DelayLevelError):  # perhaps it was deleted
                        self._find(name, now)
        for full, (since, description) in list(self._young.items()):
            if self._has_messages(description.window_topic):
                self._serve(description)
                del self._young[full]
            elif now - since > _YOUNG_S:
                del self._young[full]

    def _find(self, name: TopicName, now: float) -> None:
        """Take a new level topic among the young ones; skip one that is not complete yet."""
        properties = self._admin.partitioned_metadata(name).properties
        described = None
        if properties.get(MEMBER_PROPERTY) == name.full:
            described = LevelTopicDescription.from_properties(name.full, properties)
            if described is None:
                return
        self._seen.add(name.full)
        if described is not None and described.final_window is FinalWindow.TRACKER:
            self._young[described.topic] = now, described

    def _has_messages(self, window: TopicName) -> bool:
        stats = self._admin.partitioned_stats(window)
        return any(partition.messages_in for partition in stats.values())

    def _serve(self, description: LevelTopicDescription) -> None:
        settings = DispatchSettings(directory=self._folder / str(len(self._services)))
        service = Dispatcher(self._client, self._admin, [description.topic], settings)
        thread = threading.Thread(target=service.run, daemon=True)
        thread.start()
        self._services.append(service)
        self._threads.append(thread)


@contextlib.contextmanager
def alongside(broker: SuiteBroker, service_url: str, folder: Path) -> Iterator[None]:
    """Run dispatchers for all level topics with the final window ``tracker``."""
    authentication = pulsar.AuthenticationToken(broker.superuser)
    client = pulsar.Client(
        service_url,
        authentication=authentication,
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )
    dispatchers = Dispatchers(broker, client, folder)
    dispatchers.start()
    try:
        yield
    finally:
        dispatchers.stop()
        client.close()
