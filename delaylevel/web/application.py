"""Endpoints of a process: metrics, probes, status page, live queries."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import parse_qsl

from .pages import status_page
from .reports import TOKEN_VARIABLE, LiveAnswer, ProbeCheck, QueryRefusedError, Reporter
from .server import Request, Response, is_loopback

#: The paths whose answers nothing may delay.
PROBES = ("/healthz", "/readyz")
#: Number of live queries that may wait for the one in work.
_WAITING_QUERIES = 5
_QUESTIONS = ("pending", "average", "counts")
_PAGE, _TEXT, _JSON = "text/html; charset=utf-8", "text/plain; charset=utf-8", "application/json"
_HEADERS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    (
        "Content-Security-Policy",
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; form-action 'none'; "
        "frame-ancestors 'none'; base-uri 'none'",
    ),
)


class _RefusedRequest(Exception):  # noqa: N818 - an answer, not a failure
    """A request that is answered with a status other than 200."""

    def __init__(self, status: int, text: str, *headers: tuple[str, str]) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


class WebApplication:
    """The endpoints of a process.

    Args:
        metrics: function that returns the metrics, given the ``Accept`` header.
        token: token of live queries and of the status page; empty for none. Without a token, only
            clients on this machine may ask, and only if no other machine can reach the address.
    """

    def __init__(
        self,
        metrics: Callable[[str], LiveAnswer],
        reporters: Sequence[Reporter],
        address: str,
        token: str = "",
    ) -> None:
        self._reporters = reporters
        self._local = is_loopback(address)
        self._address = address
        self._token = token.encode()
        self._room = threading.BoundedSemaphore(_WAITING_QUERIES + 1)
        self._turn = threading.Lock()
        self._routes: dict[str, Callable[[Request], tuple[int, LiveAnswer]]] = {
            "/metrics": lambda request: (200, metrics(request.headers.get("accept", ""))),
            "/": self._status,
            "/healthz": lambda _: self._probe([check for r in reporters for check in r.alive()]),
            "/readyz": lambda _: self._probe([check for r in reporters for check in r.ready()]),
            **{f"/{name}": self._live for name in _QUESTIONS},
        }

    def __call__(self, request: Request) -> Response:
        """Answer a request."""
        extra: Sequence[tuple[str, str]] = ()
        try:
            route = self._routes.get(request.path)
            if route is None:
                text = f"there is no such page; there are {', '.join(self._routes)}"
                raise _RefusedRequest(404, text)
            if request.method not in ("GET", "HEAD"):
                raise _RefusedRequest(405, "only GET is supported", ("Allow", "GET, HEAD"))
            status, (kind, body) = route(request)
        except (_RefusedRequest, QueryRefusedError) as error:
            status, kind, body = error.status, _TEXT, f"{error}\n".encode()
            if isinstance(error, _RefusedRequest):
                extra = error.headers
            elif status == 503:
                extra = (("Retry-After", "1"),)
        return Response(status, body, (("Content-Type", kind), *_HEADERS, *extra))

    def _probe(self, checks: Sequence[ProbeCheck]) -> tuple[int, LiveAnswer]:
        ok = all(check.ok for check in checks)
        value = {"ok": ok, "checks": [check._asdict() for check in checks]}
        body = json.dumps(value, indent=1).encode() + b"\n"
        return (200 if ok else 503), LiveAnswer(_JSON, body)

    def _status(self, request: Request) -> tuple[int, LiveAnswer]:
        self._authorize(request)
        sections = [section for reporter in self._reporters for section in reporter.status()]
        checks = [check for reporter in self._reporters for check in reporter.ready()]
        return 200, LiveAnswer(_PAGE, status_page(sections, checks).encode())

    def _live(self, request: Request) -> tuple[int, LiveAnswer]:
        self._authorize(request)
        parameters = _parameters(request.query)
        if not self._room.acquire(blocking=False):
            text = "too many live queries at the same time: ask again in a second"
            raise QueryRefusedError(text, 503)
        try:
            # One at a time: each takes little time, and together they would take it from releases.
            with self._turn:
                return 200, self._answer(request.path.lstrip("/"), parameters)
        finally:
            self._room.release()

    def _answer(self, question: str, parameters: Mapping[str, str]) -> LiveAnswer:
        """Return the answer of the first part that serves the level topic of a query."""
        refusal = QueryRefusedError("this process has no window of a level topic to ask", 404)
        for reporter in self._reporters:
            try:
                answer = reporter.answer(question, parameters)
            except QueryRefusedError as error:
                if error.status != 404:
                    raise
                refusal = error
            else:
                if answer is not None:
                    return answer
        raise refusal

    def _authorize(self, request: Request) -> None:
        """Refuse a request that is neither from this machine alone nor has a token."""
        if self._token:
            if hmac.compare_digest(_token_of(request), self._token):
                return
            raise _RefusedRequest(
                401,
                "this needs the token of live queries, as bearer token or as the password of any "
                "user",
                ("WWW-Authenticate", 'Basic realm="delaylevel", charset="UTF-8"'),
            )
        if not self._local:
            raise _RefusedRequest(
                403,
                f"live queries on {self._address} need a token: set {TOKEN_VARIABLE} in the "
                "environment of this process, or let it listen on 127.0.0.1",
            )
        if not is_loopback(_host_of(request)):
            # A page on the web whose name was made to point to this machine must not ask.
            raise _RefusedRequest(403, "this process answers only under the name localhost")


def _host_of(request: Request) -> str:
    """Return the host for which a request is meant, without its port."""
    host = request.headers.get("host", "")
    name, _, port = host.rpartition(":")
    if not name or not port.isdigit():
        name = host
    return name.strip("[]")


def _token_of(request: Request) -> bytes:
    """Return the bearer token, or the password that a browser sends; empty for none."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value.strip().encode("latin-1", "replace")
    if kind.lower() == "basic":
        with contextlib.suppress(binascii.Error, ValueError):
            return base64.b64decode(value, validate=True).partition(b":")[2]
    return b""


def _parameters(query: str) -> dict[str, str]:
    """Return the parameters of a URL."""
    try:
        pairs = parse_qsl(query, True, errors="strict", max_num_fields=32)
    except ValueError as error:
        raise _RefusedRequest(400, f"the parameters cannot be read: {error}") from None
    parameters = dict(pairs)
    if len(parameters) < len(pairs):
        raise _RefusedRequest(400, "a parameter is given twice")
    return parameters
