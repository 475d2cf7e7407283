"""A private broker with the configuration that the suite expects, on loopback ports of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.broker.process import free_ports
from delaylevel.cluster.connection.local_brokers import BrokerStatus, save_status
from delaylevel.cluster.rest.http import Rest, options_of
from support.tokens import token_conf

_HEAP_MB = 1500
_START_SECONDS = 600
# Settings of the suite's configuration that name files, ports or storage of its container, or that
# a smaller machine cannot hold.
_NOT_TAKEN = (
    "AdvertisedAddress",
    "BindAddress",
    "BrokerClientAuthentication",
    "BrokerServicePort",
    "ConfigurationStore",
    "GlobalZookeeper",
    "ManagedLedgerCacheSize",
    "StatusFile",
    "TokenSecretKey",
    "WebServicePort",
    "Zookeeper",
)


@dataclass(frozen=True)
class SuiteBroker:
    """Addresses and tokens of a running broker, and its port for each one that the suite names."""

    ports: Mapping[int, int]
    admin_url: str
    superuser: str
    principal: str


def settings(text: str, tests: Path) -> dict[str, str]:
    """Return the settings of the suite's ``standalone-ssl.conf`` that a private broker takes."""
    found = {}
    for line in text.splitlines():
        name, separator, value = map(str.strip, line.partition("="))
        if not separator or name.startswith("#"):
            continue
        if name.lower().startswith(tuple(prefix.lower() for prefix in _NOT_TAKEN)):
            continue
        found[name] = value.replace("test-conf/", f"{tests}/test-conf/")
    return found


def with_ports(text: str, ports: Mapping[int, int]) -> str:
    for named, used in ports.items():
        text = text.replace(f"localhost:{named}", f"localhost:{used}")
    return text


@contextmanager
def running(folder: Path, tests: Path) -> Iterator[SuiteBroker]:
    """Start a broker in a folder, with tenants and namespaces of the suite; stop it at the end."""
    service, web, service_tls, web_tls = free_ports(4)
    sign, tokens = token_conf(folder, "superUser")
    superuser = sign("superUser")
    conf = {
        **tokens,
        **settings((tests / "test-conf" / "standalone-ssl.conf").read_text("utf-8"), tests),
        "brokerServicePortTls": str(service_tls),
        "webServicePortTls": str(web_tls),
        "basicAuthConf": str(tests / "test-conf" / ".htpasswd"),
        # The certificate is that of localhost, and a client may compare names.
        "advertisedListeners": (
            f"internal:pulsar://localhost:{service},internal:pulsar+ssl://localhost:{service_tls}"
        ),
        "internalListenerName": "internal",
        # A level topic needs policies of single topics.
        "systemTopicEnabled": "true",
        "topicLevelPoliciesEnabled": "true",
    }
    data = folder / "broker"
    data.mkdir()
    save_status(BrokerStatus(data, service_port=service, web_port=web))
    embedded = EmbeddedBroker(
        data,
        conf=conf,
        heap_mb=_HEAP_MB,
        token=superuser,
        follow_parent=True,
    )
    status = embedded.start(timeout_seconds=_START_SECONDS)
    try:
        with closing(Rest(status.admin_url, **options_of(embedded.connection))) as rest:
            _prepare(rest)
        ports = {6650: service, 8080: web, 6651: service_tls, 8443: web_tls}
        yield SuiteBroker(ports, status.admin_url, superuser, sign("token-principal"))
    finally:
        embedded.stop()


def _prepare(rest: Rest) -> None:
    """Create what the suite's start script creates; the broker has created ``public/default``."""
    clusters = {"allowedClusters": ["standalone"]}
    rest.post("tenants/public", {"adminRoles": ["anonymous"], **clusters})
    rest.put("tenants/private", {"adminRoles": [], **clusters})
    for namespace in ("public/default-2", "private/auth"):
        rest.put(f"namespaces/{namespace}", {"replication_clusters": ["standalone"]})
    for namespace, role in (
        ("public/default", "anonymous"),
        ("public/default-2", "anonymous"),
        ("private/auth", "token-principal"),
    ):
        rest.post(f"namespaces/{namespace}/permissions/{role}", ["produce", "consume"])
