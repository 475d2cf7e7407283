"""Tests of the admin client with a small HTTP server: redirects, token, errors, no answer."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Callable

import pytest
import urllib3

from delaylevel.cluster.port import DelayedDelivery
from delaylevel.cluster.rest import http
from delaylevel.cluster.rest.admin import Admin
from delaylevel.errors import (
    AdminError,
    BrokerUnreachableError,
    ConflictError,
    NotFoundError,
    PermissionDeniedError,
)
from delaylevel.model.topic_name import TopicName
from support.scripted_http import Answer, Server, reply

TOPIC = TopicName.parse("public/default/orders")
SECRET = "s3cr3t-token-that-nobody-may-see"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_redirect_keeps_method_body_and_token(servers: Callable[[], Server]) -> None:
    first, owner = servers(), servers()
    first.answer = lambda method, path: (307, {"Location": owner.url + path}, b"")

    Admin(first.url, token=SECRET).create_partitioned(TOPIC, 3, {"a": "b"})

    (method, path, headers, body) = owner.seen[0]
    assert (method, path) == ("PUT", "/admin/v2/persistent/public/default/orders/partitions")
    assert json.loads(body) == {"partitions": 3, "properties": {"a": "b"}}
    assert headers["Authorization"] == f"Bearer {SECRET}"
    assert headers["Content-Type"] == "application/vnd.partitioned-topic-metadata+json"


def test_a_redirect_in_a_circle_ends(servers: Callable[[], Server]) -> None:
    server = servers()
    server.answer = lambda method, path: (307, {"Location": server.url + path}, b"")

    with pytest.raises(AdminError, match="redirects in a circle"):
        Admin(server.url).partitioned_metadata(TOPIC)
    assert len(server.seen) == 5


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, PermissionDeniedError),
        (403, PermissionDeniedError),
        (404, NotFoundError),
        (409, ConflictError),
        (412, ConflictError),
        (406, AdminError),
        (500, AdminError),
    ],
)
def test_a_failure_is_an_error_that_never_shows_the_token(
    servers: Callable[[], Server], status: int, kind: type[AdminError]
) -> None:
    server = servers()
    server.answer = lambda method, path: reply(status, {"reason": f"because {SECRET} is bad"})

    with pytest.raises(kind) as caught:
        Admin(server.url, token=SECRET).properties(TOPIC)

    assert type(caught.value) is kind
    assert caught.value.status == status
    assert caught.value.reason == "because … is bad"
    assert SECRET not in str(caught.value)
    assert "persistent/public/default/orders/properties" in str(caught.value)


def test_the_refusal_of_an_expired_token_names_its_expiry(servers: Callable[[], Server]) -> None:
    # The answer of the broker says only that authentication is required.

    def token(claims: object) -> str:
        middle = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
        return f"head.{middle}.signature"

    server = servers()
    server.answer = lambda method, path: reply(401, {"reason": "Authentication required"})
    with pytest.raises(PermissionDeniedError, match="expired at 2001-09-09T01:46:40") as refused:
        Admin(server.url, token=token({"sub": "me", "exp": 1_000_000_000})).properties(TOPIC)
    assert token({"sub": "me", "exp": 1_000_000_000}) not in str(refused.value)
    for other in ({"sub": "me"}, {"exp": 9_999_999_999}, {"exp": "soon"}, [], {"exp": 1e300}):
        with pytest.raises(PermissionDeniedError, match="check the token"):
            Admin(server.url, token=token(other)).properties(TOPIC)
    for no_jwt in ("a", "a.+!.c", "a.b.c"):
        with pytest.raises(PermissionDeniedError, match="check the token"):
            Admin(server.url, token=no_jwt).properties(TOPIC)


def test_the_token_is_read_at_every_call(servers: Callable[[], Server]) -> None:
    server = servers()
    tokens = iter(["one", "two"])
    admin = Admin(server.url, token=lambda: next(tokens))

    admin.health()
    admin.health()

    assert [seen[2]["Authorization"] for seen in server.seen] == ["Bearer one", "Bearer two"]


def test_a_stack_trace_and_a_page_are_not_quoted(servers: Callable[[], Server]) -> None:
    server = servers()
    head = "\n --- An unexpected error occurred in the server ---\n\n"
    text = head + "Message: it broke\n\nStacktrace:\n\nat x.y"
    server.answer = lambda method, path: reply(500, {"reason": text})
    with pytest.raises(AdminError) as caught:
        Admin(server.url).properties(TOPIC)
    assert caught.value.reason == "it broke"

    web_server = {"servlet": "x", "message": "Authentication required", "status": "401"}
    server.answer = lambda method, path: reply(401, web_server)
    with pytest.raises(PermissionDeniedError) as denied:
        Admin(server.url).health()
    assert denied.value.reason == "Authentication required"

    server.answer = lambda method, path: (404, {}, b"<html><body>lots</body></html>")
    with pytest.raises(NotFoundError) as missing:
        Admin(server.url).properties(TOPIC)
    assert missing.value.reason == "Not Found"


def test_an_unreachable_broker_has_a_remedy() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(BrokerUnreachableError) as caught:
        Admin(url, token=SECRET).partitioned_metadata(TOPIC)
    text = str(caught.value)
    assert url in text
    assert "refused" in text
    assert "DELAYLEVEL_ADMIN_URL" in text
    assert SECRET not in text


def test_the_second_host_answers_for_an_unreachable_first_one(
    servers: Callable[[], Server],
) -> None:
    server = servers()
    server.answer = lambda method, path: reply(200, {"a": "b"})
    url = f"http://127.0.0.1:{free_port()},{server.url.removeprefix('http://')}"

    assert Admin(url).properties(TOPIC) == {"a": "b"}


class Hanging:
    """An address that accepts connections and never answers, like a suspended broker."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Hanging:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_broker_that_owns_a_topic_and_does_not_answer_is_named(
    servers: Callable[[], Server], hangs: bool
) -> None:
    living = servers()
    with Hanging() as hanging:
        away = hanging.url if hangs else f"http://127.0.0.1:{free_port()}"
        living.answer = lambda method, path: (307, {"Location": away + path}, b"")
        admin = Admin(living.url, timeout_s=0.2)
        for _ in range(2):
            with pytest.raises(BrokerUnreachableError) as caught:
                admin.properties(TOPIC)
            text, host = str(caught.value), away.removeprefix("http://")
            assert f"the broker at {host} does not answer" in text
            assert f"{living.url.removeprefix('http://')} names it" in text
            assert "admin_url" not in text, "that address is right"
            assert caught.value.address == host


@pytest.mark.parametrize("redirected", [False, True])
def test_a_read_is_given_up_early_if_its_broker_hangs(
    servers: Callable[[], Server], monkeypatch: pytest.MonkeyPatch, redirected: bool
) -> None:
    """Not after ten minutes, which the test would not survive."""
    monkeypatch.setattr(http, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(http, "_PROBE_TIMEOUT_S", 0.2)
    with Hanging() as hanging:
        url = hanging.url
        if redirected:
            living = servers()
            living.answer = lambda method, path: (307, {"Location": hanging.url + path}, b"")
            url = living.url
        for _ in range(2):
            with pytest.raises(BrokerUnreachableError, match="no answer in time"):
                Admin(url, timeout_s=600, for_service=True).properties(TOPIC)
        with pytest.raises(BrokerUnreachableError, match="no answer in time"):
            Admin(url, timeout_s=600).within(0.2).partitioned_stats(TOPIC)


@pytest.mark.parametrize("hasty", [False, True])
def test_a_read_by_a_broker_that_hangs_goes_to_the_next_one(
    servers: Callable[[], Server], monkeypatch: pytest.MonkeyPatch, hasty: bool
) -> None:
    monkeypatch.setattr(http, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(http, "_PROBE_TIMEOUT_S", 0.2)
    server = servers()
    server.answer = lambda method, path: reply(200, {"a": "b"})
    with Hanging() as hanging:
        rest = http.Rest(f"{hanging.url},{server.url.removeprefix('http://')}", timeout_s=600)
        assert (rest.within(600) if hasty else rest).get("x") == {"a": "b"}


def test_a_slow_broker_that_lives_is_waited_for(
    servers: Callable[[], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_PATIENCE_S", 0.2)
    server, asked = servers(), threading.Event()

    def answer(method: str, path: str) -> Answer:
        if "properties" in path:
            assert asked.wait(60), "nobody asked if it lives"
        else:
            asked.set()
        return reply(200, {"a": "b"})

    server.answer = answer
    assert Admin(server.url, timeout_s=60, for_service=True).properties(TOPIC) == {"a": "b"}
    assert asked.is_set()


def test_a_change_waits_for_a_broker_that_pauses_and_is_made_once(
    servers: Callable[[], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_PROBE_TIMEOUT_S", 0.2)
    server, lives = servers(), threading.Event()

    def answer(method: str, path: str) -> Answer:
        lives.wait(30)
        return 204, {}, b""

    server.answer = answer
    with pytest.raises(BrokerUnreachableError):
        http.Rest(server.url, timeout_s=0.1).get("x")
    timer = threading.Timer(1.0, lives.set)
    timer.start()
    http.Rest(server.url, timeout_s=60).put("x", 1)
    assert [method for method, *_ in server.seen].count("PUT") == 1
    lives.clear()
    with pytest.raises(BrokerUnreachableError):
        http.Rest(server.url, timeout_s=0.5).put("x", 1)
    lives.set()
    timer.join()


def test_properties_are_visible_at_the_next_read(servers: Callable[[], Server]) -> None:
    server, reads = servers(), 0

    def answer(method: str, path: str) -> Answer:
        nonlocal reads
        if method == "PUT":
            return 204, {}, b""
        reads += 1
        # The first read is the check for a missing topic.
        return reply(200, {"partitions": 2, "properties": {"a": "new"} if reads > 3 else {}})

    server.answer = answer
    Admin(server.url).set_properties(TOPIC, {"a": "new"})
    assert reads == 4


def test_a_request_for_a_moving_topic_is_repeated(servers: Callable[[], Server]) -> None:
    server = servers()
    answers = iter([reply(503, {"reason": "moving"}), reply(200, {"a": "b"})])
    server.answer = lambda method, path: next(answers)

    assert Admin(server.url).properties(TOPIC) == {"a": "b"}
    assert len(server.seen) == 2


def test_an_answer_of_another_server_is_an_error(servers: Callable[[], Server]) -> None:
    server = servers()
    server.answer = lambda method, path: (200, {}, b"<html>hello</html>")

    with pytest.raises(AdminError, match="not JSON"):
        Admin(server.url).properties(TOPIC)


def test_brokers_before_4_report_0_partitions_for_a_missing_topic(
    servers: Callable[[], Server],
) -> None:
    server = servers()

    def answer(method: str, path: str) -> Answer:
        if "/partitions" in path:
            return reply(200, {"partitions": 0})
        return reply(404, {"reason": "Topic not found"})

    server.answer = answer
    assert Admin(server.url).topic_exists(TOPIC) is False


def test_no_request_would_create_a_topic(servers: Callable[[], Server]) -> None:
    server = servers()
    server.answer = lambda method, path: reply(404, {"reason": "not found"})

    with pytest.raises(NotFoundError):
        Admin(server.url).create_subscription(TOPIC, "s")
    assert {seen[0] for seen in server.seen} == {"GET"}


def test_a_subscription_that_another_client_creates_is_awaited(
    servers: Callable[[], Server],
) -> None:
    server = servers()
    busy = "Failed for Subscription Busy: Failed to fence subscription"
    answers = iter([reply(412, {"reason": busy}), reply(409, {"reason": "exists already"})])

    def answer(method: str, path: str) -> Answer:
        return next(answers) if method == "PUT" else reply(200, {"partitions": 1})

    server.answer = answer
    with pytest.raises(ConflictError, match="exists already"):
        Admin(server.url).create_subscription(TOPIC, "s")


def test_settings_without_permission_are_unknown(servers: Callable[[], Server]) -> None:
    server = servers()
    server.answer = lambda method, path: reply(403, {"reason": "superusers only"})
    settings = Admin(server.url, token="t").broker_settings()
    assert settings.max_partitions is None
    assert settings.topic_policies is None


def test_the_delay_policy_of_a_namespace_counts_without_policies_of_topics(
    servers: Callable[[], Server],
) -> None:
    server = servers()
    # The answers of a 4.0.8 broker with topicLevelPoliciesEnabled=false.
    policy = {"tickTime": 1000, "active": True, "maxDeliveryDelayInMillis": 70_000}

    def answer(method: str, path: str) -> Answer:
        if "/namespaces/" in path:
            return reply(200, policy)
        return reply(405, {"reason": "Topic level policies is disabled, please enable it"})

    server.answer = answer
    assert Admin(server.url).delayed_delivery(TOPIC) == DelayedDelivery(True, 1000, 70_000)
    server.answer = lambda method, path: reply(403, {"reason": "no"})
    with pytest.raises(PermissionDeniedError):
        Admin(server.url).delayed_delivery(TOPIC)


def test_the_address_that_answered_last_is_tried_first() -> None:
    refused, timeout = urllib3.exceptions.ProtocolError(), urllib3.exceptions.TimeoutError()
    addresses = http.addresses_of("http://a:1,b:1,c:1")
    assert http.addresses_of("http://a:1,b:1,c:1") is addresses, "all clients know the same"
    first, second, third = addresses.in_order()
    first.no_answer(refused)
    assert addresses.in_order() == [second, third, first]
    second.answered()
    second.no_answer(timeout)
    assert addresses.in_order() == [third, second, first]
    third.no_answer(refused)
    first.answered()
    assert addresses.in_order() == [first, second, third]
