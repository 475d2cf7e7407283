"""Tests of TLS and of a client's credentials for the admin interface, with an HTTP server."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pulsar
import pytest

import delaylevel.asyncio
from delaylevel import DelayLevelClient
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.rest.credentials import admin_credentials
from delaylevel.errors import (
    AdminError,
    BrokerUnreachableError,
    PermissionDeniedError,
)
from delaylevel.producer.aio import AsyncDelayLevelClient
from support.scripted_http import Server, reply

SECRET = "very secret"
AWAY = "pulsar://127.0.0.1:1"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a certificate for ``localhost``, with its key in the same folder."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
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
def tls_server(certificate: Path) -> Iterator[Server]:
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


def test_only_a_trusted_server_gets_the_token(tls_server: Server, certificate: Path) -> None:
    trusting: dict[str, Any] = {"token": "t", "tls_trust_certs_file": certificate}
    for admin in (Admin(tls_server.url, token="t"), Admin(renamed(tls_server), **trusting)):
        with pytest.raises(BrokerUnreachableError, match="certificate"):
            admin.version()
    assert tls_server.seen == []
    Admin(tls_server.url, **trusting).version()
    Admin(renamed(tls_server), **trusting, tls_validate_hostname=False).version()
    Admin(renamed(tls_server), token="t", tls_allow_insecure=True).version()
    assert tokens(tls_server) == 3 * ["Bearer t"]


def by_client(url: str, **options: Any) -> None:
    DelayLevelClient(url, **options).admin.version()


def by_async_client(url: str, **options: Any) -> None:
    AsyncDelayLevelClient(url, **options).admin.version()


@pytest.mark.parametrize("use", [by_client, by_async_client])
def test_applications_verify_the_host_name_unless_told_otherwise(
    tls_server: Server, certificate: Path, use: Any
) -> None:
    options = {
        "admin_url": renamed(tls_server),
        "admin_token": "t",
        "tls_trust_certs_file_path": str(certificate),
    }
    with pytest.raises(BrokerUnreachableError, match="certificate"):
        use("pulsar://localhost:1", **options)
    assert tls_server.seen == []
    tls_server.answer = lambda method, path: reply(200, {})
    use("pulsar://localhost:1", **options, tls_validate_hostname=False)
    assert set(tokens(tls_server)) == {"Bearer t"}


def test_a_redirect_out_of_tls_is_not_followed(tls_server: Server, certificate: Path) -> None:
    tls_server.answer = lambda method, path: (307, {"Location": f"http://127.0.0.1:1{path}"}, b"")
    with pytest.raises(AdminError, match="without TLS"):
        Admin(tls_server.url, token="t", tls_trust_certs_file=certificate).version()


@pytest.mark.parametrize("token", ["abc", lambda: "abc"])
def test_the_token_of_a_client_serves_the_admin_interface(server: Server, token: Any) -> None:
    server.answer = lambda method, path: reply(200, [])
    given = pulsar.AuthenticationToken(token)
    options: dict[str, Any] = {"authentication": given, "admin_url": server.url}
    for client in (
        DelayLevelClient(AWAY, **options),
        DelayLevelClient(AWAY, given, admin_url=server.url),
        delaylevel.asyncio.DelayLevelClient(AWAY, **options, admin_token="other"),
    ):
        client.admin.list_namespaces("public")  # type: ignore[union-attr]
    assert tokens(server) == ["Bearer abc", "Bearer abc", "Bearer other"]


def test_the_certificate_of_a_client_serves_the_admin_interface() -> None:
    found = admin_credentials(pulsar.AuthenticationTLS("/cert.pem", "/key.pem"))
    assert found == {"tls_certificate_file": "/cert.pem", "tls_private_key_file": "/key.pem"}
    assert admin_credentials(None) == {}


OAUTH2 = {"issuer_url": "http://127.0.0.1:1", "client_id": "me", "client_secret": SECRET}


@pytest.mark.parametrize(
    "authentication",
    [
        pulsar.AuthenticationBasic("user", SECRET),
        pulsar.AuthenticationOauth2(json.dumps(OAUTH2)),
    ],
)
def test_an_error_names_the_argument_if_credentials_cannot_be_read(
    server: Server, authentication: Any
) -> None:
    server.answer = lambda method, path: reply(401, {"reason": "Authentication required"})
    client = DelayLevelClient(AWAY, authentication=authentication, admin_url=server.url)
    with pytest.raises(PermissionDeniedError) as refused:
        client.admin.list_namespaces("public")  # type: ignore[union-attr]
    assert "this cluster wants a token" in str(refused.value)
    assert "admin_token=" in str(refused.value)
    assert SECRET not in str(refused.value)
