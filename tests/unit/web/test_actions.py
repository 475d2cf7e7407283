"""Tests of actions over HTTP on messages in memory, and of who may act."""

from __future__ import annotations

import base64
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlencode

import pytest
import urllib3
from click.testing import Result

pytest.importorskip("prometheus_client")
pytest.importorskip("pyarrow")

from delaylevel import changes, topics
from delaylevel.errors import ConfigError
from delaylevel.model.outcome import Outcome, OutcomeStatus
from delaylevel.prometheus import serve
from delaylevel.run import actions as module
from delaylevel.run.actions import ServiceActions
from delaylevel.testing import MemoryPulsar
from delaylevel.web import application
from support.pending_commands import inspector, pending_commands
from support.scripted_http import request

TOKEN = "the-token-of-actions"
LIVE = "the-token-of-live-queries"
TARGET = "persistent://public/default/orders"
Act = Callable[..., urllib3.BaseHTTPResponse]


class Nothing:
    """A collector of no metrics."""

    reporters = ()

    def collect(self) -> Iterator[Any]:
        return iter(())


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OUTCOME_S", 0.0)
    monkeypatch.setenv("DELAYLEVEL_ACTION_TOKEN", TOKEN)
    monkeypatch.delenv("DELAYLEVEL_LIVE_TOKEN", raising=False)


@pytest.fixture
def actions(memory: MemoryPulsar) -> ServiceActions:
    def descriptions() -> list[Any]:
        return [topics.describe(memory.admin, "orders-delay-level")]

    look = partial(inspector, memory)
    return ServiceActions(memory.admin, descriptions, look, memory.client, memory.clock)


@pytest.fixture
def port(actions: ServiceActions) -> Iterator[int]:
    with serve(Nothing(), 0, actions=actions) as port:
        yield port


def ask(
    port: int, path: str, fields: dict[str, str] | bytes | None = None, **headers: str
) -> urllib3.BaseHTTPResponse:
    named = {"Authorization": f"Bearer {TOKEN}", **headers}
    if fields is None:
        return request(port, path, **named)
    named.setdefault("Content-Type", "application/x-www-form-urlencoded")
    body = urlencode(fields) if isinstance(fields, dict) else fields
    return request(port, path, "POST", body, **named)


@pytest.fixture
def act(port: int) -> Act:
    """Return ``act("cancel", id="a")``, which acts over HTTP."""
    return lambda action, **fields: ask(port, f"/actions/{action}", fields)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, memory: MemoryPulsar) -> Callable[..., Result]:
    return pending_commands(monkeypatch, memory)


def test_cancel_has_the_outcome_of_the_command(
    memory: MemoryPulsar, producer: Any, act: Act, run: Callable[..., Result]
) -> None:
    pytest.importorskip("duckdb")  # for the list
    for name in ("http", "command", "kept"):
        producer.send(
            b"x", deliver_after=timedelta(days=3), message_id=name, partition_key=f"of {name}"
        )
    by_http = act("cancel", topic="orders", id="http")
    by_command = run("cancel", "orders", "--id", "command", "-o", "json")
    assert (by_http.status, by_command.exit_code) == (200, 0)
    (found,), (expected,) = by_http.json()["rows"], json.loads(by_command.stdout)
    assert found == expected | {"id": "http", "key": "of http"}
    assert found["outcome"] == "accepted"
    assert [row["id"] for row in json.loads(run("list", "orders", "-o", "json").stdout)] == ["kept"]

    missing, not_found = act("cancel", id="nobody"), run("cancel", "orders", "--id", "nobody")
    assert (missing.status, not_found.exit_code) == (404, 1)
    sent = producer.schedule(b"x", deliver_at=memory.clock.now_ms())  # due at once
    late = act("cancel", receipt=str(sent))
    assert (late.status, late.json()["rows"][0]["outcome"]) == (409, "too late")
    assert run("cancel", "orders", "--receipt", str(sent)).exit_code == 1
    memory.advance(timedelta(days=4))
    delivered = [one.properties["delaylevel.id"] for one in memory.delivered("orders")]
    assert sorted(delivered) == sorted(["kept", sent.id])


@pytest.mark.parametrize("status", list(OutcomeStatus))
def test_fire_says_that_the_message_is_due_whatever_becomes_of_the_old_copy(
    producer: Any, act: Act, monkeypatch: pytest.MonkeyPatch, status: OutcomeStatus
) -> None:
    receipt = producer.schedule(b"x", deliver_after=timedelta(days=3))

    def changed(_: Any, __: Any, chosen: Any, *___: Any) -> list[changes.Changed]:
        old = Outcome(status, receipt.id, TARGET, receipt.due_ms)
        return [changes.Changed(receipt, old, receipt)]

    monkeypatch.setattr(changes, "change_messages", changed)
    done = status in (OutcomeStatus.ACCEPTED, OutcomeStatus.CANCELLED)
    found = act("fire", receipt=str(receipt))
    assert (found.status, found.json()["done"]) == (200 if done else 409, done)
    assert "is due" in found.json()["text"]


def test_a_target_is_paused_and_resumed(memory: MemoryPulsar, act: Act, port: int) -> None:
    def paused() -> list[str]:
        return [name for name, _ in topics.describe(memory.admin, "orders").pauses.paused]

    one = act("pause", topic="orders-delay-level", target="orders")
    assert one.status == 200
    assert [row["target"] for row in one.json()["rows"]] == [TARGET] == paused()
    assert "Paused: orders since" in ask(port, "/actions").data.decode()
    assert act("pause").status == 200
    assert paused() == ["*", TARGET]
    assert act("resume", target="orders", spread="soon").status == 400
    # All targets are paused together.
    assert act("resume", target="orders").status == 200
    assert act("resume", target="orders").status == 400
    assert act("resume", spread="10m").status == 200
    assert paused() == []
    ((_, spread),) = topics.describe(memory.admin, "orders").pauses.resumed
    assert spread.length_ms == 600_000
    assert act("resume").status == 400
    assert act("pause", target="other").status == 400


@pytest.mark.parametrize(
    ("action", "fields", "status", "text"),
    [
        ("cancel", {}, 400, "id or key or receipt"),
        ("cancel", {"id": "a", "key": "k"}, 400, "name one message"),
        ("cancel", {"id": " "}, 400, "name one message"),
        ("cancel", {"receipt": "dl1.x"}, 400, "damaged"),
        ("find", {"receipt": "dl1.x"}, 400, "no parameter"),
        ("pause", {"id": "a"}, 400, "no parameter"),
        ("pause", {"topic": "others"}, 404, "not served here"),
        ("pause", {"topic": "a/b"}, 400, "a/b"),
        ("find", {"id": "a", "target": "others"}, 400, "carries no messages for"),
    ],
)
def test_wrong_requests_change_nothing(
    act: Act, action: str, fields: dict[str, str], status: int, text: str
) -> None:
    found = act(action, **fields)
    assert (found.status, found.json()["done"]) == (status, False)
    assert text in found.json()["text"]


def test_a_long_search_ends(producer: Any, act: Act, monkeypatch: pytest.MonkeyPatch) -> None:
    producer.send(b"x", deliver_after=timedelta(days=3), partition_key="k")
    monkeypatch.setattr(module, "_SEARCH_S", -1.0)
    found = act("cancel", key="k")
    assert found.status == 503
    assert "receipt" in found.json()["text"]


def basic(token: str) -> str:
    return "Basic " + base64.b64encode(f"ann:{token}".encode()).decode()


OWN = "http://127.0.0.1:{port}"
BROWSER = {"Authorization": basic(TOKEN)}
WRONG = ("", f"Bearer {LIVE}", basic(LIVE), "Bearer ", "Basic %", basic(TOKEN[1:]))
KINDS = ("text/plain", "application/json", "multipart/form-data; boundary=x")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        *(({"Authorization": given}, 401) for given in WRONG),
        # A browser adds a password that it remembers to the form of any page.
        (BROWSER, 403),
        (BROWSER | {"Sec-Fetch-Site": "cross-site", "Origin": OWN}, 403),
        (BROWSER | {"Sec-Fetch-Site": "same-site"}, 403),
        (BROWSER | {"Sec-Fetch-Site": "none"}, 403),
        (BROWSER | {"Origin": "http://evil.example"}, 403),
        (BROWSER | {"Origin": "null"}, 403),
        (BROWSER | {"Origin": OWN, "Host": "evil.example"}, 403),
        (BROWSER | {"Sec-Fetch-Site": "same-origin"}, 200),
        (BROWSER | {"Origin": OWN}, 200),
        ({}, 200),  # a bearer token
        *(({"Content-Type": kind}, 415) for kind in KINDS),
    ],
)
def test_only_the_token_of_actions_lets_act(
    actions: ServiceActions,
    memory: MemoryPulsar,
    monkeypatch: pytest.MonkeyPatch,
    headers: dict[str, str],
    status: int,
) -> None:
    monkeypatch.setenv("DELAYLEVEL_LIVE_TOKEN", LIVE)
    with serve(Nothing(), 0, actions=actions) as port:
        sent = {name: value.format(port=port) for name, value in headers.items()}
        assert ask(port, "/actions/pause", {}, **sent).status == status
        assert bool(topics.describe(memory.admin, "orders").pauses.paused) == (status == 200)
        if "Content-Type" not in headers:  # which only an action reads
            assert ask(port, "/actions", **sent).status == (401 if status == 401 else 200)
        assert ask(port, "/", Authorization=BROWSER["Authorization"]).status == 200


def test_a_browser_may_open_the_status_page_with_the_token_of_actions_alone(
    actions: ServiceActions,
) -> None:
    with serve(Nothing(), 0, "0.0.0.0", actions=actions) as port:
        asked = ask(port, "/", Authorization="")
        # Without this header, a browser does not ask for a password.
        assert (asked.status, "Basic" in asked.headers["WWW-Authenticate"]) == (401, True)
        assert ask(port, "/", Authorization=basic(TOKEN)).status == 200


def test_without_a_token_nobody_acts(
    actions: ServiceActions, memory: MemoryPulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DELAYLEVEL_ACTION_TOKEN")
    with serve(Nothing(), 0, actions=actions) as port:
        for given in ("", "Bearer ", basic("")):
            refused = ask(port, "/actions/pause", {}, Authorization=given)
            assert (refused.status, b"DELAYLEVEL_ACTION_TOKEN" in refused.data) == (403, True)
        assert ask(port, "/actions").status == 403
        assert b"/actions" not in ask(port, "/").data
    assert not topics.describe(memory.admin, "orders").pauses.paused


def test_other_requests_for_actions_are_refused(port: int) -> None:
    assert ask(port, "/actions/pause").status == 405
    assert ask(port, "/actions", {}).status == 405
    assert ask(port, "/actions/delete", {}).status == 404
    with serve(Nothing(), 0) as without_actions:
        assert ask(without_actions, "/actions/pause", {}).status == 404


@pytest.mark.parametrize(
    ("token", "live", "words"), [("sesame", "", "at least 16"), (LIVE, LIVE, "same token")]
)
def test_weak_tokens_are_refused(
    actions: ServiceActions, monkeypatch: pytest.MonkeyPatch, token: str, live: str, words: str
) -> None:
    monkeypatch.setenv("DELAYLEVEL_ACTION_TOKEN", token)
    monkeypatch.setenv("DELAYLEVEL_LIVE_TOKEN", live)
    with pytest.raises(ConfigError, match=words), serve(Nothing(), 0, actions=actions):
        pass


def test_bodies_are_limited(port: int, act: Act) -> None:
    assert act("cancel", id="a" * 5_000).status == 413
    for body in ({f"f{n}": "" for n in range(40)}, b"id=a&id=b", b"id=\xff", b"id=%ff"):
        assert ask(port, "/actions/cancel", body).status == 400


def test_one_action_at_a_time(
    actions: ServiceActions, monkeypatch: pytest.MonkeyPatch, act: Act
) -> None:
    monkeypatch.setattr(application, "_ACTION_WAIT_S", 0.05)
    entered, leave = threading.Event(), threading.Event()
    real = ServiceActions.act

    def slow(self: ServiceActions, action: str, parameters: Any) -> Any:
        entered.set()
        assert leave.wait(20)
        return real(self, action, parameters)

    monkeypatch.setattr(ServiceActions, "act", slow)
    first: list[int] = []
    thread = threading.Thread(target=lambda: first.append(act("pause").status))
    thread.start()
    assert entered.wait(20)
    assert act("pause").status == 503
    leave.set()
    thread.join(60)
    assert first == [200]


def test_actions_are_logged_on_one_line(
    producer: Any, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    producer.send(b"x", deliver_after=timedelta(days=3), message_id="a\nERROR", partition_key="k")
    own = BROWSER | {"Sec-Fetch-Site": "same-origin"}
    with caplog.at_level(logging.WARNING):
        assert ask(port, "/actions/cancel", {"key": "k"}, **own).status == 200
    (line,) = [one.getMessage() for one in caplog.records if "action" in one.getMessage()]
    assert "\n" not in line
    for text in ("cancel", "'key': 'k'", "'ann'", "127.0.0.1", "accepted"):
        assert text in line
    assert TOKEN not in line


def test_of_several_messages_one_is_chosen_on_a_page_that_escapes_everything(
    memory: MemoryPulsar, producer: Any, port: int, act: Act
) -> None:
    evil = '"><script>alert(1)</script>'
    for name in (evil, "b"):
        producer.send(b"x", deliver_after=timedelta(days=3), message_id=name, partition_key=evil)

    def page(action: str, fields: dict[str, str]) -> str:
        found = ask(port, f"/actions/{action}", fields, Accept="text/html,*/*;q=0.8")
        assert "text/html" in found.headers["Content-Type"]
        assert "form-action 'self'; frame-" in found.headers["Content-Security-Policy"]
        return found.data.decode()

    refused, told = act("cancel", key=evil), act("find", key=evil)
    assert (refused.status, refused.json()["done"]) == (409, False)
    assert refused.json()["rows"] == told.json()["rows"]
    found = page("find", {"key": evil})
    assert "2 messages found" in found
    assert found.count('name="receipt"') == 2
    assert "&lt;script&gt;" in found
    receipt = re.findall(r'name="receipt" value="([^"]+)"', found)[0]
    done = page("cancel", {"receipt": receipt})
    assert "<dd>accepted</dd>" in done
    for text in (found, done, ask(port, "/actions").data.decode()):
        assert "<script" not in text
        assert 'http-equiv="refresh"' not in text
        assert TOKEN not in text
    assert '<a href="/actions">' in ask(port, "/").data.decode()
    memory.advance(timedelta(days=4))
    assert len(memory.delivered("orders")) == 1
