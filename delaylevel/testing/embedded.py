"""A namespace on a real private broker, for tests of an application."""

from __future__ import annotations

import os
import tempfile
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import urllib3

from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.logs import silent
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.rest.http import Rest, options_of
from delaylevel.errors import ConflictError, PrerequisiteError
from delaylevel.producer.client import DelayLevelClient

if TYPE_CHECKING:
    from typing_extensions import Self

CONF: dict[str, str | int | float | bool] = {
    "forceDeleteNamespaceAllowed": True,
    "journalSyncData": False,  # only a crash of the machine would lose something
    # Tests read what is published to a topic without a subscription.
    "defaultRetentionTimeInMinutes": 60,
    "defaultRetentionSizeInMB": -1,
}
HEAP_MB = 256
# A broker on a machine whose processors are busy takes longer than the client's default.
_TIMEOUT_S = 60
# The broker may refuse to delete a namespace for a moment, for example while a topic is opened.
_WHILE_TOPICS_CHANGE = urllib3.Retry(
    3, backoff_factor=0.2, status_forcelist=(409, 422, 500, 503), raise_on_status=False
)


def small_broker(directory: Path, **options: Any) -> EmbeddedBroker:
    """Return a small broker that ends with this process; it is not started."""
    version = os.environ.get("DELAYLEVEL_BROKER_VERSION")
    settings = {"conf": CONF, "heap_mb": HEAP_MB, "version": version, **options}
    return EmbeddedBroker(directory, follow_parent=True, **settings)


def start_or_skip(broker: EmbeddedBroker) -> EmbeddedBroker:
    """Start a broker, and return it; without Java or Maven, skip the present test.

    It fails if the environment variable ``CI`` is set, so that a lack of them is noticed there.
    """
    import pytest

    try:
        broker.start()
    except PrerequisiteError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))
    return broker


def new_namespace(connection: Connection) -> str:
    """Create a namespace ``public/test-…``, and return its name."""
    name = f"public/test-{uuid.uuid4().hex[:12]}"
    rest = Rest(connection.admin_url, **options_of(connection))
    # A conflict: an earlier try of the same call, whose answer came too late, has created it.
    with closing(rest), suppress(ConflictError):
        rest.put(f"namespaces/{name}")
    return name


def delete_namespace(connection: Connection, name: str) -> None:
    """Delete a namespace with its topics; it stays if the broker keeps refusing that."""
    url = f"{connection.admin_url}/admin/v2/namespaces/{name}"
    with urllib3.PoolManager(timeout=30) as http:
        http.request("DELETE", url, fields={"force": "true"}, retries=_WHILE_TOPICS_CHANGE)


class EmbeddedPulsar:
    """A namespace of a test's own on a real broker, as the fixture ``embedded_pulsar`` gives it.

    As a context manager, it closes every client and deletes the namespace at the end.

    Args:
        connection: the address of the broker.

    Attributes:
        connection: the address of the broker; ``connection.service_url`` and
            ``connection.admin_url`` are those of the settings of an application.
        namespace: full name of the namespace, ``public/test-…``.
        admin: admin interface of the broker.
    """

    def __init__(self, connection: Connection) -> None:
        timeout = {"operation_timeout_seconds": _TIMEOUT_S}
        self.connection = connection.model_copy(update=timeout)
        with ExitStack() as stack:
            self.namespace = new_namespace(connection)
            stack.callback(delete_namespace, connection, self.namespace)
            self.admin = stack.enter_context(Admin.from_connection(self.connection))
            self._stack = stack.pop_all()

    def topic(self, name: str) -> str:
        """Return the full name of a topic in the namespace.

        Args:
            name: local name of the topic.
        """
        return f"persistent://{self.namespace}/{name}"

    def client(self, **options: Any) -> DelayLevelClient:
        """Return a new client with admin access; the end of the test closes it.

        Args:
            options: further arguments of the client.
        """
        settings = {"logger": silent(), **options}
        client = DelayLevelClient.from_connection(self.connection, **settings)
        self._stack.callback(client.shutdown)
        return client

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Run a mover and a dispatcher for all level topics of the namespace during the block.

        Level topics that exist at the beginning are served at once, later ones within 5 s.

        Raises:
            DelayLevelError: the service failed.
        """
        from delaylevel.dispatcher import DispatchSettings
        from delaylevel.run import LocalService

        started = threading.Event()
        with (
            tempfile.TemporaryDirectory(prefix="delaylevel-") as directory,
            ThreadPoolExecutor(1, "delaylevel-serving") as pool,
        ):
            settings = DispatchSettings(Path(directory))
            open_client = partial(self.connection.open_client, logger=silent())
            service = LocalService(open_client, self.admin, (), settings, namespace=self.namespace)
            with closing(service):
                running = pool.submit(service.run, started.set)
                # One that fails never ticks.
                running.add_done_callback(lambda _: started.set())
                try:
                    started.wait()
                    yield
                finally:
                    service.stop()
                    running.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()
