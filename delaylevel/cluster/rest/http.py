"""HTTP requests to the admin interface: addresses, token, TLS, redirects, and our own errors.

Connections, TLS and timeouts are urllib3's. What it does not know: several addresses of one
cluster, redirects that keep the token, and a broker that hangs.

A broker that hangs (a suspended process, a machine without memory) accepts connections and never
answers. A read would take its whole timeout, again and again. So where that matters (a service, or
several addresses) a read is given up after some seconds, unless the broker gives a sign of life on
another connection: then it is only slow, and is waited for. As long as an address gives no sign,
it is asked for one every two seconds, and requests go to the next address or fail at once.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict
from urllib.parse import quote, urlencode, urljoin, urlsplit

import certifi
import urllib3

from delaylevel.cluster.connection.settings import Connection, TokenSource
from delaylevel.errors import (
    AdminError,
    BrokerUnreachableError,
    ConfigError,
    ConflictError,
    NotFoundError,
    PermissionDeniedError,
)
from delaylevel.model.clock import SystemClock
from delaylevel.model.formatting import format_instant

if TYPE_CHECKING:
    from typing_extensions import Unpack

# A read without an answer after this time is given up, unless the broker gives a sign of life.
_PATIENCE_S = 3.0
_PROBE_TIMEOUT_S = 1.0
# An address that hangs is asked for a sign of life at most once in this time.
_PROBE_EVERY_S = 2.0
# An address that was slow, and gave a sign of life, is waited for in this time.
_SLOW_S = 30.0


@dataclass(eq=False)
class Address:
    """The base URL of one broker, and what is known of it, for all clients and threads."""

    # Each field is written atomically; times are monotonic.
    url: str
    answered_s: float = float("-inf")  # its last answer
    failed: bool = False  # since its last answer
    probe_at_s: float | None = None  # it hangs, and may be asked for a sign of life from then on
    slow_until_s: float = float("-inf")  # a slow answer is waited for
    probing: threading.Lock = field(default_factory=threading.Lock)  # held meanwhile

    @property
    def host(self) -> str:
        """Host and port."""
        return urlsplit(self.url).netloc

    @property
    def rank(self) -> tuple[bool, float]:
        """The place among others: the one that answered last first, and at the end what failed."""
        return self.failed, -self.answered_s

    def answered(self) -> None:
        """Note that it has answered now."""
        self.answered_s, self.failed, self.probe_at_s = time.monotonic(), False, None

    def no_answer(self, error: Exception) -> None:
        """Note the failure of a request."""
        self.failed = True
        if _is_timeout(error) and self.probe_at_s is None:
            self.slow_until_s, self.probe_at_s = float("-inf"), 0.0


_known: dict[str, Address] = {}


def address_at(base: str) -> Address:
    """Return the address with a base URL, which may have a path; always the same instance."""
    return _known.setdefault(base, Address(base))


def addresses_of(admin_url: str) -> list[Address]:
    """Return the addresses that an ``admin_url`` names."""
    scheme, separator, rest = admin_url.partition("://")
    hosts = [host.strip().rstrip("/") for host in rest.split(",") if host.strip("/ ")]
    if not separator or scheme not in ("http", "https") or not hosts:
        raise ConfigError(f"admin_url {admin_url!r} must look like http://host:port")
    if "@" in rest:
        raise ConfigError("admin_url must not carry a user or password: use a token")
    return [address_at(f"{scheme}://{host}") for host in hosts]


Token = str | Callable[[], str | None] | None
_Path = str | os.PathLike[str] | None

# A file, or the function of an argument, is asked again at every use.
_TOKEN = "--token-file, DELAYLEVEL_TOKEN_FILE, admin_token= of a client, token= of an Admin"
_LONGEST_REASON = 400
_HOPS = 5
_LEAST_S = 1.0
# While a topic moves to another broker, requests for it are refused with 503.
_PAUSES_S = (0.2, 0.5, 1.0)
_ERRORS: dict[int, type[AdminError]] = {
    401: PermissionDeniedError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    412: ConflictError,
}


class RestOptions(TypedDict, total=False):
    """Options of an admin client, besides the address.

    Attributes:
        token: the token, or a function that returns the current one.
        tls_trust_certs_file: trusted certificates (PEM); by default those of ``certifi``.
        tls_certificate_file, tls_private_key_file: the client's own certificate and key (PEM).
        tls_allow_insecure: True to accept any certificate, whatever its issuer and name.
        tls_validate_hostname: True, the default, to compare the certificate's name with the host's.
        timeout_s: time to wait for an answer, in seconds; 30 by default.
        for_service: True for a service, which tries again by itself: a read is given up after 4 s
            if its broker gives no sign of life, and requests fail at once as long as it gives none.
    """

    token: Token
    tls_trust_certs_file: _Path
    tls_certificate_file: _Path
    tls_private_key_file: _Path
    tls_allow_insecure: bool
    tls_validate_hostname: bool
    timeout_s: float
    for_service: bool


def encoded(path: str) -> str:
    """Return a path with each of its parts percent-encoded."""
    return "/".join(quote(part, safe="") for part in path.split("/"))


def options_of(connection: Connection) -> RestOptions:
    """Return the options of an admin client for the cluster of a connection."""
    has_token = connection.token is not None or connection.token_file is not None
    return RestOptions(
        token=TokenSource(connection.read_token) if has_token else None,
        tls_trust_certs_file=connection.tls_trust_certs_file,
        tls_certificate_file=connection.tls_certificate_file,
        tls_private_key_file=connection.tls_private_key_file,
        tls_allow_insecure=connection.tls_allow_insecure,
        tls_validate_hostname=connection.tls_validate_hostname,
        timeout_s=connection.operation_timeout_seconds,
    )


class _Call(NamedTuple):
    method: str
    suffix: str  # path and query
    headers: Mapping[str, str]
    body: bytes | None


class Rest:
    """Client of one cluster's admin REST interface, for any number of threads."""

    def __init__(self, admin_url: str, **options: Unpack[RestOptions]) -> None:
        self.admin_url = admin_url
        self._addresses = addresses_of(admin_url)
        self._token = options.get("token")
        trusted, certificate, key = (
            options.get("tls_trust_certs_file"),
            options.get("tls_certificate_file"),
            options.get("tls_private_key_file"),
        )
        for file in (trusted, certificate, key):
            if file is not None and not os.path.isfile(file):
                raise ConfigError(f"there is no certificate or key file {os.fspath(file)}")
        tls: dict[str, Any] = {}
        if admin_url.startswith("https"):
            insecure = options.get("tls_allow_insecure", False)
            tls["cert_reqs"] = "CERT_NONE" if insecure else "CERT_REQUIRED"
            tls["ca_certs"] = os.fspath(trusted or certifi.where())
            if insecure or not options.get("tls_validate_hostname", True):
                tls["assert_hostname"] = False
            if insecure:
                urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
            tls |= {"cert_file": certificate, "key_file": key}
        self._timeout_s = options.get("timeout_s", 30.0)
        # A broker may be well and need longer than a hasty caller waits. If that counted as
        # hanging, the next request for a sign of life could fail too, and everything after it.
        self._is_hasty = False
        self._for_service = options.get("for_service", False)
        # A service asks about many topics at once when it starts: beyond this number, connections
        # are closed after each request, with a line in the log.
        self._pool = urllib3.PoolManager(maxsize=128, **tls)

    def within(self, timeout_s: float) -> Rest:
        """Return the same client for callers that wait no longer for an answer."""
        found = copy.copy(self)
        found._timeout_s, found._is_hasty = min(timeout_s, self._timeout_s), True
        return found

    def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        self._pool.clear()

    def get(self, path: str, **query: str) -> Any:
        """Get the JSON value at a path; None if the answer is empty."""
        answer = self.request("GET", path, query=query)
        if not answer.data.strip():
            return None
        try:
            return json.loads(answer.data)
        except ValueError:
            raise AdminError(
                "the admin interface answered with something that is not JSON: is this address a "
                "Pulsar broker's web address?",
                status=answer.status,
            ) from None

    def put(self, path: str, value: Any = None, *, kind: str = "application/json") -> None:
        """Put a JSON value."""
        self.request("PUT", path, value=value, kind=kind)

    def post(self, path: str, value: Any = None, **query: str) -> None:
        """Send a JSON value with POST."""
        self.request("POST", path, value=value, query=query)

    def delete(self, path: str, **query: str) -> None:
        """Delete the object at a path."""
        self.request("DELETE", path, query=query)

    def request(
        self,
        method: str,
        path: str,
        *,
        value: Any = None,
        query: Mapping[str, str] | None = None,
        kind: str = "application/json",
        data: bytes | None = None,
        api: str = "v2",
    ) -> urllib3.BaseHTTPResponse:
        """Send a request, again for 1.7 s while it is answered with 503; return the success."""
        token = self._token() if callable(self._token) else self._token
        headers = {"Accept": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        body = data if value is None else json.dumps(value).encode()
        if body is not None:
            headers["Content-Type"] = kind
        suffix = f"/admin/{api}/{path}" + (f"?{urlencode(query)}" if query else "")
        call = _Call(method, suffix, headers, body)
        pauses = list(_PAUSES_S)
        while True:
            answer = self._send(call)
            if answer.status < 300:
                return answer
            if answer.status == 503 and pauses:
                time.sleep(pauses.pop(0))
                continue
            raise self._error(method, path, answer, token)

    def _send(self, call: _Call) -> urllib3.BaseHTTPResponse:
        """Return the answer of the first address that has one."""
        failure: Exception | None = None
        short = self._for_service or len(self._addresses) > 1
        for address in sorted(self._addresses, key=lambda each: each.rank):
            url = address.url + call.suffix
            try:
                answer = self._ask(call, address, url, self._timeout_s, short=short)
            except urllib3.exceptions.HTTPError as error:
                failure = failure or error
                if self._is_hasty and _is_timeout(error) and address.probe_at_s is None:
                    break  # it lives, and the request may take as long at another one
                continue
            return self._follow(call, address, url, answer)
        raise BrokerUnreachableError(
            f"the admin interface at {self.admin_url} does not answer ({_failure_words(failure)}): "
            "is the broker running, and is this its web "
            "address? Name it with admin_url, --admin-url or DELAYLEVEL_ADMIN_URL"
        ) from failure

    def _follow(
        self, call: _Call, first: Address, url: str, answer: urllib3.BaseHTTPResponse
    ) -> urllib3.BaseHTTPResponse:
        """Return an answer; if it is a redirect, that of the broker that owns the topic."""
        hops, until_s = 0, time.monotonic() + self._timeout_s
        while (place := _redirection(url, answer)) is not None:
            hops += 1
            if hops == _HOPS:
                raise AdminError(
                    f"{first.url} redirects in a circle: no broker owns the topic now; try again",
                    status=307,
                )
            url, parts = place, urlsplit(place)
            owner = address_at(f"{parts.scheme}://{parts.netloc}")
            left_s = max(until_s - time.monotonic(), min(self._timeout_s, _LEAST_S))
            try:
                # Not by urllib3, which would drop the token.
                answer = self._ask(call, owner, url, left_s, short=self._for_service)
            except urllib3.exceptions.HTTPError as error:
                raise BrokerUnreachableError(
                    f"the broker at {owner.host} does not answer ({_failure_words(error)}), and "
                    f"{first.host} names it as the broker of the topic: start it again, or wait "
                    "until another broker takes over its topics, usually within a minute",
                    address=owner.host,
                ) from error
        return answer

    def _lives(self, address: Address) -> bool:
        """Return False if an address hangs, and still gives no sign of life."""
        if address.probe_at_s is None:
            return True
        with address.probing:  # the others wait for its result
            now_s = time.monotonic()
            if address.probe_at_s is None:
                return True
            if now_s < address.probe_at_s:
                return False
            address.probe_at_s = now_s + _PROBE_EVERY_S
            if not self._gives_sign(address):
                return False
            address.answered()
            return True

    def _gives_sign(self, address: Address) -> bool:
        """Return True if an address answers anything soon."""
        try:
            self._once(_Call("GET", "", {}, None), address.url + "/status.html", _PROBE_TIMEOUT_S)
        except urllib3.exceptions.HTTPError:
            return False
        return True

    def _ask(
        self, call: _Call, address: Address, url: str, whole_s: float, *, short: bool
    ) -> urllib3.BaseHTTPResponse:
        """Send one request, and note if the broker answers; if ``short``, give up soon."""
        if short and not self._lives(address):
            raise urllib3.exceptions.TimeoutError("no answer in time")
        is_slow = time.monotonic() < address.slow_until_s
        early = short and call.method == "GET" and not is_slow and whole_s > _PATIENCE_S
        try:
            answer = self._once(call, url, _PATIENCE_S if early else whole_s)
        except urllib3.exceptions.HTTPError as error:
            if early and _is_timeout(error) and self._gives_sign(address):
                # It lives: it is asked once more, with all the time that it may take, even if it
                # gives another request no sign of life meanwhile. Reads that always take long are
                # not to be sent twice each time.
                address.slow_until_s = time.monotonic() + _SLOW_S
                return self._ask(call, address, url, whole_s, short=False)
            if early or not (self._is_hasty and _is_timeout(error)):
                address.no_answer(error)
            raise
        address.answered()
        return answer

    def _once(self, call: _Call, url: str, timeout_s: float) -> urllib3.BaseHTTPResponse:
        timeout = urllib3.Timeout(connect=min(timeout_s, 10.0), read=timeout_s)
        ask = partial(
            self._pool.request,
            call.method,
            url,
            headers=call.headers,
            body=call.body,
            redirect=False,
            retries=False,  # those of urllib3 would also repeat what has timed out
            timeout=timeout,
        )
        try:
            return ask()
        except urllib3.exceptions.ProtocolError:
            # The server has just closed a kept-alive connection. It may have processed the request
            # without an answer, so only reads are repeated.
            if call.method != "GET":
                raise
            return ask()

    def _error(
        self, method: str, path: str, answer: urllib3.BaseHTTPResponse, token: str | None
    ) -> AdminError:
        reason = _reason_of(answer)
        if token:
            reason = reason.replace(token, "…")
        kind = _ERRORS.get(answer.status, AdminError)
        text = f"{method} {path} was refused with {answer.status}: {reason}"
        if kind is PermissionDeniedError:
            text += _permission_advice(token)
        return kind(text, status=answer.status, reason=reason)


def _permission_advice(token: str | None) -> str:
    """Return the remedy for a refusal; the broker itself does not report an expired token."""
    if not token:
        return f": this cluster wants a token ({_TOKEN})"
    expired_ms = _expired_ms(token)
    if expired_ms is not None:
        return f": the token expired at {format_instant(expired_ms)}; renew it ({_TOKEN})"
    return f": check the token ({_TOKEN}) and what its role may do"


def _expired_ms(token: str) -> int | None:
    """Return the time at which a JSON web token expired, ms since the epoch, or None."""
    try:
        claims = token.split(".")[1]
        expires_ms = int(json.loads(base64.urlsafe_b64decode(claims + "==="))["exp"] * 1000)
    except (LookupError, TypeError, ValueError, OverflowError):
        return None
    return expires_ms if expires_ms <= SystemClock().now_ms() else None


def _redirection(url: str, answer: urllib3.BaseHTTPResponse) -> str | None:
    """Return the URL to which an answer redirects, as to the owner of a topic, or None."""
    place = answer.headers.get("Location")
    if answer.status not in (307, 308) or not place:
        return None
    place = urljoin(url, place)
    if url.startswith("https:") and not place.startswith("https:"):
        raise AdminError(
            f"{url} redirects to {urlsplit(place).netloc} without TLS; the token was not sent "
            "there: set brokerServicePortTls and webServicePortTls on every broker",
            status=answer.status,
        )
    return place


def _is_timeout(error: Exception) -> bool:
    # A refused connection is a kind of timeout in urllib3.
    refused = isinstance(error, urllib3.exceptions.NewConnectionError)
    return isinstance(error, urllib3.exceptions.TimeoutError) and not refused


def _reason_of(answer: urllib3.BaseHTTPResponse) -> str:
    """Return the broker's reason in one line without stack traces."""
    text = answer.data.decode("utf-8", "replace")
    try:
        value = json.loads(text)
        if isinstance(value, dict):  # "message" comes from the web server
            value = value.get("reason") or value.get("message") or ""
        text = str(value)
    except ValueError:
        text = "" if text.lstrip().startswith("<") else text
    text = text.partition("Stacktrace:")[0]
    text = text.partition("Message:")[2] or text
    return " ".join(text.split())[:_LONGEST_REASON] or (answer.reason or "no reason given")


def _failure_words(failure: Exception | None) -> str:
    """Return the reason why there was no answer, without urllib3's own objects in front of it."""
    return re.sub(r"^<?[\w.]*Connection\w*\b.*?[)>]: ", "", str(failure or ""))
