"""Endpoints of a process: ``/metrics``, ``/healthz``, ``/readyz``, status page, live queries."""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from urllib.parse import parse_qsl

from delaylevel import __version__

from .reports import (
    TOKEN_VARIABLE,
    DuePeriod,
    LiveAnswer,
    MinuteLine,
    PartitionLine,
    ProbeCheck,
    ProblemLine,
    QueryRefusedError,
    Reporter,
    StatusSection,
)
from .server import Request, Response, is_loopback

_COMMAND = re.compile(r"`([^`]+)`")
#: Time after which a browser loads the page again, in s.
REFRESH_S = 5
# Sizes of a chart in units of its view box, which the browser scales to the width of the screen.
_WIDTH, _ROW, _LABEL, _NUMBER = 400, 24, 150, 66
_HEIGHT, _AXIS = 90, 16

# Shorter times are the age of the statistics.
_OVERDUE_MS = 2_000

_STYLE = """
:root { color-scheme: light dark; --line: #d8dde3; --soft: #667085; --bar: #2f6fde;
  --bad: #c4320a; --good: #12805c; --back: #ffffff; --page: #f4f6f8; --text: #1d2433; }
@media (prefers-color-scheme: dark) { :root { --line: #343b47; --soft: #98a2b3; --bar: #6c9dff;
  --bad: #ff8a65; --good: #4cc38a; --back: #1b2028; --page: #12161c; --text: #e6e9ef; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 12px; background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 960px; margin: 0 auto; }
h1 { font-size: 20px; margin: 4px 0 12px; }
h2 { font-size: 17px; margin: 0 0 8px; overflow-wrap: anywhere; }
h3 { font-size: 14px; margin: 16px 0 6px; color: var(--soft); font-weight: 600; }
section { background: var(--back); border: 1px solid var(--line); border-radius: 8px;
  padding: 14px; margin: 0 0 14px; }
.badge { display: inline-block; padding: 1px 9px; border-radius: 10px; font-size: 13px;
  color: var(--back); background: var(--good); vertical-align: middle; }
.badge.bad { background: var(--bad); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
ul { margin: 0; padding: 0; list-style: none; }
li.problem { border-left: 3px solid var(--bad); padding: 2px 0 2px 10px; margin: 8px 0 0; }
li.problem:first-child { margin-top: 0; }
li.problem span { display: block; color: var(--soft); overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--soft); font-weight: 600; }
th, td { padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.wrap { white-space: normal; overflow-wrap: anywhere; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.bad { color: var(--bad); } .badge.bad { color: var(--back); } .soft { color: var(--soft); }
svg { display: block; width: 100%; max-width: 480px; height: auto; }
code { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px; }
svg text { fill: var(--text); font-size: 12px; } svg .soft { fill: var(--soft); }
svg rect { fill: var(--bar); } svg rect.bad { fill: var(--bad); }
svg line { stroke: var(--line); }
footer { color: var(--soft); font-size: 13px; }
footer a { color: inherit; }
"""


def status_page(sections: Sequence[StatusSection], checks: Sequence[ProbeCheck]) -> str:
    """Return the status page.

    Args:
        sections: the level topics of the process; those with the same title become one.
        checks: the conditions of its readiness.
    """
    ready = all(check.ok for check in checks)
    kind, word = ("badge", "ready") if ready else ("badge bad", "not ready")
    body = [f'<h1>delaylevel <span class="{kind}">{word}</span></h1>']
    failed = [
        ProblemLine(f"Not ready: {check.name}", check.text) for check in checks if not check.ok
    ]
    if failed:
        body.append(f"<section>{''.join(_problems(failed))}</section>")
    body += map(_section, _joined(sections))
    if not sections:
        body.append("<section>This process serves metrics only: see /metrics.</section>")
    body.append(
        f"<footer>delaylevel {escape(__version__)} · refreshed every {REFRESH_S} s · "
        '<a href="/metrics">metrics</a> · <a href="/readyz">readiness</a> · '
        '<a href="/healthz">health</a></footer>'
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="refresh" content="{REFRESH_S}">'
        '<link rel="icon" href="data:,">'
        f"<title>delaylevel: {word}</title>"
        f"<style>{_STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _joined(sections: Sequence[StatusSection]) -> list[StatusSection]:
    """Join the sections with the same title, in the order of the first ones."""
    found: dict[str, StatusSection] = {}
    for each in sections:
        one = found.get(each.title)
        if one is None:
            found[each.title] = each
            continue
        found[each.title] = StatusSection(
            each.title,
            {**one.facts, **each.facts},
            one.periods or each.periods,
            one.parked or each.parked,
            one.partitions or each.partitions,
            one.minutes or each.minutes,
            one.held or each.held,
            [*one.problems, *each.problems],
        )
    return list(found.values())


def _section(section: StatusSection) -> str:
    return "".join(
        (
            f"<section><h2>{escape(section.title)}</h2>",
            *_problems(section.problems),
            *_part("Due in the window", _bars(section.periods)),
            *_part("Parked in levels (entries)", _bars(section.parked)),
            *_part("Releases of the last minutes, and their lateness", _minutes(section.minutes)),
            *_part("Window partitions", _partitions(section.partitions)),
            *_part("Held since the takeover", _held(section)),
            *_part("Facts", _facts(section)),
            "</section>",
        )
    )


def _part(title: str, contents: Iterable[str]) -> Iterator[str]:
    found = "".join(contents)
    if found:
        yield f"<h3>{escape(title)}</h3>{found}"


def _problems(problems: Sequence[ProblemLine]) -> Iterator[str]:
    if problems:
        yield "<ul>"
        for problem, remedy in problems:
            text = _COMMAND.sub(r"<code>\1</code>", escape(remedy))
            yield f'<li class="problem">{escape(problem)}<span>{text}</span></li>'
        yield "</ul>"


def _bars(periods: Sequence[DuePeriod]) -> Iterator[str]:
    """Yield a chart with a horizontal bar for each period."""
    if not periods:
        return
    most = max(1, *(period.messages for period in periods))
    height = _ROW * len(periods)
    text = ", ".join(f"{period.label}: {period.messages:,}" for period in periods)
    yield f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(text)}">'
    for row, period in enumerate(periods):
        middle = row * _ROW + _ROW / 2
        width = (_WIDTH - _LABEL - _NUMBER) * period.messages / most
        kind = ' class="bad"' if period.late else ""
        if period.messages:
            yield (
                f'<rect x="{_LABEL}" y="{middle - 7:.0f}" width="{max(width, 1.5):.1f}" '
                f'height="14" rx="2"{kind}/>'
            )
        yield f'<text x="0" y="{middle + 4:.0f}">{escape(period.label)}</text>'
        at = _LABEL + max(width, 1.5) + 6
        yield f'<text class="soft" x="{at:.1f}" y="{middle + 4:.0f}">{period.messages:,}</text>'
    yield "</svg>"


def _minutes(minutes: Sequence[MinuteLine]) -> Iterator[str]:
    """Yield a chart of the releases, and the lateness of the last minutes as text."""
    if not minutes:
        return
    most = max(1, *(minute.released for minute in minutes))
    step = _WIDTH / max(15, len(minutes))
    text = f"{sum(minute.released for minute in minutes):,} messages released"
    yield f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text}">'
    base = _HEIGHT - _AXIS
    yield f'<line x1="0" y1="{base}" x2="{_WIDTH}" y2="{base}"/>'
    for number, minute in enumerate(minutes):
        high = (base - 14) * minute.released / most
        left = number * step
        if minute.released:
            yield (
                f'<rect x="{left + 1:.1f}" y="{base - max(high, 1):.1f}" '
                f'width="{step - 3:.1f}" height="{max(high, 1):.1f}" rx="1"/>'
            )
    yield f'<text class="soft" x="0" y="11">{most:,} released in a minute</text>'
    first, last = minutes[0], minutes[-1]
    yield f'<text class="soft" x="0" y="{_HEIGHT - 3}">{_clock(first.start_ms)}</text>'
    yield (
        f'<text class="soft" x="{len(minutes) * step:.1f}" y="{_HEIGHT - 3}" text-anchor="end">'
        f"{_clock(last.start_ms) if len(minutes) > 2 else ''}</text></svg>"
    )
    yield '<div class="scroll"><table><tr><th>Minute (UTC)</th><th class="number">Released</th>'
    yield '<th class="number">Median</th><th class="number">99 % within</th></tr>'
    for minute in [each for each in minutes if each.released][-5:][::-1]:
        yield (
            f'<tr><td>{_clock(minute.start_ms)}</td><td class="number">{minute.released:,}</td>'
            f'<td class="number">{_late(minute.p50_ms)}</td>'
            f'<td class="number">{_late(minute.p99_ms)}</td></tr>'
        )
    yield "</table></div>"


def _partitions(partitions: Sequence[PartitionLine]) -> Iterator[str]:
    if not partitions:
        return
    yield '<div class="scroll"><table><tr><th class="number">Nr.</th><th>State</th>'
    yield '<th class="number">In the window</th><th class="number">Overdue</th><th>Owner</th></tr>'
    for line in partitions:
        state = line.state or ("elsewhere" if line.owner else "no owner")
        bad = ' class="bad"' if state not in ("releasing", "elsewhere") else ""
        pending = f"{line.pending:,}" if line.here else ""
        overdue = _late(line.overdue_ms) if line.overdue_ms >= _OVERDUE_MS else ""
        here = ' <span class="soft">(this process)</span>' if line.here else ""
        yield (
            f'<tr><td class="number">{line.partition}</td><td{bad}>{escape(state)}</td>'
            f'<td class="number">{pending}</td><td class="number">{overdue}</td>'
            f'<td class="wrap">{escape(line.owner)}{here}</td></tr>'
        )
    yield "</table></div>"


def _held(section: StatusSection) -> Iterator[str]:
    if section.held:
        yield '<div class="scroll"><table><tr><th class="number">Messages</th><th>Target</th></tr>'
        for target, count in section.held.items():
            number = f'<td class="number">{count:,}</td>'
            yield f'<tr>{number}<td class="wrap">{escape(target)}</td></tr>'
        yield "</table></div>"


def _facts(section: StatusSection) -> Iterator[str]:
    if section.facts:
        yield "<dl>"
        for name, value in section.facts.items():
            yield f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"
        yield "</dl>"


def _clock(ms: int) -> str:
    minutes = ms // 60_000
    return f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"


def _late(ms: int | None) -> str:
    if ms is None:
        return ""
    if ms < 1_000:
        return f"{ms} ms"
    return f"{ms / 1_000:.3g} s" if ms < 60_000 else f"{ms / 60_000:.3g} min"


#: The paths whose answers nothing may delay.
PROBES = ("/healthz", "/readyz")
#: Number of live queries that may wait for the one in work.
_WAITING_QUERIES = 5
_QUESTIONS = ("pending", "average", "counts")
_TEXT, _JSON = "text/plain; charset=utf-8", "application/json"
_HEADERS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Content-Security-Policy", "default-src 'none'; img-src data:; style-src 'unsafe-inline'"),
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
        reporters: the parts of the process.
        address: address on which the process listens.
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
            if request.method not in ("GET", "HEAD"):
                text = "only GET is supported here"
                raise _RefusedRequest(405, text, ("Allow", "GET, HEAD"))
            route = self._routes.get(request.path)
            if route is None:
                text = f"there is no such page; there are {', '.join(self._routes)}"
                raise _RefusedRequest(404, text)
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
        return 200, LiveAnswer("text/html; charset=utf-8", status_page(sections, checks).encode())

    def _live(self, request: Request) -> tuple[int, LiveAnswer]:
        self._authorize(request)
        try:
            pairs = parse_qsl(request.query, True, strict_parsing=False, max_num_fields=32)
        except ValueError as error:
            raise _RefusedRequest(400, f"the parameters cannot be read: {error}") from None
        parameters = dict(pairs)
        if len(parameters) < len(pairs):
            raise _RefusedRequest(400, "a parameter is given twice")
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
        """Refuse a request that is neither from this machine alone nor has the token."""
        if self._token:
            if not hmac.compare_digest(_token_of(request), self._token):
                raise _RefusedRequest(
                    401,
                    "this needs the token of live queries, as bearer token or as the password of "
                    "any user",
                    ("WWW-Authenticate", 'Basic realm="delaylevel", charset="UTF-8"'),
                )
        elif not self._local:
            raise _RefusedRequest(
                403,
                f"live queries on {self._address} need a token: set {TOKEN_VARIABLE} in the "
                "environment of this process, or let it listen on 127.0.0.1",
            )
        elif not is_loopback(_host_of(request)):
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
    """Return the token of a request; empty without one."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value.strip().encode("latin-1", "replace")
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""
