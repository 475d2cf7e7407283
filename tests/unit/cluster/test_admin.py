"""Tests of the admin client with scripted HTTP servers: redirects, token, errors, no answer."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

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
FOUND = reply(200, {"a": "b"})
DONE: Answer = (204, {}, b"")
NOT_JSON = b"<html><body>lots</body></html>"
STACK = "\n --- An unexpected error ---\n\nMessage: it broke\n\nStacktrace:\n\nat x.y"


@pytest.fixture
def other() -> Iterator[Server]:
    with contextlib.closing(Server()) as made:
        yield made


def script(server: Server, *answers: Answer) -> Admin:
    """Let a server give these answers, the last one again and again; return its client."""
    left = list(answers)
    server.answer = lambda method, path: left.pop(0) if len(left) > 1 else left[0]
    return Admin(server.url, token=SECRET)


def methods(server: Server) -> list[str]:
    return [seen[0] for seen in server.seen]


def test_a_redirect_keeps_method_body_and_token(server: Server, other: Server) -> None:
    server.answer = lambda method, path: (307, {"Location": other.url + path}, b"")
    Admin(server.url, token=SECRET).create_partitioned(TOPIC, 3, {"a": "b"})
    ((method, path, headers, body),) = other.seen
    assert (method, path) == ("PUT", "/admin/v2/persistent/public/default/orders/partitions")
    assert json.loads(body) == {"partitions": 3, "properties": {"a": "b"}}
    assert headers["Authorization"] == f"Bearer {SECRET}"
    assert headers["Content-Type"] == "application/vnd.partitioned-topic-metadata+json"


def test_an_address_behind_a_gateway_keeps_its_path(server: Server) -> None:
    server.answer = lambda method, path: FOUND
    assert Admin(f"{server.url}/pulsar/").properties(TOPIC) == {"a": "b"}
    ((_, path, _, _),) = server.seen
    assert path.startswith("/pulsar/admin/v2/persistent/public/default/orders")


def test_a_redirect_in_a_circle_ends(server: Server) -> None:
    server.answer = lambda method, path: (307, {"Location": server.url + path}, b"")
    with pytest.raises(AdminError, match="redirects in a circle"):
        Admin(server.url).partitioned_metadata(TOPIC)
    assert len(server.seen) == 5


@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [
        *(
            (reply(status, {"reason": f"because {SECRET} is bad"}), kind, "because … is bad")
            for status, kind in (
                (401, PermissionDeniedError),
                (403, PermissionDeniedError),
                (404, NotFoundError),
                (409, ConflictError),
                (412, ConflictError),
                (406, AdminError),
            )
        ),
        # A page, a stack trace, and what comes from the web server.
        ((404, {}, NOT_JSON), NotFoundError, "Not Found"),
        (reply(500, {"reason": STACK}), AdminError, "it broke"),
        (reply(401, {"servlet": "x", "message": "No"}), PermissionDeniedError, "No"),
    ],
)
def test_a_failure_is_an_error_that_never_shows_the_token(
    server: Server, answer: Answer, kind: type[AdminError], reason: str
) -> None:
    with pytest.raises(kind) as caught:
        script(server, answer).properties(TOPIC)
    error = caught.value
    assert (type(error), error.status, error.reason) == (kind, answer[0], reason)
    assert "persistent/public/default/orders/properties" in str(error)
    assert SECRET not in str(error)


def test_an_answer_of_another_server_is_an_error(server: Server) -> None:
    with pytest.raises(AdminError, match="not JSON"):
        script(server, (200, {}, NOT_JSON)).properties(TOPIC)


@pytest.mark.parametrize(
    ("claims", "advice"),
    [
        ({"sub": "me", "exp": 1_000_000_000}, "expired at 2001-09-09T01:46:40"),
        *(
            (claims, "check the token")
            for claims in ({"sub": "me"}, {"exp": 9_999_999_999}, {"exp": "x"}, [], {"exp": 1e300})
        ),
        *((no_jwt, "check the token") for no_jwt in ("a", "a.+!.c", "a.b.c")),
    ],
)
def test_the_refusal_of_an_expired_token_names_its_expiry(
    server: Server, claims: Any, advice: str
) -> None:
    """The answer of the broker says only that authentication is required."""
    middle = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    token = claims if isinstance(claims, str) else f"head.{middle}.signature"
    server.answer = lambda method, path: reply(401, {"reason": "Authentication required"})
    with pytest.raises(PermissionDeniedError, match=advice) as refused:
        Admin(server.url, token=token).properties(TOPIC)
    assert len(token) < 9 or token not in str(refused.value)


def test_the_token_is_read_at_every_call(server: Server) -> None:
    tokens = iter(["one", "two"])
    admin = Admin(server.url, token=lambda: next(tokens))
    admin.version()
    admin.version()
    assert [seen[2]["Authorization"] for seen in server.seen] == ["Bearer one", "Bearer two"]


# -- no answer


def nobody() -> str:
    """Return the address of a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Yield the socket of a broker that accepts connections and never answers."""
    # Another broker that answers has this time, too, on a busy machine.
    monkeypatch.setattr(http, "_PATIENCE_S", 1.0)
    monkeypatch.setattr(http, "_PROBE_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture
def hanging(listening: socket.socket) -> str:
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_an_unreachable_broker_has_a_remedy() -> None:
    url = nobody()
    with pytest.raises(BrokerUnreachableError, match=f"{url} .*refused.*ADMIN_URL") as caught:
        Admin(url, token=SECRET).partitioned_metadata(TOPIC)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_broker_that_owns_a_topic_and_does_not_answer_is_named(
    server: Server, hanging: str, hangs: bool
) -> None:
    away = hanging if hangs else nobody()
    server.answer = lambda method, path: (307, {"Location": away + path}, b"")
    admin = Admin(server.url, timeout_s=0.2)
    for _ in range(2):
        with pytest.raises(BrokerUnreachableError) as caught:
            admin.properties(TOPIC)
        host, asked = away.removeprefix("http://"), server.url.removeprefix("http://")
        assert caught.value.address == host
        assert f"the broker at {host} does not answer" in str(caught.value)
        assert f"{asked} names it" in str(caught.value)
        assert "admin_url" not in str(caught.value), "that address is right"


@pytest.mark.parametrize(
    ("scheme", "port", "words"),
    [
        ("https", "http", r"\[SSL: \w+\] "),
        ("http", "ssh", r"\('Connection aborted\.', BadStatusLine\('SSH-2.0-a: b"),
        ("http", "", r"Failed to establish a new connection: \[Errno \d+\] \w+"),
    ],
)
def test_the_reason_of_a_missing_answer_is_whole_and_names_no_object(
    server: Server, listening: socket.socket, scheme: str, port: str, words: str
) -> None:
    def speak() -> None:
        for _ in range(2):
            connection, _ = listening.accept()
            connection.sendall(b"SSH-2.0-a: b\r\n")
            connection.close()

    places = {"http": server.url, "": nobody()}
    if port == "ssh":
        threading.Thread(target=speak, daemon=True).start()
        places[port] = f"http://127.0.0.1:{listening.getsockname()[1]}"
    url = places[port].replace("http", scheme)
    with pytest.raises(BrokerUnreachableError, match=rf"does not answer \({words}"):
        Admin(url, timeout_s=5).version()


@pytest.mark.parametrize("redirected", [False, True])
def test_a_read_is_given_up_early_if_its_broker_hangs(
    server: Server, hanging: str, redirected: bool
) -> None:
    """Not after ten minutes, which the test would not survive."""
    server.answer = lambda method, path: (307, {"Location": hanging + path}, b"")
    url = server.url if redirected else hanging
    for _ in range(2):
        with pytest.raises(BrokerUnreachableError, match=r"Read timed out|no answer in time"):
            Admin(url, timeout_s=600, for_service=True).properties(TOPIC)
    with pytest.raises(BrokerUnreachableError, match=r"no answer in time|Read timed out"):
        Admin(url, timeout_s=600).within(0.2).partitioned_stats(TOPIC)


@pytest.mark.parametrize("hasty", [False, True])
@pytest.mark.parametrize("hangs", [False, True])
def test_a_read_by_a_broker_that_is_away_goes_to_the_next_one(
    server: Server, request: pytest.FixtureRequest, hangs: bool, hasty: bool
) -> None:
    script(server, FOUND)
    first = request.getfixturevalue("hanging") if hangs else nobody()
    rest = http.Rest(f"{first},{server.url.removeprefix('http://')}", timeout_s=600)
    assert (rest.within(600) if hasty else rest).get("x") == {"a": "b"}
    assert http.address_at(server.url).answered_s > 0, "it is the first one from now on"


def test_a_broker_that_hangs_is_left_alone_for_a_while(
    listening: socket.socket, hanging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_PROBE_EVERY_S", 60.0)
    admin = Admin(hanging, timeout_s=600, for_service=True)
    listening.settimeout(0.1)

    def connections() -> int:
        with pytest.raises(BrokerUnreachableError):
            admin.properties(TOPIC)
        count = 0
        with contextlib.suppress(TimeoutError):
            while True:
                listening.accept()[0].close()
                count += 1
        return count

    # The read and a request for a sign of life, then another one of these, then nothing.
    assert [connections() for _ in range(3)] == [2, 1, 0]


def test_a_slow_answer_to_a_hasty_read_says_nothing_about_its_broker(
    server: Server, other: Server
) -> None:
    may_answer = threading.Event()
    server.answer = lambda method, path: FOUND if may_answer.wait(30) else DONE
    rest = http.Rest(f"{server.url},{other.url.removeprefix('http://')}", timeout_s=60)
    with pytest.raises(BrokerUnreachableError):
        rest.within(0.2).get("x")
    may_answer.set()
    assert rest.get("x") == {"a": "b"}
    assert other.seen == []


def test_a_slow_broker_that_lives_is_waited_for(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_PATIENCE_S", 0.2)
    asked = threading.Event()

    def answer(method: str, path: str) -> Answer:
        if "properties" in path:
            assert asked.wait(60), "nobody asked if it lives"
        asked.set()
        return FOUND

    server.answer = answer
    assert Admin(server.url, timeout_s=60, for_service=True).properties(TOPIC) == {"a": "b"}


def test_a_slow_broker_is_waited_for_even_if_it_gives_others_no_sign_of_life(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(http, "_PROBE_TIMEOUT_S", 0.2)
    asked, ended = threading.Event(), threading.Event()

    def answer(method: str, path: str) -> Answer:
        if "properties" in path:
            asked.wait(60)
        elif asked.is_set():
            ended.wait(60)
        else:
            # Meanwhile, another request finds that the broker hangs.
            failure = urllib3.exceptions.TimeoutError("no answer in time")
            http.address_at(server.url).no_answer(failure)
            asked.set()
        return FOUND

    server.answer = answer
    try:
        assert Admin(server.url, timeout_s=60, for_service=True).properties(TOPIC) == {"a": "b"}
    finally:
        ended.set()


def test_a_change_waits_for_a_broker_that_pauses_and_is_made_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_PROBE_TIMEOUT_S", 0.2)
    lives = threading.Event()
    server.answer = lambda method, path: DONE if lives.wait(30) else FOUND
    with pytest.raises(BrokerUnreachableError):
        http.Rest(server.url, timeout_s=0.1).get("x")
    timer = threading.Timer(1.0, lives.set)
    timer.start()
    http.Rest(server.url, timeout_s=60).put("x", 1)
    assert methods(server).count("PUT") == 1
    lives.clear()
    with pytest.raises(BrokerUnreachableError):
        http.Rest(server.url, timeout_s=0.5).put("x", 1)
    lives.set()
    timer.join()


# -- what brokers were seen to answer


def topic_of(properties: dict[str, str]) -> Answer:
    return reply(200, {"partitions": 2, "properties": properties})


def test_properties_are_visible_at_the_next_read(server: Server) -> None:
    new = {"a": "new"}
    # The first read is the check for a missing topic.
    script(server, topic_of({}), DONE, topic_of({}), topic_of({}), topic_of(new)).set_properties(
        TOPIC, new
    )
    assert methods(server) == ["GET", "PUT", "GET", "GET", "GET"]


def test_a_request_for_a_moving_topic_is_repeated(server: Server) -> None:
    assert script(server, reply(503, {"reason": "moving"}), FOUND).properties(TOPIC) == {"a": "b"}


def test_brokers_before_4_report_0_partitions_for_a_missing_topic(server: Server) -> None:
    admin = script(server, reply(200, {"partitions": 0}), reply(404, {"reason": "not found"}))
    assert admin.topic_exists(TOPIC) is False


def test_no_request_would_create_a_topic(server: Server) -> None:
    with pytest.raises(NotFoundError):
        script(server, reply(404, {"reason": "not found"})).create_subscription(TOPIC, "s")
    assert methods(server) == ["GET"]


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (412, "Failed for Subscription Busy: Failed to fence subscription"),
        (500, "ManagedLedgerException$BadVersionException: Version mismatch, actual=0, expect=-1"),
        (500, "ManagedLedgerException: Error while using MetaStore error code: -18"),
    ],
)
def test_a_subscription_is_created_once_the_broker_can(
    server: Server, status: int, reason: str
) -> None:
    # The answers of a 4.0.8 broker if several clients create a level topic at the same moment, or
    # while its machine is too busy.
    busy, there = reply(status, {"reason": reason}), reply(409, {"reason": "exists already"})
    with pytest.raises(ConflictError, match="exists already"):
        script(server, topic_of({}), busy, busy, there).create_subscription(TOPIC, "s")
    full = reply(500, {"reason": "disk full"})
    with pytest.raises(AdminError, match="disk full"):
        script(server, topic_of({}), busy, full).create_subscription(TOPIC, "s")


def test_settings_without_permission_are_unknown(server: Server) -> None:
    settings = script(server, reply(403, {"reason": "superusers only"})).broker_settings()
    assert (settings.max_partitions, settings.topic_policies) == (None, None)


def test_the_delay_policy_of_a_namespace_counts_without_policies_of_topics(server: Server) -> None:
    # The answers of a 4.0.8 broker with topicLevelPoliciesEnabled=false.
    disabled = reply(405, {"reason": "Topic level policies is disabled, please enable it"})
    policy = reply(
        200,
        {
            "tickTime": 1000,
            "active": True,
            "maxDeliveryDelayInMillis": 70_000,
            "fixedDeliveryDelayInMillis": 60_000,
        },
    )
    found = script(server, disabled, policy).delayed_delivery(TOPIC)
    assert found == DelayedDelivery(True, 1000, 70_000, 60_000)
    assert "/namespaces/" in server.seen[-1][1]
    with pytest.raises(PermissionDeniedError):
        script(server, reply(403, {"reason": "no"})).delayed_delivery(TOPIC)


# -- statistics of partitions


def stats_of(index: int) -> dict[str, Any]:
    return {"storageSize": 0, "subscriptions": {}, "msgInCounter": index + 1}


class Brokers:
    """The answers of brokers to requests for statistics of three partitions.

    Some are ``gone``, and some ``away``, with their broker. All are asked ``together``, or one by
    one if that ``hangs``.
    """

    def __init__(
        self, server: Server, hangs: bool, away: tuple[int, ...] = (), gone: tuple[int, ...] = ()
    ) -> None:
        self.hangs, self.away, self.gone = hangs, away, gone
        self.together, self.dead = 0, nobody()
        self.admin = Admin(server.url)
        server.answer = self.answer

    def answer(self, method: str, path: str) -> Answer:
        path = path.partition("?")[0]
        index = int(path[-len("0/stats")]) if "-partition-" in path else None
        if path.endswith("partitioned-stats"):
            self.together += 1
        if index in self.away or (index is None and path.endswith("stats") and self.hangs):
            return 307, {"Location": self.dead + path}, b""
        if index in self.gone:
            return reply(404, {"reason": "no such partition"})
        if index is not None:
            return reply(200, stats_of(index))
        left = {0, 1, 2}.difference(self.away, self.gone)
        found = {TOPIC.partition(each).full: stats_of(each) for each in left}
        # The broker names the topic itself if it has the statistics of no partition.
        partitions = 3 if path.endswith("/partitions") else found or {TOPIC.full: {}}
        return reply(200, {"metadata": {"partitions": 3}, "partitions": partitions})

    def messages(self) -> dict[int, int]:
        found = self.admin.partitioned_stats(TOPIC)
        return {index: stats.messages_in for index, stats in found.items()}


@pytest.mark.parametrize(("pause_s", "together"), [(30.0, 1), (0.0, 3)])
def test_partitions_are_asked_one_by_one_for_a_while_after_an_answer_that_did_not_come(
    server: Server, monkeypatch: pytest.MonkeyPatch, pause_s: float, together: int
) -> None:
    monkeypatch.setattr("delaylevel.cluster.rest.admin._ONE_BY_ONE_S", pause_s)
    brokers = Brokers(server, hangs=True)
    for _ in range(3):
        assert brokers.messages() == {0: 1, 1: 2, 2: 3}
    assert brokers.together == together


@pytest.mark.parametrize("hangs", [False, True])
def test_only_a_partition_that_does_not_exist_is_left_out(server: Server, hangs: bool) -> None:
    """One without an answer may exist: a topic of which no partition is served is not missing."""
    assert Brokers(server, hangs, gone=(2,)).messages() == {0: 1, 1: 2}
    for away in ((1,), (0, 1, 2)):
        brokers = Brokers(server, hangs, away)
        with pytest.raises(BrokerUnreachableError) as caught:
            brokers.messages()
        assert caught.value.address == brokers.dead.removeprefix("http://")
