"""Tests of the embedded broker's prerequisites, files and processes; no broker is started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from delaylevel.broker import distribution, process
from delaylevel.broker.conf import environment, write_conf
from delaylevel.broker.embedded import (
    EmbeddedBroker,
    RegistrationLoopError,
    RegistrationMonitor,
    instances,
    running_instance,
    wait_ready,
)
from delaylevel.cluster.connection import local_brokers
from delaylevel.errors import BrokerError, InvalidInputError, PrerequisiteError


def program(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


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
    ("java", "mvn", "error"),
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
    empty_machine: Path, java: str | None, mvn: str | None, error: str
) -> None:
    if java is not None:
        program(empty_machine, "java", f"""echo 'openjdk version "{java}" 2025-04-15' >&2""")
    if mvn is not None:
        program(empty_machine, "mvn", mvn)
    with pytest.raises(PrerequisiteError, match=error):
        distribution.fetch()
    assert not distribution.is_fetched()


def test_java_home_overrides_the_path(
    empty_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(empty_machine, "java", """echo 'openjdk version "11"' >&2""")
    java = program(tmp_path / "jdk" / "bin", "java", """echo 'openjdk version "21"' >&2""")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    assert distribution.java() == str(java)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    with pytest.raises(PrerequisiteError, match="JAVA_HOME"):
        distribution.java()


def test_a_broken_archive_leaves_nothing_behind(empty_machine: Path) -> None:
    program(empty_machine, "java", """echo 'openjdk version "17"' >&2""")
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
        EmbeddedBroker("x", version=version)
    with pytest.raises(InvalidInputError, match="not the full version"):
        distribution.fetch(version=version)


def test_a_version_that_does_not_exist(empty_machine: Path) -> None:
    program(empty_machine, "java", """echo 'openjdk version "17"' >&2""")
    program(
        empty_machine, "mvn", "echo '[ERROR] Could not find artifact server:9.9.9 in there'; exit 1"
    )
    for version in ("4.0.8", "3.0.17"):
        fetched = distribution.distribution_directory(version)
        program(fetched / "bin", "pulsar", "exit 0")
    with pytest.raises(
        PrerequisiteError,
        match=r"(?s)no Pulsar server 9\.9\.9.*release.*already: 3\.0\.17, 4\.0\.8\..*Could not",
    ):
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
        ("4.10.0", "4.9.9", None),
        ("4.0.8", "3.3.9", None),
    ],
)
def test_a_server_older_than_the_data_is_not_started(
    empty_machine: Path, tmp_path: Path, stored: str | None, given: str | None, starts: str | None
) -> None:
    directory = tmp_path / "instance"
    if stored is not None:
        (directory / "data").mkdir(parents=True)
        local_brokers.save_version(directory, stored)
    for version in filter(None, (stored, given, "4.0.8")):
        home = distribution.distribution_directory(version)
        program(home / "bin", "pulsar", f"echo this is {version}")
        (home / "conf").mkdir(exist_ok=True)
        for name in ("standalone.conf", "broker.conf", "bookkeeper.conf", "functions_worker.yml"):
            (home / "conf" / name).touch()
    program(empty_machine, "java", """echo 'openjdk version "17"' >&2""")
    broker = EmbeddedBroker("other", directory=directory, version=given)
    if starts is None:
        wrote = stored
        with pytest.raises(
            InvalidInputError, match=rf"Pulsar {wrote} has written.*{given}, which is older.*--name"
        ):
            broker.start()
        assert not broker.log_file.exists()
        assert broker.status().version == wrote
        return
    with pytest.raises(BrokerError, match=rf"(?s)ended with code 0.*this is {starts}"):
        broker.start()
    assert broker.status().version == starts


def test_configuration_overrides_replace_and_add(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    conf = tmp_path / "home" / "conf"
    conf.mkdir(parents=True)
    (conf / "standalone.conf").write_text("# tick=1\nbrokerServicePort=6650\nstrict=false\n")
    (conf / "broker.conf").write_text("# commentedOut=1\n")
    (conf / "bookkeeper.conf").write_text("")
    (conf / "functions_worker.yml").write_text(
        "downloadDirectory: download\nuseTls: false\nconfigs:\n    logDirectory: logs/\n"
    )
    write_conf(
        tmp_path / "home",
        tmp_path / "instance" / "conf",
        service_port=1,
        web_port=2,
        overrides={
            "strict": "true",
            "commentedOut": "5",
            "typo": "1",
            "webServicePort": "9",
            "useTls": "true",
        },
    )
    written = (tmp_path / "instance" / "conf" / "standalone.conf").read_text().splitlines()
    settings = [line for line in written if line and not line.startswith("#")]
    loopback = "lo" if sys.platform == "linux" else "lo0"
    assert sorted(settings) == [
        f"STORAGE_PATH={tmp_path}/instance/data/packages",
        "allowEphemeralPorts=true",
        "backlogQuotaDefaultLimitGB=-1",
        "bindAddress=127.0.0.1",
        "brokerServicePort=1",
        "commentedOut=5",
        "dispatcherDispatchMessagesInSubscriptionThread=false",
        "journalWriteBufferSizeKB=8192",
        f"listeningInterface={loopback}",
        "strict=true",
        "typo=1",
        "webServicePort=2",
    ]
    assert "'typo'" in caplog.text
    assert "commentedOut" not in caplog.text
    worker = (tmp_path / "instance" / "conf" / "functions_worker.yml").read_text()
    assert f"downloadDirectory: {tmp_path}/instance/download" in worker
    assert f"    logDirectory: {tmp_path}/instance/logs" in worker
    assert "useTls: false" not in worker
    assert '\nuseTls: "true"' in worker


def test_settings_of_another_pulsar_are_not_inherited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("PULSAR_EXTRA_OPTS", "BOOKIE_CONF", "OPTS"):
        monkeypatch.setenv(name, "foreign")
    environ = environment(tmp_path, java="/jdk/bin/java", functions=True, heap_mb=256)
    assert "foreign" not in environ.values()
    assert "-Xmx256m" in environ["PULSAR_MEM"]
    path = environ["PATH"].split(os.pathsep)
    assert path[0] == str(Path(sys.executable).parent), "functions would run with another Python"
    without = environment(tmp_path, java="/jdk/bin/java", functions=False, heap_mb=256)
    assert without["PATH"].split(os.pathsep)[0] == "/jdk/bin"


def test_only_a_process_of_ours_is_ended() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "input()", "delaylevel-marker"], stdin=subprocess.PIPE
    )
    try:
        assert process.is_ours(child.pid, " delaylevel-marker ")
        assert not process.kill(child.pid, " another-marker ")
        assert process.end(child.pid, " another-marker ", timeout_seconds=1)
        assert child.poll() is None
        assert process.end(child.pid, " delaylevel-marker ", timeout_seconds=10)
        assert not process.is_ours(child.pid, " delaylevel-marker "), "a zombie counts as alive"
    finally:
        child.kill()
        child.communicate()
    assert child.returncode == -15


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


@pytest.mark.parametrize("name", ["", "../other", "a b", "-x", "a/b"])
def test_invalid_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="is not a valid name"):
        EmbeddedBroker(name)


def test_queries_without_an_instance_create_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert instances() == []
    assert running_instance() is None
    status = EmbeddedBroker("default").status()
    assert (status.running, status.pid, status.started_ms) == (False, None, None)
    assert EmbeddedBroker("default").logs() == ""
    assert list(tmp_path.iterdir()) == [], "a query has created files"


INVALIDATED = (
    "2026-11-21T11:36:39,249+0000 [metadata-store-1-1] INFO  org.apache.pulsar.metadata."
    "coordination.impl.ResourceLockImpl - Lock on resource /ledgers/available/127.0.0.1:20815 was "
    "invalidated. state Valid\n"
)


def test_a_registration_loop_of_the_storage_node_is_detected(tmp_path: Path) -> None:
    log = tmp_path / "broker.log"
    monitor = RegistrationMonitor(log)
    assert not monitor.is_looping(), "a loop without a log"
    log.write_text("Starting\n" + INVALIDATED.replace("ledgers/available", "loadbalance") * 9)
    assert not monitor.is_looping()
    with log.open("a") as file:
        file.write(INVALIDATED * 4 + INVALIDATED[:150])
    assert not monitor.is_looping(), "a few registrations count as a loop"
    with log.open("a") as file:
        file.write(INVALIDATED[150:])
    assert monitor.is_looping()
    assert monitor.is_looping()


def test_a_broker_in_a_registration_loop_is_not_ready(tmp_path: Path) -> None:
    log = tmp_path / "broker.log"
    log.write_text(INVALIDATED * 9)
    with pytest.raises(RegistrationLoopError, match="registers in an endless loop"):
        wait_ready(
            "http://127.0.0.1:1",
            functions=False,
            token=None,
            exit_code=lambda: None,
            log_file=log,
            timeout_seconds=60,
        )


def test_a_process_that_ignores_sigterm_is_killed() -> None:
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); input()",
            "delaylevel-marker",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()
    try:
        assert not process.end(child.pid, " delaylevel-marker ", timeout_seconds=0.2)
    finally:
        child.kill()
        child.communicate()
    assert child.returncode == -9
