"""The life cycle of the embedded broker, with real processes, and with that of a test session."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import urllib3

from delaylevel.broker import BrokerStatus, EmbeddedBroker
from delaylevel.cluster.rest.admin import Admin
from delaylevel.errors import AlreadyRunningError, BrokerError, BrokerUnreachableError
from delaylevel.testing import EmbeddedPulsar
from delaylevel.testing.embedded import small_broker, start_or_skip
from support.python import python
from support.world import eventually, quiet_client

# A test starts up to three brokers, each of which may take 300 s where processors are busy.
pytestmark = [pytest.mark.broker, pytest.mark.timeout(900)]

TOPIC = "persistent://public/default/kept"
SUBSCRIPTION = "reader"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A broker that the tests of this module may stop and kill; each test leaves it running."""
    broker = small_broker(tmp_path_factory.mktemp("own"))
    try:
        yield start_or_skip(broker)
    finally:
        broker.remove()


def publish(broker: EmbeddedBroker, count: int) -> None:
    with closing(quiet_client(broker.connection)) as client:
        client.subscribe(TOPIC, SUBSCRIPTION).close()
        producer = client.create_producer(TOPIC)
        for number in range(count):
            producer.send(str(number).encode())


def received(broker: EmbeddedBroker, count: int) -> list[int]:
    with closing(quiet_client(broker.connection)) as client:
        consumer = client.subscribe(TOPIC, SUBSCRIPTION)
        return [int(consumer.receive(timeout_millis=60_000).data()) for _ in range(count)]


def test_everything_listens_on_loopback_and_on_our_ports(own: EmbeddedBroker) -> None:
    """Also the storage node, which once took a port for outgoing connections."""
    table = Path("/proc/net/tcp")
    if not table.exists():
        pytest.skip("only Linux lists the listening ports in a file")
    saved = json.loads((own.directory / "instance.json").read_text())
    ports = {saved["service_port"], saved["web_port"], saved["bookie_port"]}
    listening = {}
    for file in (table, table.with_name("tcp6")):
        for line in file.read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, port = local.partition(":")
            if state == "0A" and int(port, 16) in ports:
                listening[int(port, 16)] = address[-8:]
    assert listening == dict.fromkeys(ports, "0100007F")


def test_messages_survive_a_restart_and_a_crash(own: EmbeddedBroker) -> None:
    broker = own
    first = broker.status()
    publish(broker, 50)

    assert broker.stop()
    stopped = broker.status()
    assert not stopped.running
    assert stopped.pid is None
    assert not broker.stop(), "a stopped broker does not stop again"
    with pytest.raises(BrokerError, match="is not running"):
        _ = broker.connection
    with Admin(first.admin_url) as admin, pytest.raises(BrokerUnreachableError, match="refused"):
        admin.version()

    again = broker.start()
    assert (again.service_url, again.admin_url) == (first.service_url, first.admin_url)
    assert again.pid != first.pid
    assert received(broker, 50) == list(range(50))

    assert broker.kill()
    assert not broker.status().running
    assert not broker.kill()
    after_crash = broker.start()
    assert (after_crash.service_url, after_crash.admin_url) == (first.service_url, first.admin_url)
    assert received(broker, 50) == list(range(50))


def test_two_starts_at_once_make_one_broker(own: EmbeddedBroker) -> None:
    own.stop()

    def start(_: int) -> BrokerStatus | AlreadyRunningError:
        try:
            return EmbeddedBroker(own.directory).start()
        except AlreadyRunningError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        found = sorted(pool.map(start, range(2)), key=lambda each: type(each).__name__)
    refused, status = found
    assert isinstance(refused, AlreadyRunningError)
    assert status == own.status(), "another process sees the same instance"
    assert str(own.status().pid) in str(refused)


def test_the_broker_ends_when_its_parent_dies(tmp_path: Path) -> None:
    program = (
        "import sys; from delaylevel.broker import EmbeddedBroker\n"
        "b = EmbeddedBroker(sys.argv[1], heap_mb=256, follow_parent=True)\n"
        "b.start(); print('ready', flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    broker = EmbeddedBroker(tmp_path)
    try:
        assert parent.stdout.readline() == b"ready\n"
        assert broker.status().running
        parent.kill()
        parent.communicate()
        eventually(lambda: not broker.status().running, "the end of the broker")
    finally:
        parent.kill()
        parent.communicate()
        broker.stop()


def test_the_namespace_is_deleted_with_its_topics(embedded_pulsar: EmbeddedPulsar) -> None:
    connection = embedded_pulsar.connection
    with EmbeddedPulsar(connection) as other:
        assert other.namespace != embedded_pulsar.namespace
        other.client().create_producer(other.topic("orders")).send(b"x")
        names = other.admin.list_namespaces("public")
        assert {other.namespace, embedded_pulsar.namespace} <= set(names)
    assert other.namespace not in embedded_pulsar.admin.list_namespaces("public")


def test_the_broker_ends_with_the_session(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
        from pathlib import Path

        def test_two_tests_share_a_broker(embedded_pulsar, embedded_broker):
            Path("url").write_text(embedded_pulsar.connection.admin_url)
            assert embedded_pulsar.connection.admin_url == embedded_broker.connection.admin_url

        def test_but_have_their_own_namespaces(embedded_pulsar):
            assert Path("url").read_text() == embedded_pulsar.connection.admin_url
            assert embedded_pulsar.admin.list_topics(embedded_pulsar.namespace) == []
        """)
    )
    options = ("-p", "delaylevel.testing.plugin", "-p", "no:cacheprovider")
    done = python("-m", "pytest", *options, f"--basetemp={tmp_path}/base", cwd=tmp_path)
    assert "2 passed" in done.stdout, done.stdout
    with pytest.raises(urllib3.exceptions.HTTPError):
        urllib3.request("GET", (tmp_path / "url").read_text(), retries=False, timeout=5)
