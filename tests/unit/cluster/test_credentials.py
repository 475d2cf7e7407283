"""Tests of a Pulsar client's credentials for the admin interface, with a scripted HTTP server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pulsar
import pytest

import delaylevel.asyncio
from delaylevel import DelayLevelClient
from delaylevel.cluster.rest.credentials import admin_credentials
from delaylevel.errors import PermissionDeniedError
from support.scripted_http import Server, reply

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


OAUTH2 = {"issuer_url": "http://127.0.0.1:1", "client_id": "me", "client_secret": SECRET}


@pytest.mark.parametrize(
    ("kind", "authentication"),
    [
        ("AuthenticationBasic", pulsar.AuthenticationBasic("user", SECRET)),
        ("AuthenticationOauth2", pulsar.AuthenticationOauth2(json.dumps(OAUTH2))),
    ],
)
def test_an_error_names_the_argument_if_credentials_cannot_be_read(
    server: Server, kind: str, authentication: Any
) -> None:
    with DelayLevelClient(
        "pulsar://127.0.0.1:1", authentication=authentication, admin_url=server.url
    ) as client:
        server.answer = lambda method, path: reply(401, {"reason": "Authentication required"})
        with pytest.raises(PermissionDeniedError) as refused:
            client.admin.list_namespaces("public")  # type: ignore[union-attr]
    assert f"admin_token=, because it cannot be read from {kind}" in str(refused.value)
    assert "DELAYLEVEL" not in str(refused.value)
    assert SECRET not in str(refused.value)
