"""HTTP requests to the admin interface: addresses, token, TLS, redirects, and our own errors."""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict
from urllib.parse import urlencode, urljoin, urlsplit

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

# A broker's address may belong to another program later: those that nobody has named for this time
# are forgotten.
_KEEP_S = 600.0
# The limit of brokers that are tried when no given address answers.
_MOST_LEARNED = 8
# The list of brokers is requested after this time, and then once in each period. Short commands end
# before that.
_FIRST_LIST_S, _LIST_EVERY_S = 5.0, 300.0
# An address that timed out is asked for a sign of life at most once in this time.
_PROBE_EVERY_S = 2.0
# An address that was slow, and gave a sign of life, is waited for in this time.
_SLOW_S = 30.0


class AdminAddresses:
    """The addresses of one cluster: those that the user gave, and those of its other brokers.

    The address that answered last comes first, and those that have failed since their last answer
    come at the end. Brokers
    whose addresses are known from redirects, or from the cluster's own list, are tried after the
    given addresses. So an address that does not answer stops nothing while another broker lives.

    Any number of threads may use one instance.
    """

    def __init__(self, given: Iterable[str], now_s: Callable[[], float] = time.monotonic) -> None:
        self._given = tuple(given)
        self._now_s = now_s
        # Each operation on these is atomic.
        self._learned: dict[str, float] = {}  # time at which the address was named last
        self._answered: dict[str, float] = {}
        self._failed: set[str] = set()
        self._probe_at_s: dict[str, float] = {}  # of those that timed out and have not answered
        self._slow_until_s: dict[str, float] = {}
        self._list_at_s = now_s() + _FIRST_LIST_S
        self.probing = threading.Lock()  # held while an address is asked for a sign of life

    def in_order(self) -> list[str]:
        """Return the base URLs, the first one to try first."""
        oldest_s = self._now_s() - _KEEP_S
        for address, named_s in list(self._learned.items()):
            if max(named_s, self._answered.get(address, named_s)) < oldest_s:
                self._learned.pop(address, None)
        learned = list(self._learned)[-_MOST_LEARNED:]
        return sorted(
            [*self._given, *learned],
            key=lambda each: (each in self._failed, -self._answered.get(each, float("-inf"))),
        )

    def answered(self, address: str) -> None:
        """Note that an address has answered now."""
        self._failed.discard(address)
        self._probe_at_s.pop(address, None)
        self._answered[address] = self._now_s()

    def failed(self, address: str, *, hangs: bool) -> None:
        """Note that an address does not answer.

        Args:
            hangs: True if a request timed out; False if the connection failed at once.
        """
        self._failed.add(address)
        if hangs:
            self._slow_until_s.pop(address, None)
            self._probe_at_s.setdefault(address, 0.0)

    def slow(self, address: str) -> None:
        """Note that an address lives, although a request had no answer soon."""
        self._slow_until_s[address] = self._now_s() + _SLOW_S

    def is_slow(self, address: str) -> bool:
        """Return True if an address was slow lately, and has not hung since."""
        return self._now_s() < self._slow_until_s.get(address, 0.0)

    def needs_probe(self, address: str) -> bool:
        """Return True if a request to an address timed out, and it has not answered since."""
        return address in self._probe_at_s

    def take_probe(self, address: str) -> bool:
        """Return True if it is time to ask an address for a sign of life; once in each period."""
        now_s = self._now_s()
        if now_s < self._probe_at_s.get(address, 0.0):
            return False
        self._probe_at_s[address] = now_s + _PROBE_EVERY_S
        return True

    def redirected(self, address: str) -> None:
        """Note that an address has answered to which another one redirects."""
        self._failed.discard(address)
        self._probe_at_s.pop(address, None)
        self.learn(address)

    def learn(self, address: str) -> None:
        """Note the base URL of a broker of the cluster."""
        if address not in self._given:
            self._learned.pop(address, None)  # the latest ones are at the end
            self._learned[address] = self._now_s()

    def is_list_due(self) -> bool:
        """Return True if it is time to request the list of brokers; once in each period."""
        now_s = self._now_s()
        if now_s < self._list_at_s:
            return False
        self._list_at_s = now_s + _LIST_EVERY_S
        return True


# All clients of a process that have the same addresses share what they know.
_shared: dict[str, AdminAddresses] = {}


def addresses_of(admin_url: str) -> AdminAddresses:
    """Return the addresses that an ``admin_url`` names; always the same instance."""
    scheme, separator, rest = admin_url.partition("://")
    hosts = [host.strip().rstrip("/") for host in rest.split(",") if host.strip("/ ")]
    if not separator or scheme not in ("http", "https") or not hosts:
        raise ConfigError(f"admin_url {admin_url!r} must look like http://host:port")
    if "@" in rest:
        raise ConfigError("admin_url must not carry a user or password: use a token")
    given = AdminAddresses(f"{scheme}://{host}" for host in hosts)
    return _shared.setdefault(admin_url, given)


def base_of(url: str) -> str:
    """Return scheme, host and port of a URL."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def host_of(url: str) -> str:
    """Return host and port of a URL."""
    return urlsplit(url).netloc


Token = str | Callable[[], str | None] | None
_Path = str | os.PathLike[str] | None

#: The settings of a command that have a token.
TOKEN_NAMED = "--token-file, DELAYLEVEL_TOKEN_FILE"
_LONGEST_REASON = 400
_HOPS = 5
_LIST_TIMEOUT_S = 1.0
# A read that has no answer after this time is given up, unless the broker gives a sign of life.
_PATIENCE_S = 3.0
_PROBE_TIMEOUT_S = 1.0
# Pause between two looks at addresses that hang, by a request that waits for one of them.
_WAIT_S = 0.25
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
        token_named: name of the setting that has the token, for the advice in errors.
    """

    token: Token
    tls_trust_certs_file: _Path
    tls_certificate_file: _Path
    tls_private_key_file: _Path
    tls_allow_insecure: bool
    tls_validate_hostname: bool
    timeout_s: float
    for_service: bool
    token_named: str


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


class Rest:
    """Client of one cluster's admin REST interface, for any number of threads."""

    def __init__(
        self,
        admin_url: str,
        *,
        token: Token = None,
        tls_trust_certs_file: _Path = None,
        tls_certificate_file: _Path = None,
        tls_private_key_file: _Path = None,
        tls_allow_insecure: bool = False,
        tls_validate_hostname: bool = True,
        timeout_s: float = 30.0,
        for_service: bool = False,
        token_named: str = TOKEN_NAMED,
    ) -> None:
        self.admin_url = admin_url
        self._token_named = token_named
        self._addresses = addresses_of(admin_url)
        self._token = token
        for file in (tls_trust_certs_file, tls_certificate_file, tls_private_key_file):
            if file is not None and not os.path.isfile(file):
                raise ConfigError(f"there is no certificate or key file {os.fspath(file)}")
        tls: dict[str, Any] = {}
        if admin_url.startswith("https"):
            tls["cert_reqs"] = "CERT_NONE" if tls_allow_insecure else "CERT_REQUIRED"
            tls["ca_certs"] = os.fspath(tls_trust_certs_file or certifi.where())
            if tls_allow_insecure or not tls_validate_hostname:
                tls["assert_hostname"] = False
            if tls_allow_insecure:
                urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
            if tls_certificate_file is not None:
                tls["cert_file"] = os.fspath(tls_certificate_file)
            if tls_private_key_file is not None:
                tls["key_file"] = os.fspath(tls_private_key_file)
        self._timeout_s = timeout_s
        self._for_service = for_service
        # A service asks about many topics at once when it starts: beyond this number, connections
        # are closed after each request, with a line in the log.
        self._pool = urllib3.PoolManager(maxsize=128, **tls)

    def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        self._pool.clear()

    def get(self, path: str, **query: str) -> Any:
        """Get the JSON value at a path; None if the answer is empty."""
        return _json_value(self.request("GET", path, query=query))

    def get_soon(self, path: str, timeout_s: float, query: Mapping[str, str]) -> Any:
        """Get a value as `get` does, with a timeout as for `request`."""
        return _json_value(self.request("GET", path, query=query, timeout_s=timeout_s))

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
        retry: bool = True,
        data: bytes | None = None,
        api: str = "v2",
        timeout_s: float | None = None,
    ) -> urllib3.BaseHTTPResponse:
        """Send a request and return the successful answer.

        Args:
            retry: True to repeat the request for 1.7 s while the broker answers 503.
            api: the version of the interface: ``v2``, or ``v3`` for functions.
            timeout_s: time to wait for this answer, in s; by default that of all requests. If a
                broker that lives does not answer by then, no other one is tried: the request may
                take as long there.
        """
        token = self._token() if callable(self._token) else self._token
        headers = {"Accept": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        body = data if value is None else json.dumps(value).encode()
        if body is not None:
            headers["Content-Type"] = kind
        suffix = f"/admin/{api}/{path}" + (f"?{urlencode(query)}" if query else "")
        pauses = list(_PAUSES_S) if retry else []
        while True:
            answer = self._send(method, suffix, headers, body, timeout_s)
            if answer.status < 300:
                self._learn_brokers(headers)
                return answer
            if answer.status == 503 and pauses:
                time.sleep(pauses.pop(0))
                continue
            raise self._error(method, path, answer, token)

    def _send(
        self,
        method: str,
        suffix: str,
        headers: dict[str, str],
        body: bytes | None,
        timeout_s: float | None,
    ) -> urllib3.BaseHTTPResponse:
        failure: Exception | None = None
        whole_s = self._timeout_s if timeout_s is None else timeout_s
        until_s = time.monotonic() + whole_s
        bases = self._addresses.in_order()
        short = self._for_service or len(bases) > 1
        changed: set[str] = set()  # addresses that have perhaps made the change
        while True:
            for base in bases:
                if not self._lives(base):
                    failure = failure or urllib3.exceptions.TimeoutError("no answer in time")
                    continue
                try:
                    answer = self._ask(method, base + suffix, headers, body, whole_s, short=short)
                except urllib3.exceptions.HTTPError as error:
                    slow = _is_timeout(error) and not self._addresses.needs_probe(base)
                    if slow and timeout_s is not None:
                        raise self._no_answer(error) from error
                    self._addresses.failed(base, hangs=_is_timeout(error))
                    failure = failure or error
                    if method != "GET":
                        changed.add(base)
                    continue
                self._addresses.answered(base)
                return self._follow(method, base + suffix, answer, headers, body, whole_s)
            bases = [
                base for base in bases if base not in changed and self._addresses.needs_probe(base)
            ]
            if not bases or not self._waits(until_s):
                raise self._no_answer(failure) from failure
            whole_s = max(until_s - time.monotonic(), _LEAST_S)

    def _no_answer(self, failure: Exception | None) -> BrokerUnreachableError:
        return BrokerUnreachableError(
            f"the admin interface at {self.admin_url} does not answer ({_failure_words(failure)}): "
            "is the broker running, and is this its web "
            "address? Name it with admin_url, --admin-url or DELAYLEVEL_ADMIN_URL"
        )

    def _waits(self, until_s: float) -> bool:
        """Wait a moment for an address that hangs; return False if there is no time for that."""
        if self._for_service or time.monotonic() + _WAIT_S >= until_s:
            return False
        time.sleep(_WAIT_S)
        return True

    def _lives(self, base: str) -> bool:
        """Return False if an address timed out, and still gives no sign of life.

        So an address that hangs costs one request some seconds, and not every one.
        """
        addresses = self._addresses
        if not addresses.needs_probe(base):
            return True
        with addresses.probing:  # the others wait for its result
            if not addresses.needs_probe(base):
                return True
            if not addresses.take_probe(base):
                return False
            if self._gives_sign(base):
                addresses.answered(base)
                return True
            return False

    def _gives_sign(self, base: str) -> bool:
        """Return True if an address answers anything soon."""
        url = base + "/status.html"
        try:
            self._pool.request("GET", url, redirect=False, retries=False, timeout=_PROBE_TIMEOUT_S)
        except urllib3.exceptions.HTTPError:
            return False
        return True

    def _follow(
        self,
        method: str,
        url: str,
        answer: urllib3.BaseHTTPResponse,
        headers: dict[str, str],
        body: bytes | None,
        whole_s: float,
    ) -> urllib3.BaseHTTPResponse:
        """Return an answer; if it is a redirect, that of the broker that owns the topic."""
        first, hops = url, 0
        until_s = time.monotonic() + whole_s
        while (place := _redirection(url, answer)) is not None:
            hops += 1
            if hops == _HOPS:
                raise AdminError(
                    f"{base_of(first)} redirects in a circle: no broker owns the topic now; try "
                    "again",
                    status=307,
                )
            url = place
            owner = base_of(url)
            while not self._lives(owner):
                if not self._waits(until_s):
                    raise _broker_away(url, first, "no answer in time")
            left_s = max(until_s - time.monotonic(), min(whole_s, _LEAST_S))
            try:
                # Not by urllib3, which would drop the token.
                answer = self._ask(method, url, headers, body, left_s, short=self._for_service)
            except urllib3.exceptions.HTTPError as error:
                self._addresses.failed(owner, hangs=_is_timeout(error))
                raise _broker_away(url, first, _failure_words(error)) from error
            self._addresses.redirected(owner)
        return answer

    def _learn_brokers(self, headers: Mapping[str, str]) -> None:
        """Request the list of brokers now and then, for the time when no given address answers."""
        # Over TLS, the list has the wrong ports; redirects have the right ones.
        if self.admin_url.startswith("https") or not self._addresses.is_list_due():
            return
        url = self._addresses.in_order()[0] + "/admin/v2/brokers"
        try:
            answer = self._pool.request(
                "GET", url, headers=headers, redirect=False, retries=False, timeout=_LIST_TIMEOUT_S
            )
            found = answer.json() if answer.status == 200 else ()
        except (urllib3.exceptions.HTTPError, ValueError):
            return
        for broker in found if isinstance(found, list) else ():
            self._addresses.learn(f"http://{broker}")

    def _ask(
        self,
        method: str,
        url: str,
        headers: dict[str, str],
        body: bytes | None,
        whole_s: float,
        *,
        short: bool,
    ) -> urllib3.BaseHTTPResponse:
        """Send one request, as `_ask_once`; give a read up early if its broker hangs.

        A broker that lives is asked once more, with all the time that it may take.
        """
        base = base_of(url)
        short = short and method == "GET" and whole_s > _PATIENCE_S
        if short and not self._addresses.is_slow(base):
            try:
                return self._ask_once(method, url, headers, body, _PATIENCE_S)
            except urllib3.exceptions.HTTPError as error:
                if not _is_timeout(error):
                    raise
                if not self._gives_sign(base):
                    self._addresses.failed(base, hangs=True)
                    raise
                self._addresses.slow(base)
        return self._ask_once(method, url, headers, body, whole_s)

    def _ask_once(
        self, method: str, url: str, headers: dict[str, str], body: bytes | None, timeout_s: float
    ) -> urllib3.BaseHTTPResponse:
        timeout = urllib3.Timeout(connect=min(timeout_s, 10.0), read=timeout_s)

        def ask() -> urllib3.BaseHTTPResponse:
            return self._pool.request(
                method,
                url,
                headers=headers,
                body=body,
                redirect=False,
                retries=False,
                timeout=timeout,
            )

        try:
            return ask()
        except urllib3.exceptions.ProtocolError:
            # The server has just closed a kept-alive connection. It may have processed the request
            # without an answer, so only reads are repeated.
            if method != "GET":
                raise
            return ask()

    def _error(
        self, method: str, path: str, answer: urllib3.BaseHTTPResponse, token: str | None
    ) -> AdminError:
        reason = _reason_of(answer)
        if token:
            reason = reason.replace(token, "…")
        kind = _ERRORS.get(answer.status, AdminError)
        advice = (
            _permission_advice(token, self._token_named) if kind is PermissionDeniedError else ""
        )
        return kind(
            f"{method} {path} was refused with {answer.status}: {reason}{advice}",
            status=answer.status,
            reason=reason,
        )


def _permission_advice(token: str | None, named: str) -> str:
    """Return the remedy for a refusal; the broker itself does not report an expired token."""
    if not token:
        return f": this cluster wants a token ({named})"
    expired_ms = _expired_ms(token)
    if expired_ms is not None:
        again = "file" if named == TOKEN_NAMED else "function"
        return (
            f": the token expired at {format_instant(expired_ms)}; put a new one in its place "
            f"({named}: a {again} is read again at every use)"
        )
    return f": check the token ({named}) and what its role may do"


def _expired_ms(token: str) -> int | None:
    """Return the time at which a JSON web token expired, ms since the epoch, or None."""
    try:
        claims = token.split(".")[1]
        expires_ms = int(json.loads(base64.urlsafe_b64decode(claims + "==="))["exp"] * 1000)
    except (LookupError, TypeError, ValueError, OverflowError):
        return None
    return expires_ms if expires_ms <= SystemClock().now_ms() else None


def _redirection(url: str, answer: urllib3.BaseHTTPResponse) -> str | None:
    """Return the URL to which an answer redirects; None if it is not a redirect.

    Pulsar redirects with 307 to the broker that owns the topic.
    """
    place = answer.headers.get("Location")
    if answer.status not in (307, 308) or not place:
        return None
    place = urljoin(url, place)
    if url.startswith("https:") and not place.startswith("https:"):
        raise AdminError(
            f"{base_of(url)} redirects to {host_of(place)} without TLS; the token was not sent "
            "there: set brokerServicePortTls and webServicePortTls on every broker",
            status=answer.status,
        )
    return place


def _broker_away(url: str, asked: str, words: str) -> BrokerUnreachableError:
    """Return the error for a broker that does not answer, although another one redirects to it."""
    host = host_of(url)
    return BrokerUnreachableError(
        f"the broker at {host} does not answer ({words}), and {host_of(asked)} names it as the "
        "broker of the topic: start it again, or wait until another broker takes over its topics, "
        "usually within a minute",
        address=host,
    )


def _is_timeout(error: Exception) -> bool:
    # A refused connection is a kind of timeout in urllib3.
    refused = isinstance(error, urllib3.exceptions.NewConnectionError)
    return isinstance(error, urllib3.exceptions.TimeoutError) and not refused


def _json_value(answer: urllib3.BaseHTTPResponse) -> Any:
    text = answer.data
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except ValueError:
        raise AdminError(
            "the admin interface answered with something that is not JSON: is this address a "
            "Pulsar broker's web address?",
            status=answer.status,
        ) from None


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
    """Return the reason why there was no answer, without the pool's own wrapping."""
    if isinstance(failure, urllib3.exceptions.NameResolutionError):
        return "the host name is unknown"
    if isinstance(failure, urllib3.exceptions.NewConnectionError):
        return str(failure.__cause__ or failure).rpartition("] ")[2].lower()
    if isinstance(failure, urllib3.exceptions.ConnectTimeoutError):
        return "no connection in time"
    if isinstance(failure, urllib3.exceptions.ReadTimeoutError):
        return "no answer in time"
    if isinstance(failure, urllib3.exceptions.SSLError):
        return f"TLS: {failure}"
    return str(failure)
