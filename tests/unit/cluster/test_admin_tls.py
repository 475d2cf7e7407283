"""Tests of the admin client over TLS: trusted servers, and the secrecy of the token."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from delaylevel import wrap
from delaylevel.cluster.rest.admin import Admin
from delaylevel.errors import AdminError, BrokerUnreachableError, LevelTopicError
from delaylevel.producer.aio import AsyncDelayLevelClient
from delaylevel.producer.client import DelayLevelClient
from support.scripted_http import Server, reply

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a certificate for ``localhost``, with its key in the same folder."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")),
        ],
        check=True,
        capture_output=True,
    )
    return folder / "cert.pem"


@pytest.fixture
def server(certificate: Path) -> Iterator[Server]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    server = Server(context)
    yield server
    server.close()


def tokens(server: Server) -> list[str | None]:
    return [headers.get("Authorization") for _, _, headers, _ in server.seen]


def renamed(server: Server) -> str:
    """Return the address with a host that the certificate does not name."""
    return server.url.replace("localhost", "127.0.0.1")


def test_only_a_trusted_server_gets_the_token(server: Server, certificate: Path) -> None:
    trusting: dict[str, Any] = {"token": "t", "tls_trust_certs_file": certificate}
    for admin in (Admin(server.url, token="t"), Admin(renamed(server), **trusting)):
        with pytest.raises(BrokerUnreachableError, match="TLS"):
            admin.version()
    assert server.seen == []
    Admin(server.url, **trusting).version()
    Admin(renamed(server), **trusting, tls_validate_hostname=False).version()
    Admin(renamed(server), token="t", tls_allow_insecure=True).version()
    assert tokens(server) == 3 * ["Bearer t"]


def by_wrap(_: str, **options: Any) -> None:
    producer = SimpleNamespace(topic=lambda: "persistent://public/default/orders", send=print)
    client = SimpleNamespace(get_topic_partitions=lambda topic: [topic], create_producer=print)
    with pytest.raises(LevelTopicError, match="does not exist"):
        wrap(producer, client, create_level_topic=False, **options)


def by_client(url: str, **options: Any) -> None:
    DelayLevelClient(url, **options).admin.version()


def by_async_client(url: str, **options: Any) -> None:
    AsyncDelayLevelClient(url, **options).admin.version()


@pytest.mark.parametrize("use", [by_client, by_async_client, by_wrap])
def test_applications_verify_the_host_name_unless_told_otherwise(
    server: Server, certificate: Path, use: Any
) -> None:
    options = {
        "admin_url": renamed(server),
        "admin_token": "t",
        "tls_trust_certs_file_path": str(certificate),
    }
    with pytest.raises(BrokerUnreachableError, match="TLS"):
        use("pulsar://localhost:1", **options)
    assert server.seen == []
    server.answer = lambda method, path: reply(404 if use is by_wrap else 200, {})
    use("pulsar://localhost:1", **options, tls_validate_hostname=False)
    assert set(tokens(server)) == {"Bearer t"}


def test_a_redirect_out_of_tls_is_not_followed(server: Server, certificate: Path) -> None:
    server.answer = lambda method, path: (307, {"Location": f"http://127.0.0.1:1{path}"}, b"")
    with pytest.raises(AdminError, match="without TLS"):
        Admin(server.url, token="t", tls_trust_certs_file=certificate).version()
