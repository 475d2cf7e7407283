"""A Pulsar cluster on loopback: ZooKeeper, bookies and brokers, each a process of its own.

The embedded broker is one process, so it cannot show what happens while another broker takes over.
Tests kill, suspend, stop and start the nodes, which keep their ports and data.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import urllib3

from delaylevel.broker.conf import environment
from delaylevel.broker.distribution import fetch, java
from delaylevel.broker.process import free_ports
from delaylevel.cluster.connection.settings import Connection
from delaylevel.model.topic_name import TopicName

NAME = "loopback"
#: Pulsar's own default: a broker that dies is noticed after this time.
DEFAULT_SESSION_MS = 30_000
_START_S = 300.0
_STOP_S = 150.0
# Number of times that a node is started again while the cluster starts.
_STARTS = 3

_ZOOKEEPER = {
    "tickTime": "500",  # a session lasts for two ticks at least ...
    "maxSessionTimeout": "120000",  # ... and for no more than 20, if nothing else is set
    "clientPortAddress": "127.0.0.1",
    "admin.enableServer": "false",
    "forceSync": "no",
    "metricsProvider.className": "org.apache.zookeeper.metrics.impl.NullMetricsProvider",
}
_BOOKIE = {
    "advertisedAddress": "127.0.0.1",
    "allowLoopback": "true",
    "listeningInterface": "lo",
    "journalSyncData": "false",  # only a crash of the machine would lose something
    "journalMaxSizeMB": "64",
    "autoRecoveryDaemonEnabled": "false",
    "statsProviderClass": "org.apache.bookkeeper.stats.NullStatsProvider",
    "enableStatistics": "false",
    "dbStorage_writeCacheMaxSizeMb": "16",
    "dbStorage_readAheadCacheMaxSizeMb": "16",
    "dbStorage_rocksDB_blockCacheSize": "8388608",
    "numReadWorkerThreads": "2",
    "numHighPriorityWorkerThreads": "2",
    "numJournalCallbackThreads": "2",
}
_BROKER = {
    "clusterName": NAME,
    "bindAddress": "127.0.0.1",
    "advertisedAddress": "127.0.0.1",
    "forceDeleteNamespaceAllowed": "true",
    "managedLedgerCacheSizeMB": "16",
    "numIOThreads": "2",
    "numHttpServerThreads": "8",
    "bookkeeperNumberOfChannelsPerBookie": "2",
    # Topics move only when a test wants them to.
    "loadBalancerSheddingEnabled": "false",
    "loadBalancerAutoBundleSplitEnabled": "false",
    "dispatcherDispatchMessagesInSubscriptionThread": "false",
}
_HEAP_MB = {"zookeeper": 64, "bookie": 128, "broker": 256}


@dataclass
class Node:
    """A process of the cluster.

    Attributes:
        name: ``zookeeper``, ``bookie-0``, ``broker-1`` …
        directory: folder with its configuration, data and log.
        command: arguments of ``bin/pulsar``.
        environ: environment of the process.
        ports: its ports; for a broker, those for clients and for the admin interface.
    """

    name: str
    directory: Path
    home: Path
    command: Sequence[str]
    environ: Mapping[str, str]
    ports: tuple[int, ...]
    _process: subprocess.Popen[bytes] | None = None
    _watcher: subprocess.Popen[bytes] | None = None
    _suspended: bool = False

    @property
    def kind(self) -> str:
        """``zookeeper``, ``bookie`` or ``broker``."""
        return self.name.partition("-")[0]

    @property
    def service_url(self) -> str:
        """Address of a broker for clients."""
        return f"pulsar://127.0.0.1:{self.ports[0]}"

    @property
    def admin_url(self) -> str:
        """Address of a broker's admin interface."""
        return f"http://127.0.0.1:{self.ports[1]}"

    @property
    def log_file(self) -> Path:
        """The output of the process since its first start."""
        return self.directory / "node.log"

    @property
    def running(self) -> bool:
        """True if the process exists; a suspended one does."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process; it ends with this one."""
        assert not self.running, f"{self.name} is running"
        self._end_watcher()  # its process may have ended by itself
        with self.log_file.open("ab") as output:
            self._process = subprocess.Popen(
                [str(self.home / "bin" / "pulsar"), *self.command],
                env=dict(self.environ),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # The pipe ends with this process, however it dies. A suspended process ignores SIGTERM.
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; kill -9 "$1" 2>/dev/null', "watch", str(self.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """ID of the process."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Kill the process, as a crash does."""
        self._signal(signal.SIGKILL)
        self._ended(10)

    def stop(self) -> None:
        """Stop the process in the regular way, and wait for its end."""
        self._signal(signal.SIGTERM)
        self._ended(_STOP_S)

    def suspend(self) -> None:
        """Suspend the process: its connections stay open, and nothing answers."""
        self._signal(signal.SIGSTOP)
        self._suspended = True

    def resume(self) -> None:
        """Let a suspended process go on."""
        self._signal(signal.SIGCONT)
        self._suspended = False

    def end(self) -> None:
        """Kill the process if it runs."""
        if self.running:
            self.kill()
        self._end_watcher()

    def log_end(self, lines: int = 15) -> str:
        """Return the last lines of the log."""
        text = self.log_file.read_text("utf-8", "replace")
        return "\n".join(text.splitlines()[-lines:])

    def _signal(self, number: signal.Signals) -> None:
        assert self.running, f"{self.name} is not running"
        os.kill(self.pid, number)

    def _ended(self, seconds: float) -> None:
        assert self._process is not None
        self._process.wait(seconds)
        self._suspended = False
        self._end_watcher()

    def _end_watcher(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.kill()
            watcher.communicate()

    @property
    def suspended(self) -> bool:
        """True after `suspend`, until `resume`."""
        return self._suspended


@dataclass
class Cluster:
    """ZooKeeper, bookies and brokers on loopback; a context manager.

    Args:
        directory: folder for configurations, data and logs.
        bookies: number of bookies. Each message is stored by two of them, so with two bookies,
            nothing can be written while one is away.
        brokers: number of brokers.
        session_ms: ZooKeeper session of the brokers and bookies, in ms. A broker that dies is
            noticed after this time.
        conf: further settings of the brokers.
    """

    directory: Path
    bookies: int = 2
    brokers: int = 2
    session_ms: int = DEFAULT_SESSION_MS
    conf: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._home = fetch()
        self._http = urllib3.PoolManager(retries=False, timeout=10)
        ports = free_ports(1 + self.bookies + 2 * self.brokers)
        self._zookeeper_port = ports.pop()
        self.zookeeper = self._make_zookeeper()
        self.bookie_nodes = [self._make_bookie(index, ports.pop()) for index in range(self.bookies)]
        self.broker_nodes = [
            self._make_broker(index, ports.pop(), ports.pop()) for index in range(self.brokers)
        ]

    # -- addresses

    @property
    def nodes(self) -> list[Node]:
        """All processes."""
        return [self.zookeeper, *self.bookie_nodes, *self.broker_nodes]

    @property
    def connection(self) -> Connection:
        """The addresses of all brokers."""
        return self.connection_to(*self.broker_nodes)

    def connection_to(self, *brokers: Node) -> Connection:
        """Return the addresses of some brokers."""
        hosts = [each.service_url.removeprefix("pulsar://") for each in brokers]
        webs = [each.admin_url.removeprefix("http://") for each in brokers]
        return Connection(
            service_url="pulsar://" + ",".join(hosts), admin_url="http://" + ",".join(webs)
        )

    # -- start and end

    def start(self) -> None:
        """Start all processes, and wait until each broker serves topics that any of them knows."""
        self.zookeeper.start()
        self._initialize()
        for node in [*self.bookie_nodes, *self.broker_nodes]:
            node.start()
        self.wait_ready()
        for broker in self.broker_nodes:
            wanted = f"negotiated timeout = {self.session_ms}"
            assert wanted in broker.log_file.read_text("utf-8", "replace"), wanted
        for index, broker in enumerate(self.broker_nodes):
            namespace = f"public/ready-{index}"
            self.create_namespace(namespace, bundles=1)
            self.place(namespace, broker)
            for each in self.broker_nodes:
                path = f"/admin/v2/persistent/{namespace}/{each.name}"
                self.eventually(
                    lambda each=each, path=path: self._follow("PUT", each, path) in (204, 409),
                    f"a topic at {broker.name} by way of {each.name}",
                    _START_S,
                )
            assert self.owner(f"persistent://{namespace}/{broker.name}") is broker

    def recover(self) -> None:
        """Resume and start everything that a test has suspended, stopped or killed."""
        for node in self.nodes:
            if node.suspended:
                node.resume()
            if not node.running:
                node.start()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until every broker serves topics, and knows all brokers.

        Bookies and brokers end if ZooKeeper does not answer in time, as on a busy machine. They
        are started again, as a supervisor would do.
        """
        deadline = time.monotonic() + _START_S
        starts: Counter[str] = Counter()
        while waiting := [node for node in self.broker_nodes if not self._is_ready(node)]:
            for node in self.nodes:
                if node.running:
                    continue
                starts[node.name] += 1
                assert starts[node.name] <= _STARTS, f"{node.name} ended:\n{node.log_end()}"
                node.start()
            names = ", ".join(node.name for node in waiting)
            log_end = waiting[0].log_end()
            assert time.monotonic() < deadline, f"{names} not ready:\n{log_end}"
            time.sleep(0.2)

    def _is_ready(self, broker: Node) -> bool:
        """Return True if a broker stores messages, and knows all brokers."""
        if not broker.running or self.status(broker, "/admin/v2/brokers/health") != 200:
            return False
        try:
            answer = self._http.request("GET", f"{broker.admin_url}/admin/v2/brokers", retries=1)
            found = set(answer.json()) if answer.status == 200 else set()
        except (urllib3.exceptions.HTTPError, ValueError):
            return False
        return {f"127.0.0.1:{node.ports[1]}" for node in self.broker_nodes} <= found

    def close(self) -> None:
        """Kill all processes."""
        for node in reversed(self.nodes):
            node.end()
        self._http.clear()

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- topics

    def status(self, node: Node, path: str, method: str = "GET", **options: Any) -> int:
        """Return the HTTP status of a request to a broker; 0 without an answer."""
        try:
            return self._http.request(method, node.admin_url + path, **options).status
        except urllib3.exceptions.HTTPError:
            return 0

    def create_namespace(self, name: str, bundles: int = 4) -> None:
        """Create a namespace.

        Args:
            name: ``tenant/namespace``.
            bundles: number of bundles, which the brokers share. With one, all topics of the
                namespace are at one broker.
        """
        step = (1 << 32) // bundles
        bounds = [f"0x{index * step:08x}" for index in range(bundles)] + ["0xffffffff"]
        body = {
            "bundles": {"boundaries": bounds, "numBundles": bundles},
            "retention_policies": {"retentionTimeInMinutes": 60, "retentionSizeInMB": -1},
        }
        answer = self._http.request(
            "PUT", f"{self._living().admin_url}/admin/v2/namespaces/{name}", json=body
        )
        assert answer.status == 204, answer.data

    def owner(self, topic: str) -> Node:
        """Return the broker that serves a topic; it is assigned now if no broker does."""
        path = TopicName.parse(topic).full.replace("://", "/")
        url = self._json(f"/lookup/v2/topic/{path}")["brokerUrl"]
        return next(node for node in self.broker_nodes if node.service_url == url)

    def bundle(self, topic: str) -> str:
        """Return the bundle of a topic: ``0x00000000_0x40000000``."""
        path = TopicName.parse(topic).full.replace("://", "/")

        def found() -> str:
            url = f"{self._living().admin_url}/lookup/v2/topic/{path}/bundle"
            answer = self._http.request("GET", url, retries=5)
            return answer.data.decode() if answer.status == 200 else ""

        return str(self.eventually(found, f"the bundle of {topic}"))

    def place(self, namespace: str, broker: Node) -> None:
        """Move all topics of a namespace to one broker."""
        bounds = self._json(f"/admin/v2/namespaces/{namespace}")["bundles"]["boundaries"]
        for low, high in pairwise(bounds):
            self.place_bundle(namespace, f"{low}_{high}", broker)

    def place_bundle(self, namespace: str, bundle: str, broker: Node) -> None:
        """Move the topics of one bundle of a namespace to a broker."""
        names = (f"persistent://{namespace}/probe-{number}" for number in count())
        probe = next(name for name in names if self.bundle(name) == bundle)
        target = broker.admin_url.removeprefix("http://")
        path = f"/admin/v2/namespaces/{namespace}/{bundle}/unload?destinationBroker={target}"

        def moved() -> bool:
            # A broker accepts the destination of a bundle that nobody owns, and ignores it. So the
            # look at its owner comes first. A lookup may fail while the bundle moves.
            with contextlib.suppress(AssertionError, StopIteration, urllib3.exceptions.HTTPError):
                owner = self.owner(probe)
                if owner is broker:
                    return True
                self._follow("PUT", owner, path)
                return self.owner(probe) is broker
            return False

        self.eventually(moved, f"the move of {namespace} to {broker.name}", 120)

    def other(self, broker: Node) -> Node:
        """Return a broker that is not this one."""
        return next(each for each in self.broker_nodes if each is not broker)

    @property
    def living(self) -> list[Node]:
        """The brokers that run, and are not suspended."""
        return [node for node in self.broker_nodes if node.running and not node.suspended]

    def _living(self) -> Node:
        return self.living[0]

    @staticmethod
    def eventually(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
        """Wait until a condition holds, and return its value."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
            time.sleep(0.1)
        return found

    def _json(self, path: str) -> Any:
        answer = self._http.request("GET", self._living().admin_url + path, retries=5)
        assert answer.status == 200, (path, answer.status, answer.data)
        return answer.json()

    def _follow(self, method: str, node: Node, path: str) -> int:
        try:
            return self._http.request(method, node.admin_url + path, retries=5).status
        except urllib3.exceptions.HTTPError:
            return 0

    # -- configuration

    def _initialize(self) -> None:
        """Write the metadata of the cluster."""
        store = f"zk:127.0.0.1:{self._zookeeper_port}"
        broker = self.broker_nodes[0]
        command = [
            *(str(self._home / "bin" / "pulsar"), "initialize-cluster-metadata"),
            *("--cluster", NAME),
            *("--metadata-store", store, "--configuration-metadata-store", store),
            *("--web-service-url", broker.admin_url, "--broker-service-url", broker.service_url),
        ]
        answer = subprocess.run(
            command,
            env=self._environ(self.directory / "initialize", 64),
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 0, (answer.stdout + answer.stderr)[-2000:]

    def _make_zookeeper(self) -> Node:
        folder = self.directory / "zookeeper"
        values = {
            **_ZOOKEEPER,
            "dataDir": str(folder / "data"),
            "clientPort": str(self._zookeeper_port),
        }
        port = self._zookeeper_port
        return self._node("zookeeper", folder, "PULSAR_ZK_CONF", "zookeeper.conf", values, (port,))

    def _make_bookie(self, index: int, port: int) -> Node:
        folder = self.directory / f"bookie-{index}"
        values = {
            **_BOOKIE,
            "bookiePort": str(port),
            "journalDirectory": str(folder / "journal"),
            "ledgerDirectories": str(folder / "ledgers"),
            "zkServers": f"127.0.0.1:{self._zookeeper_port}",
            "zkTimeout": str(self.session_ms),
        }
        name, file = f"bookie-{index}", "bookkeeper.conf"
        return self._node(name, folder, "PULSAR_BOOKKEEPER_CONF", file, values, (port,))

    def _make_broker(self, index: int, service_port: int, web_port: int) -> Node:
        folder = self.directory / f"broker-{index}"
        store = f"zk:127.0.0.1:{self._zookeeper_port}"
        values = {
            **_BROKER,
            "metadataStoreUrl": store,
            "configurationMetadataStoreUrl": store,
            "metadataStoreSessionTimeoutMillis": str(self.session_ms),
            "brokerServicePort": str(service_port),
            "webServicePort": str(web_port),
            **self.conf,
        }
        name, ports = f"broker-{index}", (service_port, web_port)
        return self._node(name, folder, "PULSAR_BROKER_CONF", "broker.conf", values, ports)

    def _node(
        self,
        name: str,
        folder: Path,
        variable: str,
        file: str,
        values: Mapping[str, str],
        ports: tuple[int, ...],
    ) -> Node:
        folder.mkdir(parents=True)
        kept = [
            line
            for line in (self._home / "conf" / file).read_text("utf-8").splitlines()
            if line.partition("=")[0].strip() not in values and "metricsProvider." not in line
        ]
        added = [f"{key}={value}" for key, value in values.items()]
        (folder / file).write_text("\n".join([*kept, *added, ""]), "utf-8")
        kind = name.partition("-")[0]
        environ = {**self._environ(folder, _HEAP_MB[kind]), variable: str(folder / file)}
        return Node(name, folder, self._home, (kind,), environ, ports)

    def _environ(self, folder: Path, heap_mb: int) -> dict[str, str]:
        values = environment(folder, java=java(), functions=False, heap_mb=heap_mb)
        del values["PULSAR_STANDALONE_CONF"], values["PULSAR_LOG_CONF"]
        memory = f"-Xms32m -Xmx{heap_mb}m -XX:MaxDirectMemorySize={max(heap_mb, 128)}m"
        return {**values, "PULSAR_MEM": memory, "PULSAR_LOG_ROOT_LEVEL": "info"}


@contextlib.contextmanager
def cluster_in(directory: Path, **options: Any) -> Iterator[Cluster]:
    """Yield a started cluster in a folder, which is deleted at the end.

    Args:
        options: further arguments of `Cluster`.
    """
    try:
        with Cluster(directory, **options) as cluster:
            yield cluster
    finally:
        shutil.rmtree(directory, ignore_errors=True)
