"""Tests of the embedded broker's prerequisites, files and processes; no broker is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from delaylevel.broker import distribution, embedded, process
from delaylevel.broker.embedded import EmbeddedBroker, environment, write_conf
from delaylevel.cli.main import cli
from delaylevel.cluster.connection import local_brokers
from delaylevel.cluster.connection.local_brokers import BrokerStatus
from delaylevel.errors import BrokerError, InvalidInputError, PrerequisiteError

LOOPBACK = "pulsar://127.0.0.1:20001"


def program(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def java(folder: Path, version: str = "17") -> Path:
    return program(folder, "java", f"""echo 'openjdk version "{version}" 2025-04-15' >&2""")


def fake_server(version: str, script: str) -> None:
    home = distribution.distribution_directory(version)
    program(home / "bin", "pulsar", script)
    (home / "conf").mkdir(exist_ok=True)
    for name in ("standalone.conf", "broker.conf", "bookkeeper.conf", "functions_worker.yml"):
        (home / "conf" / name).touch()


@pytest.fixture
def empty_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The only folder on the PATH, empty, on a machine without Java, Maven and Pulsar."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return folder


@pytest.mark.parametrize(
    ("version", "mvn", "error"),
    [
        (None, None, r"needs Java.*openjdk-17"),
        ("11.0.2", None, r"is Java 11, which is too old.*openjdk-17"),
        ("1.8.0_452", None, "is Java 8, which is too old"),
        ("17-internal", None, r"`mvn` is not on the PATH.*apt install maven"),
        (
            "21",
            "echo '[ERROR] Unknown host'; exit 1",
            r"(?s)exit code 1.*settings\.xml.*Unknown host",
        ),
    ],
)
def test_a_missing_prerequisite_is_named_with_its_remedy(
    empty_machine: Path, version: str | None, mvn: str | None, error: str
) -> None:
    if version is not None:
        java(empty_machine, version)
    if mvn is not None:
        program(empty_machine, "mvn", mvn)
    with pytest.raises(PrerequisiteError, match=error):
        distribution.fetch()
    assert not distribution.is_fetched()


def test_java_home_overrides_the_path(
    empty_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java(empty_machine, "11")
    newer = java(tmp_path / "jdk" / "bin", "21")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    assert distribution.java() == str(newer)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    with pytest.raises(PrerequisiteError, match="JAVA_HOME"):
        distribution.java()


def test_a_broken_archive_leaves_nothing_behind(empty_machine: Path) -> None:
    java(empty_machine)
    program(
        empty_machine,
        "mvn",
        'for a in "$@"; do case $a in -DoutputDirectory=*) d=${a#*=};; esac; done\n'
        "echo broken > $d/pulsar-server-distribution-4.0.8-bin.tar.gz",
    )
    with pytest.raises(PrerequisiteError, match="cannot be unpacked"):
        distribution.fetch()
    folder = distribution.distribution_directory().parent
    assert [path.name for path in folder.iterdir()] == ["apache-pulsar-4.0.8.lock"]


@pytest.mark.parametrize("version", ["", "4", "4.0", "latest", "4.0.8/../..", "v4.0.8", "-4.0.8"])
def test_a_text_that_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(InvalidInputError, match=r"not the full version.*like 4\.0\.8.*releases"):
        distribution.fetch(version=version)


def test_a_version_that_does_not_exist(empty_machine: Path) -> None:
    java(empty_machine)
    program(empty_machine, "mvn", "echo '[ERROR] Could not find artifact'; exit 1")
    fake_server("3.0.17", "exit 0")
    with pytest.raises(PrerequisiteError, match=r"(?s)server.*:9\.9\.9:.*release.*Could not find"):
        distribution.fetch(version="9.9.9")
    assert not distribution.is_fetched("9.9.9")
    assert distribution.fetch(version="3.0.17").name == "apache-pulsar-3.0.17"


@pytest.mark.parametrize(
    ("stored", "given", "starts"),
    [
        (None, None, "4.0.8"),
        (None, "3.0.17", "3.0.17"),
        ("3.3.9", None, "3.3.9"),
        ("3.3.9", "4.0.8", "4.0.8"),
    ],
)
def test_the_last_version_is_started_again(
    empty_machine: Path, tmp_path: Path, stored: str | None, given: str | None, starts: str
) -> None:
    for version in filter(None, (stored, given, "4.0.8")):
        fake_server(version, f"echo this is {version}")
    java(empty_machine)

    def start_in_vain(chosen: str | None, starts: str) -> None:
        broker = EmbeddedBroker(tmp_path / "instance", version=chosen)
        with pytest.raises(BrokerError, match=rf"(?s)ended with code 0.*this is {starts}"):
            broker.start()
        assert broker.status().version == starts

    if stored is not None:
        start_in_vain(stored, stored)
    start_in_vain(given, starts)


def test_configuration_overrides_replace_and_add(
    tmp_path: Path,
) -> None:
    home, written = tmp_path / "home", tmp_path / "instance" / "conf"
    (home / "conf").mkdir(parents=True)
    for name, text in {
        "standalone.conf": "# tick=1\nbrokerServicePort=6650\nstrict=false\n",
        "broker.conf": "# commentedOut=1\n",
        "bookkeeper.conf": "",
        "functions_worker.yml": "downloadDirectory: x\nuseTls: false\n  logDirectory: logs/\n",
    }.items():
        (home / "conf" / name).write_text(text)
    overrides = {"strict": "true", "commentedOut": "5", "other": "1", "webServicePort": "9"}
    overrides |= {"useTls": "true"}
    write_conf(home, BrokerStatus(written.parent, service_port=1, web_port=2), overrides)
    settings = (written / "standalone.conf").read_text().splitlines()
    expected = {"brokerServicePort=1", "webServicePort=2", "bindAddress=127.0.0.1"}
    expected |= {"strict=true", "commentedOut=5", "other=1", "backlogQuotaDefaultLimitGB=-1"}
    expected |= {f"STORAGE_PATH={tmp_path}/instance/data/packages"}
    assert expected <= set(settings)
    assert not {"strict=false", "brokerServicePort=6650", "webServicePort=9"} & set(settings)
    worker = (written / "functions_worker.yml").read_text().splitlines()
    assert f"downloadDirectory: {tmp_path}/instance/download" in worker
    assert f"  logDirectory: {tmp_path}/instance/logs" in worker
    assert [line for line in worker if "useTls" in line] == ['useTls: "true"']


def test_settings_of_another_pulsar_are_not_inherited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("PULSAR_EXTRA_OPTS", "BOOKIE_CONF", "OPTS"):
        monkeypatch.setenv(name, "foreign")
    environ = environment(tmp_path, "/jdk/bin/java", 256, functions=True)
    assert "foreign" not in environ.values()
    assert "-Xmx256m" in environ["PULSAR_MEM"]
    path = environ["PATH"].split(os.pathsep)
    assert path[0] == str(Path(sys.executable).parent), "functions would run with another Python"
    without = environment(tmp_path, "/jdk/bin/java", 256)
    assert without["PATH"].split(os.pathsep)[0] == "/jdk/bin"


@contextmanager
def child(script: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that ends at the end of its input, and waits for it."""
    command = [sys.executable, "-c", f"{script}; print(flush=True); input()", "delaylevel-marker"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_only_a_process_of_ours_is_ended() -> None:
    with child("pass") as running:
        assert process.is_ours(running.pid, " delaylevel-marker ")
        assert not process.kill(running.pid, " another-marker ")
        assert process.end(running.pid, " another-marker ", timeout_seconds=1)
        assert running.poll() is None
        assert process.end(running.pid, " delaylevel-marker ", timeout_seconds=10)
        assert not process.is_ours(running.pid, " delaylevel-marker "), "a zombie counts as alive"
    assert running.returncode == -15


def test_a_process_that_ignores_sigterm_is_killed() -> None:
    with child("import signal; signal.signal(15, signal.SIG_IGN)") as running:
        assert not process.end(running.pid, " delaylevel-marker ", timeout_seconds=0.2)
        assert running.wait(60) == -9


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may complete a write")
def test_kill_waits_for_the_end_of_a_write(tmp_path: Path) -> None:
    """Leave no half record at the end of a journal, as a plain SIGKILL would."""
    size = 30_000
    writer = (
        "import os, sys; out = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)\n"
        f"while True: os.write(out, bytes({size}))"
    )
    for number in range(20):
        path = tmp_path / str(number)
        child = subprocess.Popen([sys.executable, "-S", "-c", writer, path, "kill-marker"])
        try:
            while not (path.exists() and path.stat().st_size):
                time.sleep(0.001)
            assert process.kill(child.pid, " kill-marker ")
        finally:
            child.kill()
            child.wait()
        assert child.returncode == -9
        assert path.stat().st_size % size == 0
        path.unlink()


def test_queries_without_an_instance_create_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    status = EmbeddedBroker().status()
    assert (status.running, status.pid, status.started_ms) == (False, None, 0)
    assert EmbeddedBroker().logs() == ""
    assert list(tmp_path.iterdir()) == [], "a query has created files"


def test_a_running_broker_is_left_as_it_is_unless_it_should_be_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    call = partial(CliRunner().invoke, cli)
    absent = call(["broker", "status", "-o", "json"])
    assert (absent.exit_code, json.loads(absent.stdout)["state"]) == (3, "stopped")
    directory = local_brokers.usual_directory()
    directory.mkdir(parents=True)
    local_brokers.save_status(BrokerStatus(directory, 5, 20_001, 20_002, version="4.0.8"))
    monkeypatch.setattr(local_brokers, "is_ours", lambda pid, marker: pid == 5)
    for options in ("", " --version 4.0.8"):
        same = call(f"broker start{options} -o json".split())
        assert (same.exit_code, json.loads(same.stdout)["service_url"]) == (0, LOOPBACK)
    for options in ("--functions", "--version 3.3.6"):
        other = call(f"broker start {options}".split())
        assert (other.exit_code, "is already running (Pulsar 4.0.8" in other.stderr) == (1, True)


def test_a_start_waits_for_one_in_another_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(local_brokers, "is_ours", lambda pid, marker: pid == 5)
    directory = local_brokers.usual_directory()
    ready = []

    @contextmanager
    def other_start(path: Path) -> Iterator[None]:
        local_brokers.save_status(BrokerStatus(directory, 5, 20_001, 20_002, version="4.0.8"))
        ready.append(path)
        yield

    monkeypatch.setattr(embedded, "locked", other_start)
    for count in (1, 2):  # the second one sees a process, which may not be ready
        done = CliRunner().invoke(cli, ["broker", "start", "-o", "json"])
        assert (done.exit_code, len(ready)) == (0, count)
        assert json.loads(done.stdout)["service_url"] == LOOPBACK


INVALIDATED = (
    "2026-11-21T11:36:39,249+0000 [metadata-store-1-1] INFO  org.apache.pulsar.metadata."
    "coordination.impl.ResourceLockImpl - Lock on resource /ledgers/available/127.0.0.1:20815 was "
    "invalidated. state Valid\n"
)


def test_a_broker_in_a_registration_loop_is_started_again(
    empty_machine: Path, tmp_path: Path
) -> None:
    java(empty_machine)
    fake_server("4.0.8", "while :; do /bin/sleep 0.1; done")
    broker = EmbeddedBroker(tmp_path / "instance")
    broker.log_file.parent.mkdir(parents=True)
    for text in (INVALIDATED.replace("ledgers/available", "loadbalance") * 9, INVALIDATED * 4):
        broker.log_file.write_text(text)
        assert not broker._is_registering()
    (tmp_path / "log").write_text(INVALIDATED * 5)
    fake_server("4.0.8", f"/bin/cat {tmp_path}/log; while :; do /bin/sleep 0.1; done")
    with pytest.raises(BrokerError, match="registers in an endless loop"):
        broker.start()
    assert not broker.status().running
