"""Tests of a Pulsar client's credentials for the admin interface, with a scripted HTTP server."""

from __future__ import annotations

import json
from typing import Any

import pulsar
import pytest

import delaylevel.asyncio
from delaylevel import DelayLevelClient
from delaylevel.cluster.rest.credentials import admin_credentials
from delaylevel.errors import PermissionDeniedError
from support.scripted_http import Server, reply

SECRET = "very secret"
AWAY = "pulsar://127.0.0.1:1"


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
    used = [headers["Authorization"] for _, _, headers, _ in server.seen]
    assert used == ["Bearer abc", "Bearer abc", "Bearer other"]


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
    kind = type(authentication).__name__
    assert f"admin_token=, because it cannot be read from {kind}" in str(refused.value)
    assert "DELAYLEVEL" not in str(refused.value)
    assert SECRET not in str(refused.value)
