"""A Pulsar cluster on loopback: ZooKeeper, bookies and brokers, each a process of its own.

The embedded broker is one process, so it cannot show what happens while another broker takes over.
Tests kill, suspend, stop and start the nodes, which keep their ports and data.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import psutil
import urllib3

from delaylevel.broker.conf import environment
from delaylevel.broker.distribution import fetch, java
from delaylevel.broker.process import free_ports
from delaylevel.cluster.connection.settings import Connection
from delaylevel.model.topic_name import TopicName
from support.background import end_with_parent
from support.world import eventually

NAME = "loopback"
BOOKIES = 3
#: Pulsar's own default: a broker that dies is noticed after this time.
SESSION_MS = 30_000
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


class Node:
    """A process of the cluster: ``zookeeper``, ``bookie-0``, ``broker-1`` …

    Args:
        command: its kind, which is an argument of ``bin/pulsar``.
        ports: its ports; for a broker, those for clients and for the admin interface.

    Attributes:
        service_url, admin_url: addresses of a broker.
        log_file: the output of the process since its first start.
    """

    def __init__(
        self, name: str, directory: Path, command: Sequence[str], environ: Mapping[str, str],
        ports: Sequence[int],
    ) -> None:  # fmt: skip
        self.name = name
        self.service_url = f"pulsar://127.0.0.1:{ports[0]}"
        self.admin_url = f"http://127.0.0.1:{ports[-1]}"
        self.log_file = directory / "node.log"
        self._directory, self._command, self._environ = directory, command, environ
        self._process: psutil.Popen | None = None

    @property
    def running(self) -> bool:
        """True if the process exists; a suspended one does."""
        return self._process is not None and self._process.poll() is None

    @property
    def suspended(self) -> bool:
        """True after `suspend`, until `resume`."""
        return self.running and self.process.status() == psutil.STATUS_STOPPED

    @property
    def process(self) -> psutil.Popen:
        """The process, which must run."""
        assert self.running, f"{self.name} is not running"
        return self._process

    def start(self) -> None:
        """Start the process; it ends with this one."""
        assert not self.running, f"{self.name} is running"
        with self.log_file.open("ab") as output:
            self._process = psutil.Popen(
                self._command,
                env=dict(self._environ),
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def kill(self) -> None:
        """Kill the process, as a crash does."""
        process = self.process
        process.kill()
        process.wait(10)

    def stop(self) -> None:
        """Stop the process in the regular way, and wait for its end."""
        process = self.process
        process.terminate()
        process.wait(_STOP_S)

    def suspend(self) -> None:
        """Suspend the process: its connections stay open, and nothing answers."""
        self.process.suspend()

    def resume(self) -> None:
        """Let a suspended process go on."""
        self.process.resume()

    def log_end(self) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log_file.read_text("utf-8", "replace").splitlines()[-15:])


class Cluster:
    """ZooKeeper, three bookies and two brokers on loopback; a context manager.

    Each message is stored by two of the bookies, so that it can do without one. Its folder, with
    configurations, data and logs, is deleted at the end.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._home = fetch()
        self._program = str(self._home / "bin" / "pulsar")
        retries = urllib3.Retry(connect=0, read=0, redirect=5)
        self._http = urllib3.PoolManager(timeout=10, retries=retries)
        zookeeper_port, *ports = free_ports(1 + BOOKIES + 4)
        self._store = f"zk:127.0.0.1:{zookeeper_port}"
        self.zookeeper = self._make_zookeeper(zookeeper_port)
        self.bookie_nodes = [self._make_bookie(index, ports.pop()) for index in range(BOOKIES)]
        self.broker_nodes = [
            self._make_broker(index, ports.pop(), ports.pop()) for index in range(2)
        ]
        self.nodes = [self.zookeeper, *self.bookie_nodes, *self.broker_nodes]

    # -- addresses

    @property
    def connection(self) -> Connection:
        """The addresses of all brokers."""
        hosts = [each.service_url.removeprefix("pulsar://") for each in self.broker_nodes]
        webs = [each.admin_url.removeprefix("http://") for each in self.broker_nodes]
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
            wanted = f"negotiated timeout = {SESSION_MS}"
            assert wanted in broker.log_file.read_text("utf-8", "replace"), wanted
        for index, broker in enumerate(self.broker_nodes):
            namespace = f"public/ready-{index}"
            self.create_namespace(namespace, bundles=1)
            self.place(namespace, broker)
            for each in self.broker_nodes:
                path = f"/admin/v2/persistent/{namespace}/{each.name}"
                eventually(
                    lambda each=each, path=path: self._status(each, path, "PUT") in (204, 409),
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
        if not broker.running or self._status(broker, "/admin/v2/brokers/health") != 200:
            return False
        with contextlib.suppress(urllib3.exceptions.HTTPError, ValueError):
            found = set(self._http.request("GET", f"{broker.admin_url}/admin/v2/brokers").json())
            return {node.admin_url.removeprefix("http://") for node in self.broker_nodes} <= found
        return False

    def close(self) -> None:
        """Kill all processes."""
        for node in reversed(self.nodes):
            if node.running:
                node.kill()
        self._http.clear()
        shutil.rmtree(self.directory, ignore_errors=True)

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

    def _status(self, node: Node, path: str, method: str = "GET") -> int:
        """Return the HTTP status of a request to a broker; 0 without an answer."""
        try:
            return self._http.request(method, node.admin_url + path).status
        except urllib3.exceptions.HTTPError:
            return 0

    def _ask(self, path: str, method: str = "GET", **options: Any) -> Any:
        """Return the answer of a broker that runs."""
        living = next(one for one in self.broker_nodes if one.running and not one.suspended)
        answer = self._http.request(method, living.admin_url + path, **options)
        assert answer.status in (200, 204), (path, answer.status, answer.data)
        return answer.json() if answer.data.startswith(b"{") else answer.data.decode()

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
        self._ask(f"/admin/v2/namespaces/{name}", "PUT", json=body)

    def owner(self, topic: str) -> Node:
        """Return the broker that serves a topic; it is assigned now if no broker does."""
        path = TopicName.parse(topic).full.replace("://", "/")
        url = self._ask(f"/lookup/v2/topic/{path}")["brokerUrl"]
        return next(node for node in self.broker_nodes if node.service_url == url)

    def bundle(self, topic: str) -> str:
        """Return the bundle of a topic: ``0x00000000_0x40000000``."""
        path = TopicName.parse(topic).full.replace("://", "/")

        def found() -> str:
            with contextlib.suppress(AssertionError):
                return str(self._ask(f"/lookup/v2/topic/{path}/bundle"))
            return ""

        return str(eventually(found, f"the bundle of {topic}"))

    def place(self, namespace: str, broker: Node) -> None:
        """Move all topics of a namespace to one broker."""
        bounds = self._ask(f"/admin/v2/namespaces/{namespace}")["bundles"]["boundaries"]
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
                self._status(owner, path, "PUT")
                return self.owner(probe) is broker
            return False

        eventually(moved, f"the move of {namespace} to {broker.name}", 120)

    # -- configuration

    def _initialize(self) -> None:
        """Write the metadata of the cluster."""
        broker = self.broker_nodes[0]
        command = [
            *(self._program, "initialize-cluster-metadata", "--cluster", NAME),
            *("--metadata-store", self._store, "--configuration-metadata-store", self._store),
            *("--web-service-url", broker.admin_url, "--broker-service-url", broker.service_url),
        ]
        environ = self._environ(self.directory / "initialize", 64)
        answer = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert answer.returncode == 0, (answer.stdout + answer.stderr)[-2000:]

    def _make_zookeeper(self, port: int) -> Node:
        data = str(self.directory / "zookeeper" / "data")
        values = {**_ZOOKEEPER, "dataDir": data, "clientPort": str(port)}
        return self._node("zookeeper", "PULSAR_ZK_CONF", "zookeeper.conf", values, port)

    def _make_bookie(self, index: int, port: int) -> Node:
        name = f"bookie-{index}"
        values = {
            **_BOOKIE,
            "bookiePort": str(port),
            "journalDirectory": str(self.directory / name / "journal"),
            "ledgerDirectories": str(self.directory / name / "ledgers"),
            "zkServers": self._store.removeprefix("zk:"),
            "zkTimeout": str(SESSION_MS),
        }
        return self._node(name, "PULSAR_BOOKKEEPER_CONF", "bookkeeper.conf", values, port)

    def _make_broker(self, index: int, *ports: int) -> Node:
        values = {
            **_BROKER,
            "metadataStoreUrl": self._store,
            "configurationMetadataStoreUrl": self._store,
            "metadataStoreSessionTimeoutMillis": str(SESSION_MS),
            "brokerServicePort": str(ports[0]),
            "webServicePort": str(ports[1]),
        }
        return self._node(f"broker-{index}", "PULSAR_BROKER_CONF", "broker.conf", values, *ports)

    def _node(
        self, name: str, variable: str, file: str, values: Mapping[str, str], *ports: int
    ) -> Node:
        folder = self.directory / name
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
        return Node(name, folder, (self._program, kind), environ, ports)

    def _environ(self, folder: Path, heap_mb: int) -> dict[str, str]:
        values = environment(folder, java=java(), functions=False, heap_mb=heap_mb)
        del values["PULSAR_STANDALONE_CONF"], values["PULSAR_LOG_CONF"]
        memory = f"-Xms32m -Xmx{heap_mb}m -XX:MaxDirectMemorySize={max(heap_mb, 128)}m"
        return {**values, "PULSAR_MEM": memory, "PULSAR_LOG_ROOT_LEVEL": "info"}
