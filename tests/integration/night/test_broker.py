"""The life cycle of the embedded broker, with real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from delaylevel.broker.conf import archive_path
from delaylevel.broker.distribution import java
from delaylevel.broker.embedded import (
    BrokerStatus,
    EmbeddedBroker,
    RegistrationMonitor,
    prepare,
    running_instance,
)
from delaylevel.cli.main import cli
from delaylevel.cluster.rest.admin import Admin
from delaylevel.errors import AlreadyRunningError, BrokerError, BrokerUnreachableError
from support.world import eventually, quiet_client

TOPIC = "persistent://public/default/kept"
SUBSCRIPTION = "reader"


CONF: dict[str, str | int | float | bool] = {
    "brokerDeduplicationEnabled": False,
    "journalSyncData": False,
    "delayedDeliveryTickTimeMillis": 250,
    "subscriptionExpirationTimeMinutes": 7,
}


@pytest.fixture(scope="module")
def own(
    tmp_path_factory: pytest.TempPathFactory, started: Callable[[EmbeddedBroker], EmbeddedBroker]
) -> Iterator[EmbeddedBroker]:
    """A broker that the tests of this module may stop and kill; each test leaves it running."""
    broker = EmbeddedBroker(
        "own",
        directory=tmp_path_factory.mktemp("own"),
        conf=CONF,
        heap_mb=256,
        follow_parent=True,
    )
    try:
        yield started(broker)
    finally:
        broker.remove()


def publish(broker: EmbeddedBroker, count: int) -> None:
    client = quiet_client(broker.connection)
    try:
        client.subscribe(TOPIC, SUBSCRIPTION).close()
        producer = client.create_producer(TOPIC)
        for number in range(count):
            producer.send(str(number).encode())
    finally:
        client.close()


def received(broker: EmbeddedBroker, count: int) -> list[int]:
    client = quiet_client(broker.connection)
    try:
        consumer = client.subscribe(TOPIC, SUBSCRIPTION)
        return [int(consumer.receive(timeout_millis=60_000).data()) for _ in range(count)]
    finally:
        client.close()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_a_prepared_server_starts_with_the_archive_of_its_classes(own: EmbeddedBroker) -> None:
    home = prepare()
    own.stop()
    pid = own.start().pid
    archive = archive_path(home, java())
    assert str(archive) in Path(f"/proc/{pid}/maps").read_text()
    assert " INFO " in own.logs()  # the log configuration applies


def test_everything_listens_on_loopback_and_on_our_ports(own: EmbeddedBroker) -> None:
    """This includes the storage node, which once took a port for outgoing connections."""
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
        admin.health()

    again = broker.start()
    assert (again.service_url, again.admin_url) == (first.service_url, first.admin_url)
    assert again.pid != first.pid
    assert received(broker, 50) == list(range(50))

    assert broker.kill()
    assert not broker.status().running
    assert not broker.kill()
    after_crash = broker.start()
    # One start in four finds the storage node's earlier registration at the wrong moment. Such a
    # broker is not ready, although it reports that it is.
    assert not RegistrationMonitor(broker.log_file).is_looping()
    assert (after_crash.service_url, after_crash.admin_url) == (first.service_url, first.admin_url)
    assert received(broker, 50) == list(range(50))


def test_a_second_start_names_the_running_process(broker: EmbeddedBroker) -> None:
    twin = EmbeddedBroker("test", directory=broker.directory)
    with pytest.raises(AlreadyRunningError) as caught:
        twin.start()
    assert str(broker.status().pid) in str(caught.value)
    assert broker.status().service_url in str(caught.value)
    assert twin.status() == broker.status(), "another process sees the same instance"


def test_two_starts_at_once_make_one_broker(own: EmbeddedBroker) -> None:
    broker = own
    broker.stop()
    outcomes: list[BrokerStatus | AlreadyRunningError] = []

    def start() -> None:
        try:
            outcomes.append(EmbeddedBroker("own", directory=broker.directory).start())
        except AlreadyRunningError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(outcome).__name__ for outcome in outcomes) == [
        "AlreadyRunningError",
        "BrokerStatus",
    ]


def test_a_broker_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    broker = EmbeddedBroker("test", directory=tmp_path, conf={"webServicePortTls": "not-a-port"})
    with pytest.raises(BrokerError) as caught:
        broker.start()
    assert "before it was ready" in str(caught.value)
    assert str(broker.log_file) in str(caught.value)
    assert not broker.status().running


def test_the_broker_ends_when_its_parent_dies(tmp_path: Path) -> None:
    program = (
        "import sys; from delaylevel.broker import EmbeddedBroker\n"
        "b = EmbeddedBroker('test', directory=sys.argv[1], heap_mb=256, follow_parent=True)\n"
        "b.start(); print('ready', flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    broker = EmbeddedBroker("test", directory=tmp_path)
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


def test_from_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    runner = CliRunner()
    try:
        started = runner.invoke(cli, ["broker", "start", "--heap-mb", "256", "-o", "json"])
        assert started.exit_code == 0, started.output
        shown = json.loads(started.stdout)
        assert shown["state"] == "running"
        running = running_instance()
        assert running is not None
        assert running.service_url == shown["service_url"]

        again = runner.invoke(cli, ["broker", "start"])
        assert again.exit_code == 0
        assert "runs already" in again.stderr
        changed = runner.invoke(cli, ["broker", "start", "--broker-conf", "a=b"])
        assert changed.exit_code == 1
        assert str(shown["pid"]) in changed.stderr

        listed = runner.invoke(cli, ["broker", "status"])
        assert listed.exit_code == 0
        assert listed.stdout.splitlines()[0].split()[:2] == ["NAME", "STATE"]
        assert shown["admin_url"] in listed.stdout

        (one,) = json.loads(runner.invoke(cli, ["broker", "status", "-o", "json"]).stdout)
        assert Path(one["log_file"]).read_text("utf-8")
    finally:
        stopped = runner.invoke(cli, ["broker", "stop", "--delete-data"])
    assert stopped.exit_code == 0
    assert "is stopped" in stopped.stderr
    assert not any((tmp_path / "delaylevel" / "brokers").iterdir())
    assert runner.invoke(cli, ["broker", "status", "--name", "default"]).exit_code == 3
    assert "does not run" in runner.invoke(cli, ["broker", "stop"]).stderr
