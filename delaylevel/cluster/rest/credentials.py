"""The credentials of a Pulsar client, for the admin interface of its cluster.

The client's authentication objects are opaque: they tell their method and nothing else. Their
constructors are public, so what these were given is kept with the object.
"""

from __future__ import annotations

import base64
import functools
import inspect
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode

import certifi
import pulsar
import urllib3

from delaylevel.cluster.connection.settings import read_token_file
from delaylevel.errors import (
    BrokerError,
    BrokerUnreachableError,
    ConfigError,
    PermissionDeniedError,
)

from .http import RestOptions

_GIVEN = "_delaylevel_given"
_TIMEOUT_S = 10.0
# The same while the old token is good, and the pause after a failure.
_SHORT_TIMEOUT_S, _PAUSE_S = 2.0, 5.0
# A token is renewed when this part of its life is over.
_RENEWED_AFTER = 0.9
_SHORT_LIFE_S = 60.0


def _keep_arguments(kind: Any) -> None:
    """Let a constructor keep what it is given with the object."""
    create = kind.__init__

    @functools.wraps(create)
    def keeping(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        setattr(self, _GIVEN, inspect.signature(create).bind(self, *args, **kwargs).arguments)

    kind.__init__ = keeping


for _kind in (pulsar.AuthenticationToken, pulsar.AuthenticationTLS, pulsar.AuthenticationOauth2):
    _keep_arguments(_kind)


def admin_credentials(authentication: Any) -> RestOptions:
    """Return the options with which an admin client has the credentials of a Pulsar client.

    Returns:
        The token or the files of a certificate; nothing if they cannot be read from the object.
    """
    given: Mapping[str, Any] = getattr(authentication, _GIVEN, {})
    if isinstance(authentication, pulsar.AuthenticationToken) and given:
        return RestOptions(token=given["token"])
    if isinstance(authentication, pulsar.AuthenticationTLS) and given:
        return RestOptions(
            tls_certificate_file=given["certificate_path"],
            tls_private_key_file=given["private_key_path"],
        )
    if isinstance(authentication, pulsar.AuthenticationOauth2) and given:
        return RestOptions(token=OAuth2Token(given["auth_params_string"]))
    return RestOptions()


class OAuth2Token:
    """Tokens of an OAuth2 server by client credentials, each until most of its life is over."""

    def __init__(self, parameters: str) -> None:
        try:
            given = json.loads(parameters)
            key = given.get("private_key")
            key = json.loads(_contents(key)) if key else {}
            self._issuer = str(given.get("issuer_url") or key["issuer_url"]).rstrip("/")
            self._form = {
                "grant_type": "client_credentials",
                "client_id": given.get("client_id") or key["client_id"],
                "client_secret": given.get("client_secret") or key["client_secret"],
            }
            self._form.update(
                {name: given[name] for name in ("audience", "scope") if given.get(name)}
            )
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                "the parameters of OAuth2 need issuer_url, and client_id and client_secret or "
                f"private_key: {type(error).__name__}"
            ) from None
        self._lock = threading.Lock()  # held while the server is asked
        self._token, self._ask_at_s, self._until_s = "", 0.0, 0.0
        self._failure: BrokerError | None = None

    def __call__(self) -> str:
        """Return a token; an old one until its end if the server does not give another one."""
        is_valid = time.monotonic() < self._until_s
        # Nobody waits for a new token while the old one is good.
        if not self._lock.acquire(blocking=not is_valid):
            return self._token
        try:
            if time.monotonic() >= self._ask_at_s:
                self._renew(_SHORT_TIMEOUT_S if is_valid else _TIMEOUT_S)
            if self._failure is not None and time.monotonic() >= self._until_s:
                raise self._failure.with_traceback(None)
            return self._token
        finally:
            self._lock.release()

    def _renew(self, timeout_s: float) -> None:
        now_s = time.monotonic()
        try:
            answer = self._ask(timeout_s)
        except BrokerError as error:
            self._failure, self._ask_at_s = error, time.monotonic() + _PAUSE_S
            return
        life_s = float(answer.get("expires_in") or _SHORT_LIFE_S)
        self._token, self._failure = str(answer["access_token"]), None
        self._ask_at_s, self._until_s = now_s + life_s * _RENEWED_AFTER, now_s + life_s

    def _ask(self, timeout_s: float) -> Mapping[str, Any]:
        place = self._issuer + "/.well-known/openid-configuration"
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        says = f"no token for the admin interface from the OAuth2 server {self._issuer}"
        try:
            with urllib3.PoolManager(
                ca_certs=certifi.where(), timeout=timeout_s, retries=False
            ) as pool:
                place = pool.request("GET", place).json()["token_endpoint"]
                form = urlencode(self._form)
                answer = pool.request("POST", place, body=form, headers=kind)
                found = answer.json()
            if found.get("access_token"):
                return found  # type: ignore[no-any-return]
            reason = str(found.get("error_description") or found.get("error") or "no token")
            refused = bool(found.get("error")) and answer.status < 500 and answer.status != 429
        except (urllib3.exceptions.HTTPError, AttributeError, LookupError, ValueError) as error:
            raise BrokerUnreachableError(f"{says}: {str(error) or type(error).__name__}") from None
        if refused:
            raise PermissionDeniedError(f"{says}: {reason}", status=answer.status, reason=reason)
        raise BrokerUnreachableError(f"{says}: {reason}")


def _contents(url: str) -> str:
    """Return the text that a ``file:`` or ``data:`` URL names."""
    scheme, _, rest = url.partition(":")
    if scheme == "data":
        kind, _, data = rest.partition(",")
        return base64.b64decode(data).decode() if kind.endswith(";base64") else unquote(data)
    path = rest.removeprefix("//") if scheme == "file" else url
    return read_token_file(Path(path), "private_key of OAuth2")
