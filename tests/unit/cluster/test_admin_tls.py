"""Tests of the admin client over TLS: trusted servers, and the secrecy of the token."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from delaylevel import wrap
from delaylevel.cluster.rest.admin import Admin
from delaylevel.errors import AdminError, BrokerUnreachableError, LevelTopicError
from delaylevel.producer.aio import AsyncDelayLevelClient
from delaylevel.producer.client import DelayLevelClient

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


class Secure:
    """An HTTPS server with a certificate for ``localhost`` only."""

    def __init__(self, folder: Path) -> None:
        self.certificate, self.key = folder / "cert.pem", folder / "key.pem"
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
                *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
                *("-keyout", str(self.key), "-out", str(self.certificate)),
            ],
            check=True,
            capture_output=True,
        )
        self.tokens: list[str | None] = []
        self.redirect_to: str | None = None
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.tokens.append(self.headers.get("Authorization"))
                self.send_response(307 if outer.redirect_to else outer.status)
                if outer.redirect_to:
                    self.send_header("Location", outer.redirect_to)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.port = self._http.server_port

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Secure]:
    server = Secure(tmp_path)
    yield server
    server.close()


def test_a_trusted_certificate_is_accepted(server: Secure) -> None:
    admin = Admin(
        f"https://localhost:{server.port}", token="t", tls_trust_certs_file=str(server.certificate)
    )
    assert admin.health()
    assert server.tokens == ["Bearer t"]


def test_an_untrusted_server_does_not_get_the_token(server: Secure) -> None:
    with pytest.raises(BrokerUnreachableError, match="TLS"):
        Admin(f"https://localhost:{server.port}", token="t").health()
    with pytest.raises(BrokerUnreachableError, match="TLS"):
        Admin(
            f"https://127.0.0.1:{server.port}",
            token="t",
            tls_trust_certs_file=str(server.certificate),
        ).health()
    assert server.tokens == []


def test_checks_can_be_switched_off(server: Secure) -> None:
    address = f"https://127.0.0.1:{server.port}"
    trusted = str(server.certificate)
    assert Admin(address, tls_trust_certs_file=trusted, tls_validate_hostname=False).health()
    assert Admin(address, tls_allow_insecure=True).health()


# -- clients and wrap


class FakePulsarClient:
    """A client for wrap, which opens nothing."""

    def get_topic_partitions(self, topic: str) -> list[str]:
        return [topic]

    def create_producer(self, topic: str) -> Any:
        raise AssertionError(topic)


def client_with(server: Secure, **options: Any) -> DelayLevelClient:
    return DelayLevelClient(
        "pulsar://localhost:1",
        admin_url=f"https://127.0.0.1:{server.port}",
        admin_token="t",
        tls_trust_certs_file_path=str(server.certificate),
        **options,
    )


def twin_with(server: Secure, **options: Any) -> AsyncDelayLevelClient:
    return AsyncDelayLevelClient(
        "pulsar://localhost:1",
        admin_url=f"https://127.0.0.1:{server.port}",
        admin_token="t",
        tls_trust_certs_file_path=str(server.certificate),
        **options,
    )


@pytest.mark.parametrize("make", [client_with, twin_with])
def test_clients_verify_the_host_name_unless_told_otherwise(server: Secure, make: Any) -> None:
    with pytest.raises(BrokerUnreachableError, match="TLS"):
        make(server).admin.health()
    assert server.tokens == []
    assert make(server, tls_validate_hostname=False).admin.health()
    assert server.tokens == ["Bearer t"]


def test_wrap_verifies_the_host_name_unless_told_otherwise(server: Secure) -> None:
    producer = SimpleNamespace(topic=lambda: "persistent://public/default/orders")
    options: dict[str, Any] = {
        "admin_url": f"https://127.0.0.1:{server.port}",
        "admin_token": "t",
        "tls_trust_certs_file_path": str(server.certificate),
    }
    with pytest.raises(BrokerUnreachableError, match="TLS"):
        wrap(producer, FakePulsarClient(), **options)
    assert server.tokens == []
    server.status = 404
    with pytest.raises(LevelTopicError, match="does not exist"):
        wrap(
            producer,
            FakePulsarClient(),
            create_level_topic=False,
            tls_validate_hostname=False,
            **options,
        )
    assert set(server.tokens) == {"Bearer t"}


def test_a_redirect_out_of_tls_is_not_followed(server: Secure) -> None:
    server.redirect_to = "http://127.0.0.1:1/admin/v2/brokers/version"
    admin = Admin(
        f"https://localhost:{server.port}", token="t", tls_trust_certs_file=str(server.certificate)
    )
    with pytest.raises(AdminError, match="without TLS"):
        admin.version()
