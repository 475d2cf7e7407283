"""A Pulsar cluster on loopback: ZooKeeper, bookies and brokers, each a process; and a load on it.

The embedded broker is one process, so it cannot show what happens while another broker takes over.
Tests kill, suspend, stop and start the nodes, which keep their ports and data. The load shows how
long each part is interrupted by a fault. All messages that become due are stored before it. So the
lateness of a message is that of the parts behind it, whatever becomes of its producer.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pulsar
import urllib3

from delaylevel import topics, wrap
from delaylevel.broker.distribution import fetch, java
from delaylevel.broker.embedded import environment
from delaylevel.broker.process import free_ports
from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import BrokerError
from delaylevel.model.clock import SystemClock
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.status import status
from support.background import end_with_parent
from support.world import QUIET, RealWorld, eventually

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
    """A process of the cluster: ``zookeeper``, ``bookie-0``, ``broker-1`` …"""

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
        self.process.resume()

    def log_end(self) -> str:
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
        """Create a namespace; with one bundle, all of its topics are at one broker."""
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
        bounds = self._ask(f"/admin/v2/namespaces/{namespace}")["bundles"]["boundaries"]
        for low, high in pairwise(bounds):
            self.place_bundle(namespace, f"{low}_{high}", broker)

    def place_bundle(self, namespace: str, bundle: str, broker: Node) -> None:
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
        values = environment(folder, java(), heap_mb)
        del values["PULSAR_STANDALONE_CONF"], values["PULSAR_LOG_CONF"]
        memory = f"-Xms32m -Xmx{heap_mb}m -XX:MaxDirectMemorySize={max(heap_mb, 128)}m"
        return {**values, "PULSAR_MEM": memory, "PULSAR_LOG_ROOT_LEVEL": "info"}


now_ms = SystemClock().now_ms

# Messages go to the window at once, or through a level.
WINDOW_ONLY = Levels(
    [PartitionStrategy(partition_by=timedelta(minutes=20), maximum_delay=timedelta(hours=1))]
)
ONE_LEVEL = Levels(
    [PartitionStrategy(partition_by=timedelta(seconds=5), maximum_delay=timedelta(minutes=4))]
)
KEYS = 16
# The payload of messages that show that every part works.
_PROBE = b"probe"
_LEAD_S = 20.0
# On a busy machine, consumers start slowly.
_FLOW_S = 180.0
_STEP_MS = 100


class Gaps:
    """The longest time between two successes of a part, in s."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._last_s, self.longest_s, self.count = time.monotonic(), 0.0, 0

    def succeeded(self) -> None:
        now_s = time.monotonic()
        self.longest_s = max(self.longest_s, now_s - self._last_s)
        self._last_s = now_s
        self.count += 1


class Effect(NamedTuple):
    """The effect of a fault on the messages of one target, or partition of it."""

    worst_s: float
    arrived: int
    copies: int
    disordered: int
    early_ms: int


class Arrivals:
    """The messages that a topic has received; once a probe has, which does not count, it ``flows``.

    A reader that is disconnected is replaced at once: the client itself would wait longer after
    each attempt. The former one is left alone, as its close may take for ever.
    """

    def __init__(self, connection: Connection, topic: str, stop: threading.Event) -> None:
        short = {"operation_timeout_seconds": 10, "connection_timeout_ms": 2_000}
        self._open_client = partial(connection.open_client, logger=QUIET, **short)
        self._topic = topic
        self._stop = stop
        self._last: Any = pulsar.MessageId.earliest
        self._readers: list[Any] = [self._open()]
        self.flows = False
        self.copies: Counter[str] = Counter()
        self._order: dict[str, list[int]] = defaultdict(list)  # by key
        self._late_ms = [0]
        self.thread = threading.Thread(target=self._run, name=f"arrivals {topic}", daemon=True)
        self.thread.start()

    def _open(self) -> Any:
        return self._open_client().create_reader(self._topic, self._last)

    def _run(self) -> None:
        while not self._stop.is_set():
            reader = self._readers[-1]
            try:
                message = reader.read_next(200)
            except pulsar.PulsarException:
                if not reader.is_connected():
                    with contextlib.suppress(pulsar.PulsarException):
                        self._readers.append(self._open())
                continue
            self._last = message.message_id()
            if message.data() == _PROBE:
                self.flows = True
                continue
            name = message.data().decode()
            if not self.copies[name]:
                self._order[message.partition_key()].append(int(name))
                self._late_ms.append(now_ms() - int(message.properties()["delaylevel.due"]))
            self.copies[name] += 1

    def effect(self) -> Effect:
        pairs = (pair for order in self._order.values() for pair in pairwise(order))
        return Effect(
            worst_s=max(self._late_ms) / 1000,
            arrived=len(self.copies),
            copies=sum(self.copies.values()) - len(self.copies),
            disordered=sum(earlier > later for earlier, later in pairs),
            early_ms=-min(self._late_ms),
        )


class ClusterLoad:
    """A producer, the process and the consumers of level topics on a cluster.

    Their targets are created unless they exist. ``publishing`` has the confirmations of messages
    sent with ``wrap()`` to the first level topic, ``administration`` the successes of ``describe``
    and of the statistics of the last one.
    """

    def __init__(
        self,
        world: RealWorld,
        cli_process: Callable[..., Any],
        seconds: float,
        described: Sequence[LevelTopicDescription],
        delivery: Delivery = Delivery.AT_LEAST_ONCE,
    ) -> None:
        self._world, self._cli_process = world, cli_process
        self._described, self._delivery = described, delivery
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._count = int(seconds * 1000 / _STEP_MS)
        self._arrivals: dict[str, Arrivals] = {}
        self.publishing, self.administration = Gaps(), Gaps()

    # -- the parts

    def __enter__(self) -> ClusterLoad:
        self._client = self._world.client()
        for described in self._described:
            for target in described.targets:
                self._prepare(target)
            topics.create(self._world.admin, described)
        names = (each.topic for each in self._described)
        self._process = self._cli_process("run", *names, "--delivery", self._delivery.value)
        self._produce([_PROBE] * KEYS, lambda _: now_ms() + 8_000)
        for part, arrivals in self._arrivals.items():
            eventually(lambda arrivals=arrivals: arrivals.flows, f"a probe of {part}", _FLOW_S)
        self._begin_ms = now_ms() + int(_LEAD_S * 1000)
        bodies = [str(number).encode() for number in range(self._count)]
        self._produce(bodies, lambda number: self._begin_ms + number * _STEP_MS)
        for target in (self._publish, self._administer):
            self._threads.append(threading.Thread(target=target))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for arrivals in self._arrivals.values():
            arrivals.thread.join(20)
        self._process.kill()

    def _prepare(self, target: str) -> None:
        self._client.create_producer(target).close()
        self._world.admin.create_subscription(TopicName.parse(target), "keep")
        if self._delivery is Delivery.EFFECTIVELY_ONCE:
            self._world.deduplicate_topic(target)
        for part in map(TopicName.parse, self._client.get_topic_partitions(target)):
            self._arrivals[part.local] = Arrivals(self._world.connection, part.full, self._stop)

    def _produce(self, bodies: Sequence[bytes], due_ms: Callable[[int], int]) -> None:
        """Store messages for all targets, each with its due time."""
        for described in self._described:
            for target in described.targets:
                failures: list[Any] = []
                producer = self._client.create_producer(
                    target,
                    enable_delay_level_topic=True,
                    delay_level_topic=described.topic,
                    batching_enabled=False,
                    block_if_queue_full=True,
                )
                for number, body in enumerate(bodies):
                    producer.send_async(
                        body,
                        lambda result, _, failures=failures: (
                            result == pulsar.Result.Ok or failures.append(result)
                        ),
                        partition_key=str(number % KEYS),
                        deliver_at=due_ms(number),
                    )
                producer.flush()
                assert not failures
                producer.close()

    def _publish(self) -> None:
        """Send messages that are never due here, one every 50 ms."""
        described = self._described[0]
        producer = wrap(
            self._client.create_producer(described.targets[0]),
            self._client,
            admin=self._world.admin,
            delay_level_topic=described.topic,
            plain_producer=True,
            block_if_queue_full=True,
        )

        def confirmed(result: Any, _: Any) -> None:
            if result == pulsar.Result.Ok:
                self.publishing.succeeded()

        while not self._stop.wait(0.05):
            with contextlib.suppress(pulsar.PulsarException, BrokerError):
                producer.send_async(b"-1", confirmed, deliver_after=timedelta(minutes=50))
        producer.close()

    def _administer(self) -> None:
        """Do what commands do, every 200 ms."""
        admin = self._world.admin
        while not self._stop.wait(0.2):
            with contextlib.suppress(BrokerError):
                status(admin, topics.describe(admin, self._described[-1].topic), 0)
                self.administration.succeeded()

    # -- the fault

    def measure(
        self, fault: Callable[[], Any], after: Callable[[], Any] = lambda: None
    ) -> dict[str, Effect]:
        """Cause a fault, and return its effect on each target or partition, by its local name.

        ``after`` is called when everything has arrived.
        """
        time.sleep(max(0, self._begin_ms + 5_000 - now_ms()) / 1000)
        for part, arrivals in self._arrivals.items():
            assert arrivals.copies, f"nothing arrived at {part} before the fault"
            assert arrivals.effect().worst_s < 10, f"{part} was not on time before the fault"
        both = self.publishing, self.administration
        for gaps in both:
            gaps.start()
        try:
            fault()
            with contextlib.suppress(AssertionError):
                eventually(lambda: not self.lost, "everything", 300)
            # The end of the interruption is a success.
            for gaps in both:
                count = gaps.count
                eventually(lambda gaps=gaps, count=count: gaps.count > count, "a success", 120)
        finally:
            after()
        return {part: arrivals.effect() for part, arrivals in self._arrivals.items()}

    @property
    def lost(self) -> int:
        arrived = sum(len(each.copies) for each in self._arrivals.values())
        return self._count * sum(len(each.targets) for each in self._described) - arrived


def two_level_topics(namespace: str) -> list[LevelTopicDescription]:
    """Return ``released``, whose messages wait in the window, and ``moved``, which has a level."""
    return [
        LevelTopicDescription(f"{target}-delay-level", levels, (target,))
        for target, levels in (
            (f"persistent://{namespace}/released", WINDOW_ONLY),
            (f"persistent://{namespace}/moved", ONE_LEVEL),
        )
    ]
