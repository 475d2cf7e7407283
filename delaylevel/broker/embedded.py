"""A real Pulsar broker, private to this user and without Docker, for tests and first steps."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import urllib3
from pydantic import SecretStr

from delaylevel.cluster.connection.local_brokers import (
    BrokerStatus,
    marker,
    save_status,
    status_of,
    usual_directory,
)
from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import AlreadyRunningError, BrokerError, InvalidInputError

from . import process
from .distribution import PULSAR_VERSION, Report, fetch, java, locked

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
# Logged by the broker when the registration of its storage node (bookie) is deleted.
_INVALIDATED = re.compile(rb"Lock on resource /ledgers/available/\S+ was invalidated")
_MAX_INVALIDATED = 4
_START_ATTEMPTS = 5
_PORT_WAIT_SECONDS = 5
ConfValue = str | int | float | bool

# Environment variables of another Pulsar or BookKeeper on the same machine, not to be inherited.
_FOREIGN_PREFIXES = ("PULSAR_", "BOOKIE_", "BK_", "OTEL_")

_OUR_DEFAULTS = {
    # With true, a Shared subscription of 4.0.8 receives some delayed entries twice while others
    # are published: the end of one dispatch starts another read before the next dispatch runs.
    "dispatcherDispatchMessagesInSubscriptionThread": "false",
    # Without it, the storage node (bookie) ignores the port of the command line and takes one from
    # the range for outgoing connections.
    "allowEphemeralPorts": "true",
    # Pulsar's own for a cluster. That of standalone, 10 GB, needs a note at each new level topic.
    "backlogQuotaDefaultLimitGB": "-1",
    # One write then becomes one piece of the journal, which kill() does not tear.
    "journalWriteBufferSizeKB": "8192",
}


class EmbeddedBroker:
    """Pulsar standalone with its own data and its own loopback ports.

    A later start in the same directory uses the same server and ports. As a context manager, it
    starts the broker and stops it at the end.

    Args:
        directory: directory of its data; None for that of ``delaylevel broker``, in the state
            directory of this user.
        functions: True to run the functions worker.
        conf: settings of ``standalone.conf``, or of the functions worker.
        heap_mb: maximum Java heap, MB.
        token: token of a superuser, if ``conf`` requires one; it is not stored.
        follow_parent: True to end the broker when this process dies for any reason.
        report: function that receives lines about the progress of fetching and starting.
        version: version of the server, e.g. ``3.3.6``; None for that of the last start, at first
            `PULSAR_VERSION`.

    Raises:
        InvalidInputError: the directory cannot be used.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        functions: bool = False,
        conf: Mapping[str, ConfValue] | None = None,
        heap_mb: int = 400,
        token: str | None = None,
        follow_parent: bool = False,
        report: Report = log.info,
        version: str | None = None,
    ) -> None:
        self.directory = Path(usual_directory() if directory is None else directory).absolute()
        if re.search(r"\s", str(self.directory)):
            raise InvalidInputError(
                f"Pulsar's start script does not support blanks in a path ({self.directory}): "
                "choose another directory"
            )
        self._version = version
        self._functions = functions
        self._conf = {
            name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in (conf or {}).items()
        }
        self._heap_mb = heap_mb
        self._token = token
        self._follow_parent = follow_parent
        self._report = report
        self._child: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None

    @property
    def log_file(self) -> Path:
        """Output of the broker since its last start; that of the start before is in ``.log.1``."""
        return self.directory / "logs" / "broker.log"

    @property
    def connection(self) -> Connection:
        """Connection settings for the broker.

        Raises:
            BrokerError: the broker is not running.
        """
        status = self.status()
        if not status.running:
            raise BrokerError("The private broker is not running: start it first.")
        return Connection(
            service_url=status.service_url,
            admin_url=status.admin_url,
            token=SecretStr(self._token) if self._token else None,
        )

    def start(self, *, timeout_seconds: float = 300) -> BrokerStatus:
        """Start the broker and wait until it is healthy and has its default namespace.

        Args:
            timeout_seconds: maximum wait of one attempt, seconds.

        Returns:
            The status, with the addresses.

        Raises:
            InvalidInputError: this is not a version of a server.
            PrerequisiteError: Java or Maven is missing, or Maven cannot fetch the server.
            AlreadyRunningError: this broker is already running.
            BrokerError: the broker ended or was not ready in time; the text has the end of its log.
        """
        # Private to this user, because the configuration may contain secrets.
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(self.directory / "lock"):
            last = self.status()
            if last.running:
                raise AlreadyRunningError(
                    f"The private broker is already running (Pulsar {last.version}, process "
                    f"{last.pid}, {last.service_url}, {last.admin_url}): use it, or stop it first."
                )
            self._end_watcher()  # it would kill by a process ID that may be another's by now
            version = self._version or last.version or PULSAR_VERSION
            settings = replace(last, functions=self._functions, version=version)
            home = fetch(self._report, version)
            self._report("Starting the broker.")
            self._start(home, settings, timeout_seconds)
        return self.status()

    def status(self) -> BrokerStatus:
        """Return the status; check the process, because a state file may be out of date."""
        self._reap()
        return status_of(self.directory)

    def stop(self) -> bool:
        """Stop the broker with SIGTERM, after half a minute with SIGKILL; keep its data.

        Returns:
            True if the broker was running.
        """
        status = self.status()
        if not self._end(status.pid, timeout_seconds=30):
            log.warning("the private broker did not stop in time and was killed")
        return status.running

    def kill(self) -> bool:
        """End the broker like a crash (SIGKILL, but between two writes); keep its data.

        Returns:
            True if the broker was running.
        """
        self._end_watcher()
        pid = self.status().pid
        if pid is None:
            return False
        process.kill(pid, marker(self.directory))
        self._reap()
        return True

    def remove(self) -> None:
        """Stop the broker and delete its data."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def logs(self, lines: int = 100) -> str:
        """Return the last lines of the broker's output; empty if it never ran.

        Args:
            lines: number of lines.
        """
        try:
            text = self.log_file.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> EmbeddedBroker:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _start(self, home: Path, saved: BrokerStatus, timeout_seconds: float) -> None:
        """Launch the process until it is ready; repeat a start that failed by chance."""
        for attempt in range(1, _START_ATTEMPTS + 1):
            saved = self._launch(home, saved)
            try:
                problem = self._wait_ready(saved, timeout_seconds)
            except BaseException:
                self._end(saved.pid, timeout_seconds=5)
                raise
            if not problem:
                return
            ending, looping = self.logs(15), self._is_registering()
            self._end(saved.pid, timeout_seconds=10)
            if attempt == _START_ATTEMPTS or not (looping or "BindException" in self.logs(500)):
                raise BrokerError(
                    f"The private broker {problem}. Its log, {self.log_file}, ends:\n{ending}"
                )
            log.info("starting the private broker again: it %s", problem)
            if not looping:  # another process took a port
                saved = replace(saved, service_port=0, web_port=0)

    def _wait_ready(self, saved: BrokerStatus, timeout_seconds: float) -> str:
        """Poll the admin interface until all required parts respond; return why they do not."""
        # `health` responds before the namespaces and the functions worker do.
        pending = ["/admin/v2/brokers/health", "/admin/v2/namespaces/public/default"]
        if saved.functions:
            pending.append("/admin/v3/functions/public/default")
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        limit = time.monotonic() + timeout_seconds
        result = "no response"
        with urllib3.PoolManager(retries=False, timeout=10, headers=headers) as pool:
            while True:
                code = self._child.poll() if self._child is not None else None
                if code is not None:
                    return f"ended with code {code} before it was ready"
                if self._is_registering():
                    return "does not become stable: its storage node registers in an endless loop"
                if not pending:
                    return ""
                if time.monotonic() > limit:
                    return f"was not ready within {timeout_seconds:g} s ({pending[0]}: {result})"
                try:
                    answer = pool.request("GET", f"http://127.0.0.1:{saved.web_port}{pending[0]}")
                except urllib3.exceptions.HTTPError as error:
                    result = type(error).__name__
                else:
                    if answer.status == 200:
                        pending.pop(0)
                        continue
                    result = f"HTTP status {answer.status}"
                time.sleep(_POLL_SECONDS)

    def _is_registering(self) -> bool:
        """Return True if the storage node registers in an endless loop, as the log says."""
        # After a crash, the node finds its earlier registration and deletes it. If the notification
        # of this deletion arrives after the new registration, the broker (4.0.8) takes it for a
        # deletion of the new one, deletes that in order to renew it, receives another notification,
        # and so on. Meanwhile the node comes and goes, and attempts to open a ledger fail at
        # random. A regular stop leaves no registration behind.
        return len(_INVALIDATED.findall(self.log_file.read_bytes())) > _MAX_INVALIDATED

    def _launch(self, home: Path, settings: BrokerStatus) -> BrokerStatus:
        """Choose ports, write the configuration and start the process; return what was saved."""
        ports = [settings.service_port, settings.web_port]
        bookie_port = settings.bookie_port
        kept = [port for port in (*ports, bookie_port) if port]
        # A killed process may keep its own for a moment.
        process.wait_until(lambda: all(map(process.port_is_free, kept)), _PORT_WAIT_SECONDS)
        fresh = [port for port in process.free_ports(6) if port not in kept]
        if 0 in ports or not all(map(process.port_is_free, ports)):
            ports = [fresh.pop(), fresh.pop()]
        if not (self.directory / "data" / "metadata").exists():
            # Chosen once: the stored data names the storage node by its port.
            bookie_port = fresh.pop()
        settings = replace(
            settings, service_port=ports[0], web_port=ports[1], bookie_port=bookie_port
        )
        write_conf(home, settings, self._conf)
        self.log_file.parent.mkdir(exist_ok=True)
        if self.log_file.exists():
            self.log_file.replace(self.log_file.with_suffix(".log.1"))
        with self.log_file.open("wb") as output:
            self._child = subprocess.Popen(
                start_command(home, settings),
                env=environment(self.directory, java(), self._heap_mb, settings.functions),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started_ms = time.time_ns() // 1_000_000
        launched = replace(settings, pid=self._child.pid, started_ms=started_ms)
        save_status(launched)
        if self._follow_parent:
            self._watcher = process.follow_parent(self._child.pid)
        return launched

    def _end(self, pid: int | None, *, timeout_seconds: float) -> bool:
        self._end_watcher()
        seconds = timeout_seconds
        ended = pid is None or process.end(pid, marker(self.directory), timeout_seconds=seconds)
        self._reap()
        return ended

    def _end_watcher(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.kill()
            watcher.communicate()

    def _reap(self) -> None:
        """Collect the exit code of a dead child, so that it does not stay a zombie."""
        if self._child is not None and self._child.poll() is not None:
            self._child = None


def write_conf(home: Path, instance: BrokerStatus, overrides: Mapping[str, str]) -> None:
    """Replace the ``conf`` folder of an instance by the server's, with its ports and settings."""
    data = instance.directory
    folder = data / "conf"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(home / "conf", folder)
    known = _names(home / "conf")
    worker = folder / "functions_worker.yml"
    worker_text = worker.read_text(encoding="utf-8")
    # What only the functions worker knows, such as useTls, goes into its file.
    workers = set(re.findall(r"(?m)^(?:# ?)?(\w+):", worker_text)) - known
    settings = {
        **_OUR_DEFAULTS,
        # By default, all instances share one folder of the server for the packages of functions.
        "STORAGE_PATH": f"{data}/data/packages",
        **{name: value for name, value in overrides.items() if name not in workers},
        "brokerServicePort": str(instance.service_port),
        "webServicePort": str(instance.web_port),
        "bindAddress": "127.0.0.1",
    }
    # The storage node is bound to loopback by interface, not by address.
    interfaces = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    settings |= {"listeningInterface": min(interfaces)} if interfaces else {}
    path = folder / "standalone.conf"
    kept = [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.partition("=")[0].strip() not in settings
    ]
    added = [f"{name}={value}" for name, value in settings.items()]
    path.write_text("\n".join([*kept, *added, ""]), encoding="utf-8")

    for name in sorted(overrides.keys() & workers):
        worker_text = re.sub(rf"(?m)^{name}:.*\n", "", worker_text)
        worker_text += f"\n{name}: {json.dumps(overrides[name])}"
    text = re.sub(r"(?m)^downloadDirectory:.*$", f"downloadDirectory: {data}/download", worker_text)
    text = re.sub(r"(?m)^(\s+logDirectory:).*$", rf"\1 {data}/logs", text)
    worker.write_text(text, encoding="utf-8")


def _names(conf: Path) -> set[str]:
    files = ("standalone.conf", "broker.conf", "bookkeeper.conf")
    text = "\n".join((conf / file).read_text(encoding="utf-8") for file in files)
    return set(re.findall(r"(?m)^\s*#?\s*([A-Za-z_][\w.]*)=", text))


def start_command(home: Path, instance: BrokerStatus) -> list[str]:
    """Return the command that starts the instance, without stream storage (``-nss``)."""
    directory = instance.directory
    # `bin/pulsar` replaces itself by the JVM, which so has the process ID of the command.
    return [
        str(home / "bin" / "pulsar"),
        "standalone",
        "-a",
        "127.0.0.1",
        "-nss",
        *(
            ["--functions-worker-conf", str(directory / "conf" / "functions_worker.yml")]
            if instance.functions
            else ["-nfw"]
        ),
        "--bookkeeper-port",
        str(instance.bookie_port),
        "--bookkeeper-dir",
        str(directory / "data" / "bookkeeper"),
        "--metadata-dir",
        str(directory / "data" / "metadata"),
    ]


def environment(
    directory: Path, java: str, heap_mb: int, functions: bool = False
) -> dict[str, str]:
    """Return the environment of the instance: a small heap, and no settings of another Pulsar."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FOREIGN_PREFIXES) and name != "OPTS"
    }
    path = [str(Path(java).parent), environ.get("PATH", os.defpath)]
    if functions:
        # The functions worker starts `python3` from the PATH: it must be able to import delaylevel.
        path.insert(0, str(Path(sys.executable).parent))
    return environ | {
        "PATH": os.pathsep.join(path),
        "PULSAR_STANDALONE_CONF": str(directory / "conf" / "standalone.conf"),
        "PULSAR_LOG_CONF": str(directory / "conf" / "log4j2.yaml"),
        "PULSAR_LOG_DIR": str(directory / "logs"),
        "PULSAR_MEM": f"-Xms64m -Xmx{heap_mb}m -XX:MaxDirectMemorySize={max(heap_mb, 300)}m",
        "PULSAR_GC": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        "PULSAR_GC_LOG": "-Xlog:disable",
    }
