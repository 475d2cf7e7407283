"""Tests of the HTTP server with clients that follow no rule, and of the endpoints."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

import delaylevel.web.server as server_module
from delaylevel.errors import ConfigError
from delaylevel.prometheus import serve
from delaylevel.web.reports import LiveAnswer, ProbeCheck, QueryRefusedError, StatusSection
from support.scripted_http import request as get


class Reporting:
    """A part of a process with settable answers; also the collector of its metrics."""

    def __init__(self) -> None:
        self.checks = [ProbeCheck("lag", True, "0 s")]
        self.urls: list[str] = []
        self.asked: list[tuple[str, Mapping[str, str]]] = []
        self.wait = threading.Event()
        self.wait.set()

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        yield GaugeMetricFamily("delaylevel_test", "A series.", value=7)

    def alive(self) -> Sequence[ProbeCheck]:
        return ()

    def ready(self) -> Sequence[ProbeCheck]:
        return self.checks

    def status(self) -> Sequence[StatusSection]:
        return [StatusSection("persistent://public/default/<b>orders", {"a & b": "<i>"})]

    def answer(self, question: str, parameters: Mapping[str, str]) -> LiveAnswer | None:
        self.wait.wait(30)
        self.asked.append((question, parameters))
        if "refuse" in parameters:
            raise QueryRefusedError("not now", 503)
        if "fail" in parameters:
            raise RuntimeError("a defect")
        return LiveAnswer("application/json", b"[1]")

    def served_at(self, url: str) -> None:
        self.urls.append(url)


@pytest.fixture
def part() -> Reporting:
    return Reporting()


@pytest.fixture
def port(part: Reporting) -> Iterator[int]:
    with serve(part, 0) as port:
        yield port


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def raw(port: int, data: bytes) -> bytes:
    """Return everything that the server answers to bytes until it closes the connection."""
    with connect(port) as connection:
        connection.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while more := connection.recv(65_536):
                answer += more
        return answer


def test_metrics_and_probes(port: int, part: Reporting) -> None:
    assert part.urls == [f"http://127.0.0.1:{port}"]
    assert b"delaylevel_test 7.0" in get(port, "/metrics").data
    assert get(port, "/healthz").status == 200
    found = get(port, "/readyz")
    assert found.status == 200
    assert found.json() == {"ok": True, "checks": [{"name": "lag", "ok": True, "text": "0 s"}]}
    part.checks.append(ProbeCheck("caught up", False, "partition 3 is read again"))
    found = get(port, "/readyz")
    assert found.status == 503
    assert "partition 3" in found.data.decode()
    assert get(port, "/healthz").status == 200


def test_wrong_requests_get_an_answer(port: int, part: Reporting) -> None:
    assert get(port, "/nothing").status == 404
    assert get(port, "/metrics", "POST").status == 405
    assert get(port, "/pending", "DELETE").status == 405
    assert get(port, "/pending?a=1&a=2").status == 400
    assert get(port, "/pending?" + "&".join(f"a{n}=1" for n in range(100))).status == 400
    found = get(port, "/pending?fail=1")
    assert (found.status, b"defect" in found.data) == (500, False)
    assert get(port, "/pending?refuse=1").headers["Retry-After"] == "1"
    assert get(port, "/pending?x=1").data == b"[1]"
    assert part.asked[-1] == ("pending", {"x": "1"})
    assert get(port, "/readyz", "HEAD").data == b""


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) + b"\r\n\r\n", b"400"),
        (b"GET\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nbroken header\r\n\r\n", b"400"),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"X-A: " + b"a" * 100_000 + b"\r\n\r\n", b"431"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n", b"400"),
    ],
)
def test_malformed_and_huge_requests_are_refused(port: int, sent: bytes, status: bytes) -> None:
    assert raw(port, sent).split(b" ")[1] == status
    assert get(port, "/healthz").status == 200


def test_slow_clients_are_closed(monkeypatch: pytest.MonkeyPatch, part: Reporting) -> None:
    """Hold a connection that sends nothing, and some that send one byte now and then."""
    monkeypatch.setattr(server_module, "REQUEST_S", 1.0)
    with serve(part, 0) as port, contextlib.ExitStack() as stack:
        silent, *slow = (stack.enter_context(connect(port)) for _ in range(20))
        for each in slow:
            each.sendall(b"GET /pending HTTP/1.1\r\n")
            each.settimeout(0.001)
        while slow:
            for each in slow.copy():
                try:
                    each.sendall(b"X")  # always active, never complete
                    ended = not each.recv(1)
                except TimeoutError:
                    continue
                except OSError:
                    ended = True
                if ended:
                    slow.remove(each)
        assert silent.recv(1) == b""
        assert get(port, "/healthz").status == 200


@pytest.mark.parametrize("clients", [64, 1000])
def test_probes_get_through_however_many_clients_hold_connections(
    port: int, part: Reporting, clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them has a token: some send nothing, or half a request; more do not read."""
    monkeypatch.setattr(server_module, "REQUEST_S", 300.0)  # none of them gives way by itself
    sent = (b"", b"GET /pend", b"GET /healthz HTTP/1.1\r\nX: ")
    with contextlib.ExitStack() as stack:

        def client(data: bytes) -> socket.socket:
            each = stack.enter_context(connect(port))
            with contextlib.suppress(OSError):
                each.sendall(data)
            return each

        held: list[socket.socket] = []
        for number in range(clients):
            if number % 50 == 0:
                assert get(port, "/healthz").status == 200
            held.append(client(sent[number % len(sent)]))
            if number % 3 == 0:
                client(b"GET / HTTP/1.1\r\n\r\n")
        for path in ("/healthz", "/readyz", "/metrics") * 3:
            assert get(port, path).status == 200
        # The oldest ones are gone, and the newest ones are not.
        if clients > server_module.CONNECTIONS:
            with contextlib.suppress(ConnectionResetError):
                assert held[0].recv(1) == b""
        newest = held[-4]
        newest.settimeout(0.01)
        with pytest.raises(TimeoutError):
            newest.recv(1)


def test_an_answer_that_is_read_slowly_outlasts_many_idle_connections(
    port: int, part: Reporting, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b"x" * (20 << 20)
    monkeypatch.setattr(part, "answer", lambda *_: LiveAnswer("text/plain", body))
    with contextlib.ExitStack() as stack:
        reading = stack.enter_context(connect(port))
        reading.sendall(b"GET /pending HTTP/1.1\r\nHost: localhost\r\n\r\n")
        begun = reading.recv(1)  # the rest is larger than the buffers of the connection
        for _ in range(server_module.CONNECTIONS + 8):
            stack.enter_context(connect(port))
        assert get(port, "/healthz").status == 200
        answer = begun + b"".join(iter(lambda: reading.recv(1 << 20), b""))
    assert answer.endswith(b"\r\n\r\n" + body)


def test_liveness_is_answered_while_readiness_waits_for_the_broker(
    port: int, part: Reporting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, "ready", lambda: part.checks if part.wait.wait(30) else [])
    part.wait.clear()
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(get, port, "/readyz") for _ in range(4)]
        assert get(port, "/healthz").status == 200
        assert not any(each.done() for each in asking)
        part.wait.set()
        assert {each.result().status for each in asking} == {200}


def test_probes_are_answered_while_live_queries_wait(port: int, part: Reporting) -> None:
    part.wait.clear()
    with ThreadPoolExecutor(20) as pool:
        asking = [pool.submit(get, port, "/average") for _ in range(20)]
        assert get(port, "/readyz").status == 200
        part.wait.set()
        answers = [each.result().status for each in asking]
    assert set(answers) == {200, 503}
    assert len(part.asked) == answers.count(200) >= 6


def test_a_page_of_the_web_cannot_ask_under_another_name(port: int) -> None:
    assert get(port, "/pending", Host="evil.example").status == 403
    assert get(port, "/", Host="evil.example:9109").status == 403
    for name in ("localhost", "127.0.0.1", "[::1]:9109", f"localhost:{port}"):
        assert get(port, "/pending", Host=name).status == 200
    assert get(port, "/readyz", Host="evil.example").status == 200


def test_another_interface_needs_a_token_for_live_queries_only(
    part: Reporting, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = ("/", "/pending", "/average", "/counts"), ("/metrics", "/healthz", "/readyz")
    basic = base64.b64encode(b"anyone:sesame").decode()
    given = ("", "Bearer sesam", "Basic %%%", "Bearer sesame", f"Basic {basic}")
    for token, statuses in (("", 5 * [403]), ("sesame\n", [401, 401, 401, 200, 200])):
        monkeypatch.setenv("DELAYLEVEL_LIVE_TOKEN", token)
        with serve(part, 0, "0.0.0.0") as port:
            for path in private:
                answers = [get(port, path, Authorization=each) for each in given]
                assert [each.status for each in answers] == statuses
                assert token or b"DELAYLEVEL_LIVE_TOKEN" in answers[0].data
            assert {get(port, path).status for path in public} == {200}


def test_a_port_that_is_taken_is_named_with_a_remedy(port: int, part: Reporting) -> None:
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*--metrics-port"), serve(part, port):
        pass
    with pytest.raises(ConfigError, match=r"no\.such\.host.*--metrics-address"):
        serve(part, 0, "no.such.host.invalid").__enter__()
