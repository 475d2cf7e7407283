"""Tests of the client that goes on with the brokers that answer."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.connection.failover_client import FailoverClient, host_answers
from delaylevel.cluster.connection.settings import Connection

BOTH = "pulsar://one:6650,two:6650"


class Hosts:
    """A cluster: the hosts that hang, and the clients that were made.

    A client fails like the real one: of two hosts, it needs both.
    """

    def __init__(self) -> None:
        self.hanging: set[str] = set()
        self.urls: list[str] = []
        self.closed: list[str] = []
        self.failure: type[Exception] = pulsar.ConnectError
        self.client = FailoverClient(self.open, BOTH, self.answers)

    def answers(self, host: str, secure: bool) -> bool:
        assert not secure
        return host not in self.hanging

    def open(self, url: str) -> Any:
        self.urls.append(url)
        return OneClient(self, url)


class OneClient:
    def __init__(self, hosts: Hosts, url: str) -> None:
        self._hosts, self._url = hosts, url

    def subscribe(self, topic: str, **options: Any) -> str:
        if any(host in self._url for host in self._hosts.hanging):
            raise self._hosts.failure("no answer")
        return f"{topic} at {self._url}"

    create_producer = create_reader = get_topic_partitions = subscribe

    def close(self) -> None:
        self._hosts.closed.append(self._url)


@pytest.mark.parametrize("failure", [pulsar.ConnectError, pulsar.Timeout])
def test_it_goes_on_with_the_hosts_that_answer(failure: type[Exception]) -> None:
    hosts = Hosts()
    hosts.failure = failure
    client = hosts.client
    assert client.subscribe("t") == f"t at {BOTH}"
    hosts.hanging.add("one:6650")
    for operation in (client.create_producer, client.create_reader, client.subscribe):
        assert operation("t") == "t at pulsar://two:6650"
    assert client.get_topic_partitions("t") == "t at pulsar://two:6650"
    assert hosts.urls == [BOTH, "pulsar://two:6650"], "one more client is enough"
    hosts.hanging = {"two:6650"}
    assert client.create_reader("t") == "t at pulsar://one:6650"
    client.close()
    assert hosts.closed == hosts.urls


def test_a_failure_that_no_other_host_helps_with_is_raised() -> None:
    hosts = Hosts()
    hosts.hanging = {"one:6650", "two:6650"}
    with pytest.raises(pulsar.ConnectError):
        hosts.client.subscribe("t")
    hosts.hanging = {"6650"}  # each host answers, and the client fails all the same
    with pytest.raises(pulsar.ConnectError):
        hosts.client.subscribe("t")
    assert hosts.urls == [BOTH]


def test_threads_that_fail_together_open_one_client() -> None:
    hosts = Hosts()
    hosts.hanging.add("two:6650")
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(hosts.client.subscribe("t"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == 8 * ["t at pulsar://one:6650"]
    assert hosts.urls == [BOTH, "pulsar://one:6650"]


@contextlib.contextmanager
def server(answer: bytes | None) -> Iterator[str]:
    """Yield the address of a server that answers, or hangs."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listening.accept()
                with connection:
                    received = connection.recv(100)
                    assert int.from_bytes(received[:4], "big") == len(received) - 4
                    connection.sendall(answer or b"")

        if answer is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_host_that_accepts_and_says_nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delaylevel.cluster.connection.failover_client._ANSWER_S", 0.2)
    with server(None) as hanging:
        assert not host_answers(hanging, False)
        assert not host_answers(hanging, True)
    with server(b"refused") as living:
        assert host_answers(living, False)
    assert not host_answers(living, False), "nobody listens"
    assert not host_answers("no:port:here", False)


def test_services_use_it_if_several_hosts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(Connection, "open_client", lambda _, **options: made.append(options))
    client = Connection(service_url=BOTH).open_service_client(io_threads=2)
    assert isinstance(client, FailoverClient)
    Connection(service_url="pulsar://one:6650").open_service_client(io_threads=3)
    assert made == [{"io_threads": 2, "service_url": BOTH}, {"io_threads": 3}]
