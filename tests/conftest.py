"""Fixtures for every test: a real broker, and an environment without the developer's settings.

Where Java or Maven is missing, tests that need a broker are skipped; in CI they fail.

`make pytest` runs the tests in several processes: see ``parallel``.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pulsar
import pytest
import urllib3

from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import BrokerError
from delaylevel.testing.embedded import (
    CONF,
    HEAP_MB,
    delete_namespace,
    new_namespace,
    small_broker,
    start_or_skip,
)
from support.shared_broker import SharedBroker, await_shared
from support.world import quiet_client

# PySpark's workers run in the Python that runs the tests.
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
# Short jobs never make up for the time that the JVM's second compiler takes.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

Conf = Mapping[str, str | int | float | bool]
FAST_CONF: Conf = {
    **CONF,
    "brokerDeduplicationEnabled": False,
    "backlogQuotaCheckIntervalInSeconds": 1,
}
SHARED_HEAP_MB = 768
# `make versions` runs the tests with the servers of several versions.
_VERSION = os.environ.get("DELAYLEVEL_TEST_BROKER_VERSION")
#: Name of the folders with tests that take minutes, or look for what only chance finds.
NIGHT = "night"
_BROKER_FIXTURES = {
    "broker",
    "broker_with",
    "private_broker",
    "connection",
    "namespace",
    "client",
    "secured",
    "embedded_broker",
    "embedded_pulsar",
}

BrokerFactory = Callable[..., EmbeddedBroker]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--night", action="store_true", help="run only what is in folders `night`")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave folders ``night`` out, unless they are asked for or named."""
    inside = NIGHT in collection_path.relative_to(Path(__file__).parent).parts
    if config.getoption("--night"):
        return True if collection_path.is_file() and not inside else None
    named = any(NIGHT in Path(str(each).partition("::")[0]).parts for each in config.args)
    return True if inside and not named else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a broker, so that ``-m "not broker"`` leaves it out."""
    for item in items:
        if _BROKER_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.broker)
    if "PYTEST_XDIST_WORKER" in os.environ:
        from support.parallel import rank

        items.sort(key=rank)


@pytest.hookimpl(optionalhook=True)  # without xdist, there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep tests that share a special broker, or all processors, in one process."""
    from support.parallel import GroupScheduling

    return GroupScheduling(config, log)


# In the process that distributes the tests: the broker of all others.
_owned: SharedBroker | None = None
# In a process that runs tests for another one: the directory of that broker.
_directory: Path | None = None


def pytest_configure(config: pytest.Config) -> None:
    global _directory
    given = getattr(config, "workerinput", {}).get("shared_broker")
    _directory = None if given is None else Path(given)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process that runs tests where the broker of all is."""
    global _owned
    if _owned is None:
        _owned = SharedBroker(partial(_embedded, heap_mb=SHARED_HEAP_MB))
    node.workerinput["shared_broker"] = str(_owned.directory)


def pytest_unconfigure() -> None:
    if _owned is not None:
        _owned.remove()


# Brokers that tests share, by their settings.
_shared: dict[object, EmbeddedBroker] = {}


def _key(conf: Conf, functions: bool) -> object:
    return (tuple(sorted(conf.items())), functions)


_USUAL = _key(FAST_CONF, functions=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Remove brokers with special settings after their group: idle ones use the processors."""
    result = yield
    if "PYTEST_XDIST_WORKER" not in os.environ or nextitem is None:
        return result
    from support.parallel import group

    if group(item.nodeid) != group(nextitem.nodeid):
        for key in [key for key in _shared if key != _USUAL]:
            _shared.pop(key).remove()
    return result


@pytest.fixture(autouse=True)
def _own_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Hide the settings and the running brokers of the person who runs the tests."""
    for name in list(os.environ):
        if name.startswith("DELAYLEVEL_") and not name.startswith("DELAYLEVEL_TEST_"):
            monkeypatch.delenv(name)
    # One process for each dispatcher: several are the subject of tests of their own.
    monkeypatch.setenv("DELAYLEVEL_PROCESSES", "1")
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):  # of the make that runs the tests
        monkeypatch.delenv(name, raising=False)
    nowhere = tmp_path_factory.getbasetemp() / "home"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(nowhere / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(nowhere / "state"))


def _embedded(
    directory: Path,
    conf: Conf | None = None,
    functions: bool = False,
    heap_mb: int = HEAP_MB,
) -> EmbeddedBroker:
    settings = {**FAST_CONF, **(conf or {})}
    return small_broker(
        directory, conf=settings, functions=functions, heap_mb=heap_mb, version=_VERSION
    )


@pytest.fixture(scope="session")
def broker_with(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerFactory]:
    """``broker_with(conf, functions=False)``: a broker shared by the tests of a group with them."""

    def get(conf: Conf | None = None, functions: bool = False) -> EmbeddedBroker:
        key = _key({**FAST_CONF, **(conf or {})}, functions)
        if key == _USUAL and _directory is not None:
            shared = await_shared(_directory, _embedded)
            if shared is not None:
                return shared
        if key not in _shared:
            directory = tmp_path_factory.mktemp("broker")
            _shared[key] = start_or_skip(_embedded(directory, conf, functions))
        return _shared[key]

    try:
        yield get
    finally:
        for broker in _shared.values():
            broker.remove()


@pytest.fixture(scope="session")
def broker(broker_with: BrokerFactory) -> EmbeddedBroker:
    """The embedded broker that tests share; do not stop it."""
    return broker_with()


@pytest.fixture(scope="session")
def embedded_broker(broker: EmbeddedBroker) -> EmbeddedBroker:
    """The broker of the plugin's ``embedded_pulsar``: here, the one that tests share."""
    return broker


@pytest.fixture
def private_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerFactory]:
    """``private_broker(conf, functions=False, heap_mb=…)``: a started broker of the test's own."""
    made: list[EmbeddedBroker] = []

    def make(
        conf: Conf | None = None,
        functions: bool = False,
        heap_mb: int = HEAP_MB,
    ) -> EmbeddedBroker:
        broker = _embedded(tmp_path_factory.mktemp("private"), conf, functions, heap_mb)
        made.append(broker)
        return start_or_skip(broker)

    try:
        yield make
    finally:
        for broker in made:
            broker.remove()


@pytest.fixture(scope="session")
def connection(request: pytest.FixtureRequest) -> Connection:
    """The address of the broker under test."""
    service_url = os.environ.get("DELAYLEVEL_TEST_SERVICE_URL")
    admin_url = os.environ.get("DELAYLEVEL_TEST_ADMIN_URL")
    if service_url or admin_url:
        return Connection.load(service_url=service_url, admin_url=admin_url, environ={})
    broker: EmbeddedBroker = request.getfixturevalue("broker")
    # The processors may be busy.
    return broker.connection.model_copy(update={"operation_timeout_seconds": 60})


class Namespaces:
    """Namespaces that are made ahead, and deleted later: no test waits.

    Now and then, a broker never finishes reading the topic policies of a new namespace, and loads
    none of its topics then (apache/pulsar#25294). So a topic is loaded first, and deleted again.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._made: queue.Queue[str | Exception] = queue.Queue(1)
        self._used: queue.Queue[str] = queue.Queue()
        self._present: set[str] = set()
        for each in (self._make, self._delete):
            threading.Thread(target=each, name="namespaces", daemon=True).start()

    @contextmanager
    def take(self) -> Iterator[str]:
        name = self._made.get()
        if isinstance(name, Exception):
            raise name
        yield name
        self._used.put(name)

    def close(self) -> None:
        """Delete all of them."""
        self._used.join()
        for name in list(self._present):
            delete_namespace(self._connection, name)

    def _make(self) -> None:
        while True:
            self._made.put(self._one())

    def _one(self) -> str | Exception:
        reason = ""
        for _ in range(3):
            try:
                name = new_namespace(self._connection)
                self._present.add(name)
                url = f"{self._connection.admin_url}/admin/v2/persistent/{name}/first"
                with urllib3.PoolManager(timeout=30, retries=False) as http:
                    if http.request("PUT", url).status == 204:
                        http.request("DELETE", url)
                        return name
            except (BrokerError, urllib3.exceptions.HTTPError) as error:
                reason = str(error)
        return AssertionError(f"the broker loads no topics in new namespaces: {reason}")

    def _delete(self) -> None:
        while True:
            name = self._used.get()
            with suppress(urllib3.exceptions.HTTPError):
                delete_namespace(self._connection, name)
                self._present.discard(name)
            self._used.task_done()


@pytest.fixture(scope="session")
def namespaces() -> Iterator[dict[str, Namespaces]]:
    """The namespaces of the tests of this process, by broker."""
    made: dict[str, Namespaces] = {}
    yield made
    if "DELAYLEVEL_TEST_SERVICE_URL" in os.environ:  # any other broker is thrown away
        for each in made.values():
            each.close()


@pytest.fixture
def namespace(connection: Connection, namespaces: dict[str, Namespaces]) -> Iterator[str]:
    """A new namespace, so that tests do not affect each other."""
    url = connection.admin_url
    if url not in namespaces:
        namespaces[url] = Namespaces(connection)
    with namespaces[url].take() as name:
        yield name


@pytest.fixture
def client(connection: Connection) -> Iterator[pulsar.Client]:
    """A Pulsar client without a log, closed at the end."""
    client = quiet_client(connection)
    yield client
    with suppress(pulsar.AlreadyClosed):  # while another thread closes one of its producers
        client.close()
