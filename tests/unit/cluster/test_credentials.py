"""Tests of a Pulsar client's credentials for the admin interface, with a scripted HTTP server."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pulsar
import pytest

import delaylevel.asyncio
from delaylevel import DelayLevelClient
from delaylevel.cluster.rest import credentials
from delaylevel.cluster.rest.credentials import OAuth2Token, admin_credentials
from delaylevel.errors import BrokerUnreachableError, ConfigError, PermissionDeniedError
from support.scripted_http import Answer, Server, reply

SECRET = "very secret"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def authorization(server: Server, admin: Any) -> str | None:
    """Return the header of one request of an admin client."""
    server.answer = lambda method, path: reply(200, [])
    admin.list_namespaces("public")
    return server.seen[-1][2].get("Authorization")


@pytest.mark.parametrize("token", ["abc", lambda: "abc"])
def test_the_token_of_a_client_serves_the_admin_interface(server: Server, token: Any) -> None:
    with DelayLevelClient(
        "pulsar://127.0.0.1:1",
        authentication=pulsar.AuthenticationToken(token),
        admin_url=server.url,
    ) as client:
        assert authorization(server, client.admin) == "Bearer abc"
    positional = DelayLevelClient(
        "pulsar://127.0.0.1:1", pulsar.AuthenticationToken(token), admin_url=server.url
    )
    assert authorization(server, positional.admin) == "Bearer abc"
    positional.close()
    loop_client = delaylevel.asyncio.DelayLevelClient(
        "pulsar://127.0.0.1:1",
        authentication=pulsar.AuthenticationToken(token),
        admin_url=server.url,
        admin_token="other",
    )
    assert authorization(server, loop_client.admin) == "Bearer other"


def test_the_certificate_of_a_client_serves_the_admin_interface() -> None:
    found = admin_credentials(pulsar.AuthenticationTLS("/cert.pem", "/key.pem"))
    assert found == {"tls_certificate_file": "/cert.pem", "tls_private_key_file": "/key.pem"}
    assert admin_credentials(None) == {}


def test_an_error_names_the_argument_if_credentials_cannot_be_read(server: Server) -> None:
    with DelayLevelClient(
        "pulsar://127.0.0.1:1",
        authentication=pulsar.AuthenticationBasic("user", SECRET),
        admin_url=server.url,
    ) as client:
        server.answer = lambda method, path: reply(401, {"reason": "Authentication required"})
        with pytest.raises(PermissionDeniedError) as refused:
            client.admin.list_namespaces("public")  # type: ignore[union-attr]
    assert "admin_token=, because it cannot be read from AuthenticationBasic" in str(refused.value)
    assert "DELAYLEVEL" not in str(refused.value)
    assert SECRET not in str(refused.value)


def issuer(server: Server, **answer: Any) -> Callable[[str, str], Answer]:
    def reply_to(method: str, path: str) -> Answer:
        if path == "/.well-known/openid-configuration":
            return reply(200, {"token_endpoint": server.url + "/token"})
        return reply(200, {"access_token": f"t{len(server.seen)}", "expires_in": 3600, **answer})

    return reply_to


def test_client_credentials_of_oauth2_serve_the_admin_interface(
    server: Server, tmp_path: Path
) -> None:
    server.answer = issuer(server)
    key = json.dumps({"client_id": "me", "client_secret": SECRET})
    (tmp_path / "key.json").write_text(key)
    encoded = base64.b64encode(key.encode()).decode()
    for private_key in (
        f"file://{tmp_path}/key.json",
        str(tmp_path / "key.json"),
        f"data:application/json;base64,{encoded}",
    ):
        parameters = {
            "issuer_url": server.url + "/",
            "private_key": private_key,
            "audience": "urn:p",
        }
        found = admin_credentials(pulsar.AuthenticationOauth2(json.dumps(parameters)))
        asked = len(server.seen)
        token = found["token"]
        assert callable(token)
        assert token() == token() == f"t{asked + 2}"
        assert len(server.seen) == asked + 2  # the second one is the first one
        body = server.seen[-1][3].decode()
        assert "client_id=me&client_secret=very+secret&audience=urn%3Ap" in body
        assert "grant_type=client_credentials" in body


def test_a_short_lived_token_is_renewed_and_a_refusal_has_its_reason(server: Server) -> None:
    parameters = {"issuer_url": server.url, "client_id": "me", "client_secret": SECRET}
    token = OAuth2Token(json.dumps(parameters))
    server.answer = issuer(server, expires_in=-1)
    assert token() != token()
    refusal = {"error": "invalid_client", "error_description": "unknown client"}
    server.answer = issuer(server, access_token=None, **refusal)
    with pytest.raises(PermissionDeniedError, match="unknown client"):
        token()
    asked = len(server.seen)
    with pytest.raises(PermissionDeniedError, match="unknown client"):
        token()
    assert len(server.seen) == asked, "a failure counts for some seconds"
    with pytest.raises(ConfigError, match="client_id"):
        OAuth2Token(json.dumps({"issuer_url": server.url}))


def test_a_token_is_good_until_its_end_whatever_becomes_of_its_server(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(credentials, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    parameters = {"issuer_url": server.url, "client_id": "me", "client_secret": SECRET}
    token = OAuth2Token(json.dumps(parameters))
    server.answer = issuer(server, expires_in=100)
    first = token()
    server.answer = lambda method, path: reply(503, {"error": "server_error"})
    now_s[0] += 95
    asked = len(server.seen)
    assert token() == token() == first
    assert len(server.seen) == asked + 1
    now_s[0] += 6
    with pytest.raises(BrokerUnreachableError):
        token()
    server.answer = issuer(server, expires_in=100)
    now_s[0] += 6
    assert token() != first
