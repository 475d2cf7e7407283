"""A real Pulsar broker, private to this user, without Docker: for tests, demos and first steps."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from pydantic import SecretStr

from delaylevel.cluster.connection import Connection
from delaylevel.errors import AlreadyRunningError, BrokerError, InvalidInputError

from . import process
from .conf import ConfValue, command, conf_text, environment, write_conf
from .distribution import (
    PULSAR_VERSION,
    Report,
    distribution_directory,
    fetch,
    is_fetched,
    java,
    locked,
    state_directory,
)
from .ready import NotReadyError, UnsettledError, wait_ready
from .state import Saved, load, save

__all__ = [
    "PULSAR_VERSION",
    "BrokerStatus",
    "EmbeddedBroker",
    "distribution_directory",
    "fetch",
    "instances",
    "is_fetched",
    "running_instance",
]

log = logging.getLogger(__name__)

DEFAULT_HEAP_MB = 400
_START_ATTEMPTS = 5
_PORT_WAIT_SECONDS = 5
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class BrokerStatus:
    """What is known of an instance.

    Attributes:
        running: whether its process lives.
        pid: the process, where it runs.
        service_url, admin_url: its addresses, kept from one start to the next.
        started_ms: when it was started last, in ms since the epoch.
    """

    name: str
    directory: Path
    running: bool
    pid: int | None
    service_url: str
    admin_url: str
    functions: bool
    started_ms: int | None


class _StartAgainError(BrokerError):
    """This start came to nothing, and the next one will do."""


class EmbeddedBroker:
    """One instance of Pulsar standalone on loopback ports of its own, with data of its own.

    An instance remembers its ports and configuration: a later start on the same directory takes
    them again, unless others are given. Use it as a context manager to stop it at the end.

    Parameters:
        name: which instance of this user; its data is in the state directory under this name.
        directory: keep it here instead, e.g. in a temporary directory.
        functions: with the functions worker. None: as at the last start, or else without.
        conf: settings of ``standalone.conf``. None: as at the last start.
        heap_mb: the largest Java heap. None: as at the last start, or else 400 MB.
        token: a superuser's token, where ``conf`` asks for one; it is not written down.
        follow_parent: end the broker when this process dies, however it dies.
        report: is told what happens while it is fetched and started, a line at a time.

    Raises:
        InvalidInputError: a name or directory that cannot be used.
    """

    def __init__(
        self,
        name: str = "default",
        *,
        directory: str | os.PathLike[str] | None = None,
        functions: bool | None = None,
        conf: Mapping[str, ConfValue] | None = None,
        heap_mb: int | None = None,
        token: str | None = None,
        follow_parent: bool = False,
        report: Report = log.info,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidInputError(
                f"{name!r} is no name for a broker: use letters, digits, '.', '_' and '-'"
            )
        self.name = name
        chosen = Path(directory) if directory is not None else _instances_directory() / name
        self.directory = chosen.absolute()
        if re.search(r"\s", str(self.directory)):
            raise InvalidInputError(
                f"Pulsar's start script cannot bear blanks in a path: {self.directory}"
            )
        self._functions = functions
        self._conf = None if conf is None else {k: conf_text(v) for k, v in conf.items()}
        self._heap_mb = heap_mb
        self._token = token
        self._follow_parent = follow_parent
        self._report = report
        self._child: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None

    @property
    def log_file(self) -> Path:
        """What the broker prints since its last start; that of the start before ends in ``.1``."""
        return self.directory / "logs" / "broker.log"

    @property
    def connection(self) -> Connection:
        """Where to reach it.

        Raises:
            BrokerError: it does not run.
        """
        status = self.status()
        if not status.running:
            raise BrokerError(f"The embedded broker {self.name!r} does not run: start it first.")
        return Connection(
            service_url=status.service_url,
            admin_url=status.admin_url,
            token=SecretStr(self._token) if self._token else None,
            origin=f"the embedded broker {self.name!r}",
        )

    def start(self, *, timeout_seconds: float = 120) -> BrokerStatus:
        """Start it and wait until it is ready: healthy, with its default namespace.

        Returns:
            Its status, with the addresses.

        Raises:
            PrerequisiteError: Java or Maven is missing.
            AlreadyRunningError: this instance runs already.
            BrokerError: it ended, or was not ready in time; the text has the end of its log.
        """
        home = fetch(self._report)
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # its conf may hold secrets
        with locked(self.directory / "lock"):
            status = self.status()
            if status.running:
                raise AlreadyRunningError(
                    f"The embedded broker {self.name!r} runs already: process {status.pid}, "
                    f"{status.service_url}, {status.admin_url}"
                )
            self._end_watcher()
            saved = self._settings()
            for attempt in range(1, _START_ATTEMPTS + 1):
                saved = self._launch(home, saved)
                try:
                    self._wait_ready(saved, timeout_seconds)
                except _StartAgainError as error:
                    self._end(saved.pid, timeout_seconds=10)
                    if attempt == _START_ATTEMPTS:
                        raise BrokerError(str(error)) from None
                    log.info("starting it again: %s", error)
                except BrokerError as error:
                    self._end(saved.pid, timeout_seconds=5)
                    if "BindException" not in self.logs(500) or attempt == _START_ATTEMPTS:
                        raise
                    log.info("a port was taken meanwhile, trying others: %s", error)
                    saved = replace(saved, service_port=0, web_port=0)
                except BaseException:
                    self._end(saved.pid, timeout_seconds=5)
                    raise
                else:
                    break
        return self.status()

    def status(self) -> BrokerStatus:
        """What is known of it; a state file that another process left behind does not mislead."""
        self._reap()
        saved = load(self.directory)
        running = saved is not None and process.is_ours(saved.pid, self._marker)
        return BrokerStatus(
            name=self.name,
            directory=self.directory,
            running=running,
            pid=saved.pid if saved and running else None,
            service_url=saved.service_url if saved else "",
            admin_url=saved.admin_url if saved else "",
            functions=saved.functions if saved else bool(self._functions),
            started_ms=saved.started_ms if saved else None,
        )

    def stop(self, *, timeout_seconds: float = 30) -> bool:
        """Stop it in order (SIGTERM), or by force when that takes too long; the data stays.

        Returns:
            Whether it ran.
        """
        status = self.status()
        if status.pid is not None and not self._end(status.pid, timeout_seconds=timeout_seconds):
            log.warning("%s did not stop in time and was killed", self.name)
        return status.pid is not None

    def kill(self) -> bool:
        """End it as a crash would (SIGKILL, between two of its writes); whether it ran.

        The data stays.
        """
        self._end_watcher()
        pid = self.status().pid
        if pid is None:
            return False
        process.kill(pid, self._marker)
        self._reap()
        return True

    def remove(self) -> None:
        """Stop it and delete its data."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def logs(self, lines: int = 100) -> str:
        """The last lines of what it printed; empty where it never ran."""
        try:
            text = self.log_file.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> EmbeddedBroker:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def _marker(self) -> str:
        """What only our process has in its command line, from the start script to the JVM."""
        return f" --metadata-dir {self.directory / 'data' / 'metadata'} "

    def _settings(self) -> Saved:
        last = load(self.directory)
        conf, functions, heap_mb = self._conf, self._functions, self._heap_mb
        if last is not None:
            conf = last.conf if conf is None else conf
            functions = last.functions if functions is None else functions
            heap_mb = last.heap_mb if heap_mb is None else heap_mb
        return Saved(
            pid=0,
            service_port=last.service_port if last else 0,
            web_port=last.web_port if last else 0,
            functions=bool(functions),
            conf=conf or {},
            heap_mb=heap_mb or DEFAULT_HEAP_MB,
            started_ms=0,
            bookie_port=last.bookie_port if last else 0,
        )

    def _launch(self, home: Path, settings: Saved) -> Saved:
        ports = [settings.service_port, settings.web_port]
        bookie_port = settings.bookie_port
        kept = [port for port in (*ports, bookie_port) if port]
        process.become_free(kept, timeout_seconds=_PORT_WAIT_SECONDS)
        fresh = [port for port in process.free_ports(6) if port not in kept]
        if 0 in ports or not all(map(process.port_is_free, ports)):
            ports = [fresh.pop(), fresh.pop()]
        if not (self.directory / "data").exists():
            # Not one that the system gives to an outgoing connection while this broker is stopped.
            bookie_port = fresh.pop()
        write_conf(
            home,
            self.directory / "conf",
            service_port=ports[0],
            web_port=ports[1],
            overrides=settings.conf,
        )
        self.log_file.parent.mkdir(exist_ok=True)
        if self.log_file.exists():
            self.log_file.replace(self.log_file.with_suffix(".log.1"))
        with self.log_file.open("wb") as output:
            self._child = subprocess.Popen(
                command(
                    home,
                    self.directory,
                    functions=settings.functions,
                    bookie_port=bookie_port,
                ),
                env=environment(
                    self.directory,
                    java=java(),
                    functions=settings.functions,
                    heap_mb=settings.heap_mb,
                ),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        launched = replace(
            settings,
            pid=self._child.pid,
            service_port=ports[0],
            web_port=ports[1],
            started_ms=time.time_ns() // 1_000_000,
            bookie_port=bookie_port,
        )
        save(self.directory, launched)
        if self._follow_parent:
            self._watcher = process.follow_parent(launched.pid)
        return launched

    def _wait_ready(self, saved: Saved, timeout_seconds: float) -> None:
        child = self._child
        try:
            wait_ready(
                saved.admin_url,
                functions=saved.functions,
                token=self._token,
                exit_code=child.poll if child is not None else lambda: None,
                log_file=self.log_file,
                timeout_seconds=timeout_seconds,
            )
        except UnsettledError as error:
            raise _StartAgainError(f"The embedded broker {self.name!r} {error}.") from None
        except NotReadyError as error:
            raise BrokerError(
                f"The embedded broker {self.name!r} {error}. "
                f"Its log, {self.log_file}, ends:\n{self.logs(15)}"
            ) from None

    def _end(self, pid: int, *, timeout_seconds: float) -> bool:
        self._end_watcher()
        in_order = process.end(pid, self._marker, timeout_seconds=timeout_seconds)
        self._reap()
        return in_order

    def _end_watcher(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.kill()
            watcher.communicate()

    def _reap(self) -> None:
        """Take a dead child's exit code, so that it is no zombie."""
        if self._child is not None and self._child.poll() is not None:
            self._child = None


def instances() -> list[BrokerStatus]:
    """The instances in this user's state directory, by name."""
    folder = _instances_directory()
    if not folder.is_dir():
        return []
    names = sorted(path.parent.name for path in folder.glob("*/instance.json"))
    return [EmbeddedBroker(name).status() for name in names if _NAME.fullmatch(name)]


def running_instance(name: str | None = None) -> BrokerStatus | None:
    """The instance of this name that runs; without a name, ``default``, or else the only one."""
    running = {status.name: status for status in instances() if status.running}
    if name is not None or "default" in running:
        return running.get(name or "default")
    return next(iter(running.values())) if len(running) == 1 else None


def _instances_directory() -> Path:
    return state_directory() / "brokers"
