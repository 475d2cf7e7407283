"""Endpoints of a process: metrics, probes, status page, live queries, actions."""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import parse_qsl

from .pages import action_page, status_page
from .reports import (
    ACTION_TOKEN_VARIABLE,
    ACTIONS,
    TOKEN_VARIABLE,
    Actions,
    LiveAnswer,
    ProbeCheck,
    QueryRefusedError,
    Reporter,
)
from .server import Request, Response, is_loopback

log = logging.getLogger(__name__)

#: The paths whose answers nothing may delay.
PROBES = ("/healthz", "/readyz")
#: Number of live queries that may wait for the one in work.
_WAITING_QUERIES = 5
_QUESTIONS = ("pending", "average", "counts")
#: Time to wait for the end of another action, in s.
_ACTION_WAIT_S = 10.0
_PAGE, _TEXT, _JSON = "text/html; charset=utf-8", "text/plain; charset=utf-8", "application/json"
_FORM = "application/x-www-form-urlencoded"
_HEADERS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    (
        "Content-Security-Policy",
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; form-action 'self'; "
        "frame-ancestors 'none'; base-uri 'none'",
    ),
)


class WebApplication:
    """The endpoints of a process.

    Without a token of live queries, only clients on this machine may ask, and only if no other
    machine can reach the address. Without one of actions, nobody may act, on this machine either.
    """

    def __init__(
        self,
        metrics: Callable[[str], LiveAnswer],
        reporters: Sequence[Reporter],
        address: str,
        token: str,
        actions: Actions | None,
        action_token: str,
    ) -> None:
        self._reporters = reporters
        self._local = is_loopback(address)
        self._address = address
        self._token = token.encode()
        self._actions = actions
        self._action_token = action_token.encode()
        self._acting = threading.Lock()
        self._room = threading.BoundedSemaphore(_WAITING_QUERIES + 1)
        self._turn = threading.Lock()
        self._routes: dict[str, Callable[[Request], tuple[int, LiveAnswer]]] = {
            "/metrics": lambda request: (200, metrics(request.headers.get("accept", ""))),
            "/": self._status,
            "/healthz": lambda _: self._probe([check for r in reporters for check in r.alive()]),
            "/readyz": lambda _: self._probe([check for r in reporters for check in r.ready()]),
            **{f"/{name}": self._live for name in _QUESTIONS},
        }
        if actions is not None:
            self._routes["/actions"] = self._action_page
            self._routes |= {f"/actions/{name}": self._act for name in ACTIONS}

    def __call__(self, request: Request) -> Response:
        """Answer a request."""
        extra: Sequence[tuple[str, str]] = ()
        try:
            route = self._routes.get(request.path)
            if route is None:
                text = f"there is no such page; there are {', '.join(self._routes)}"
                raise QueryRefusedError(text, 404)
            methods = ("POST",) if route == self._act else ("GET", "HEAD")
            if request.method not in methods:
                text = f"only {methods[0]} is supported here"
                raise QueryRefusedError(text, 405, ("Allow", ", ".join(methods)))
            status, (kind, body) = route(request)
        except QueryRefusedError as error:
            status, kind, body = error.status, _TEXT, f"{error}\n".encode()
            extra = (("Retry-After", "1"),) if status == 503 else error.headers
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
        page = status_page(sections, checks, can_act=bool(self._actions and self._action_token))
        return 200, LiveAnswer(_PAGE, page.encode())

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

    def _action_page(self, request: Request) -> tuple[int, LiveAnswer]:
        assert self._actions is not None
        self._authorize_action(request)
        return 200, LiveAnswer(_PAGE, action_page(self._actions.topics()).encode())

    def _act(self, request: Request) -> tuple[int, LiveAnswer]:
        """Perform an action, and answer with a page for browsers, or with JSON."""
        assert self._actions is not None
        user = self._authorize_action(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
            raise QueryRefusedError(f"the body has to be a form ({_FORM})", 415)
        given = _parameters(request.body)
        parameters = {name: value for name, value in given.items() if value.strip()}
        action = request.path.rpartition("/")[2]
        if not self._acting.acquire(timeout=_ACTION_WAIT_S):
            raise QueryRefusedError("another action is being performed: try again", 503)
        what = (action, parameters, user, request.client)
        try:
            report = self._actions.act(action, parameters)
        except Exception:
            log.warning("action %s %r by %r from %s failed", *what)
            raise
        finally:
            self._acting.release()
        outcomes = [f"{row.get('id')} {row['outcome']}" for row in report.rows if "outcome" in row]
        line = "action %s %r by %r from %s: %s %r %s"
        log.warning(line, *what, report.status, report.text, outcomes)
        if "text/html" in request.headers.get("accept", ""):
            topic = parameters.get("topic", "")
            page = action_page(self._actions.topics(), report, topic)
            return report.status, LiveAnswer(_PAGE, page.encode())
        value = {"done": report.status == 200, "text": report.text, "rows": report.rows}
        return report.status, LiveAnswer(_JSON, json.dumps(value).encode() + b"\n")

    def _authorize_action(self, request: Request) -> str:
        """Refuse a request without the token of actions; return the name that its user gives."""
        # A browser sends a remembered password with every request, also one that a page of another
        # origin makes. So a password counts only if the browser names our own origin.
        if not self._action_token:
            raise QueryRefusedError(
                f"actions need a token: set {ACTION_TOKEN_VARIABLE} in the environment of this "
                "process",
                403,
            )
        user, token, by_browser = _credentials_of(request)
        if not hmac.compare_digest(token, self._action_token):
            raise _unauthorized("actions", " actions")
        if by_browser and request.method == "POST" and not _is_same_origin(request):
            raise QueryRefusedError(
                "a password counts only for a form of this page: send the token as bearer token, "
                "or let the proxy keep the header Host",
                403,
            )
        return user

    def _authorize(self, request: Request) -> None:
        """Refuse a request that is neither from this machine alone nor has a token."""
        given = _credentials_of(request)[1]
        tokens = [token for token in (self._token, self._action_token) if token]
        if any(hmac.compare_digest(given, token) for token in tokens):
            return
        if self._token or (self._action_token and not self._local):
            raise _unauthorized("live queries or of actions")
        if not self._local:
            raise QueryRefusedError(
                f"live queries on {self._address} need a token: set {TOKEN_VARIABLE} in the "
                "environment of this process, or let it listen on 127.0.0.1",
                403,
            )
        if not is_loopback(_host_of(request)):
            # A page on the web whose name was made to point to this machine must not ask.
            raise QueryRefusedError("this process answers only under the name localhost", 403)


def _host_of(request: Request) -> str:
    """Return the host for which a request is meant, without its port."""
    host = request.headers.get("host", "")
    name, _, port = host.rpartition(":")
    if not name or not port.isdigit():
        name = host
    return name.strip("[]")


def _credentials_of(request: Request) -> tuple[str, bytes, bool]:
    """Return the user, the token, and True if a browser remembers it; empty without one."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return "", value.strip().encode("latin-1", "replace"), False
    if kind.lower() == "basic":
        try:
            user, _, token = base64.b64decode(value, validate=True).partition(b":")
            return user.decode("utf-8", "replace"), token, True
        except (binascii.Error, ValueError):
            pass
    return "", b"", False


def _is_same_origin(request: Request) -> bool:
    """Return True if a browser says that a page of this service sent the request."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin, host = request.headers.get("origin", ""), request.headers.get("host", "")
    return bool(host) and origin.partition("://")[2] == host


def _unauthorized(what: str, realm: str = "") -> QueryRefusedError:
    return QueryRefusedError(
        f"this needs the token of {what}, as bearer token or as the password of any user",
        401,
        ("WWW-Authenticate", f'Basic realm="delaylevel{realm}", charset="UTF-8"'),
    )


def _parameters(data: str | bytes) -> dict[str, str]:
    """Return the parameters of a URL or a form."""
    try:
        text = data if isinstance(data, str) else data.decode()
        pairs = parse_qsl(text, True, errors="strict", max_num_fields=32)
    except ValueError as error:
        raise QueryRefusedError(f"the parameters cannot be read: {error}") from None
    parameters = dict(pairs)
    if len(parameters) < len(pairs):
        raise QueryRefusedError("a parameter is given twice")
    return parameters
