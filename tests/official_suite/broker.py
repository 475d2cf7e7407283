"""A private broker with the configuration that the suite expects, on loopback ports of its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3

from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.broker.process import free_ports
from delaylevel.cluster.connection.local_brokers import SavedInstance, save_instance
from support.signed_tokens import jwt

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

    def call(self, method: str, path: str, body: object = None) -> Any:
        """Call the admin REST interface as superuser; return the answer, None if it is empty."""
        answer = urllib3.request(
            method,
            f"{self.admin_url}/admin/v2/{path}",
            headers={"Authorization": f"Bearer {self.superuser}"},
            json=body,
        )
        if answer.status not in (200, 204):
            text = answer.data.decode(errors="replace")[:300]
            raise RuntimeError(f"{method} {path}: HTTP status {answer.status} {text}")
        return answer.json() if answer.data else None


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
    """Return the text of a test with the ports of the broker in place of those it names."""
    for named, used in ports.items():
        text = text.replace(f"localhost:{named}", f"localhost:{used}")
    return text


@contextmanager
def running(folder: Path, tests: Path) -> Iterator[SuiteBroker]:
    """Start a broker in a folder, with tenants and namespaces of the suite; stop it at the end."""
    service, web, service_tls, web_tls = free_ports(4)
    key = secrets.token_bytes(32)
    secret = folder / "secret.key"
    secret.write_bytes(key)
    superuser = jwt(key, "superUser")
    own_token = folder / "broker.token"
    own_token.write_text(superuser, encoding="utf-8")
    conf = {
        **settings((tests / "test-conf" / "standalone-ssl.conf").read_text("utf-8"), tests),
        "brokerServicePortTls": str(service_tls),
        "webServicePortTls": str(web_tls),
        "tokenSecretKey": f"file://{secret}",
        "brokerClientAuthenticationPlugin": (
            "org.apache.pulsar.client.impl.auth.AuthenticationToken"
        ),
        "brokerClientAuthenticationParameters": f"file://{own_token}",
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
    save_instance(
        data,
        SavedInstance(
            pid=0,
            service_port=service,
            web_port=web,
            functions=False,
            conf={},
            heap_mb=_HEAP_MB,
            started_ms=0,
        ),
    )
    embedded = EmbeddedBroker(
        "official-suite",
        directory=data,
        conf=conf,
        heap_mb=_HEAP_MB,
        token=superuser,
        follow_parent=True,
    )
    status = embedded.start(timeout_seconds=_START_SECONDS)
    try:
        found = SuiteBroker(
            {6650: service, 8080: web, 6651: service_tls, 8443: web_tls},
            status.admin_url,
            superuser,
            jwt(key, "token-principal"),
        )
        _prepare(found)
        yield found
    finally:
        embedded.stop()


def _prepare(broker: SuiteBroker) -> None:
    """Create what the suite's start script creates; the broker has created ``public/default``."""
    clusters = {"allowedClusters": ["standalone"]}
    broker.call("POST", "tenants/public", {"adminRoles": ["anonymous"], **clusters})
    broker.call("PUT", "tenants/private", {"adminRoles": [], **clusters})
    for namespace in ("public/default-2", "private/auth"):
        broker.call("PUT", f"namespaces/{namespace}", {"replication_clusters": ["standalone"]})
    for namespace, role in (
        ("public/default", "anonymous"),
        ("public/default-2", "anonymous"),
        ("private/auth", "token-principal"),
    ):
        broker.call("POST", f"namespaces/{namespace}/permissions/{role}", ["produce", "consume"])
