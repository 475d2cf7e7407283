"""Tests of connection settings, and of the client that goes on with the brokers that answer."""

from __future__ import annotations

import gc
import json
import socket
import socketserver
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.connection import failover_client
from delaylevel.cluster.connection import local_brokers as broker
from delaylevel.cluster.connection.failover_client import FailoverClient, host_answers
from delaylevel.cluster.connection.settings import Connection, TokenSource
from delaylevel.cluster.logs import silent
from delaylevel.errors import ConfigError

SECRET = "s3cret-token-value"
BOTH = "pulsar://one:6650,two:6650"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def test_arguments_override_the_environment_which_overrides_the_file(path: Path) -> None:
    path.write_text(
        'service_url = "pulsar://file:1"\nadmin_url = "http://file:2"\n'
        "operation_timeout_seconds = 5\n"
    )
    environ = {"DELAYLEVEL_CONFIG": str(path), "DELAYLEVEL_ADMIN_URL": "http://environment:2"}
    for given, expected in (
        ({}, ("pulsar://file:1", "http://environment:2", 5)),
        (
            {"service_url": "pulsar://argument:1", "operation_timeout_seconds": 7},
            ("pulsar://argument:1", "http://environment:2", 7),
        ),
    ):
        found = Connection.load(environ=environ, **given)  # type: ignore[arg-type]
        urls = found.service_url, found.admin_url
        assert (*urls, found.operation_timeout_seconds) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"service_url": "pulsar://h:7000"}, ("pulsar://h:7000", "http://h:8080")),
        ({"service_url": "pulsar+ssl://h"}, ("pulsar+ssl://h", "https://h:8443")),
        ({"service_url": "pulsar://a:1,b:2/"}, ("pulsar://a:1,b:2/", "http://a:8080")),
        ({"service_url": "pulsar://[::1]:1"}, ("pulsar://[::1]:1", "http://[::1]:8080")),
        ({"admin_url": "http://h:9000/"}, ("pulsar://h:6650", "http://h:9000")),
        ({"admin_url": "https://h"}, ("pulsar+ssl://h:6651", "https://h")),
    ],
)
def test_one_address_implies_the_other_on_the_same_host(
    given: dict[str, str], expected: tuple[str, str]
) -> None:
    connection = Connection.load(environ={}, **given)  # type: ignore[arg-type]
    assert (connection.service_url, connection.admin_url) == expected


def test_a_running_embedded_broker_replaces_the_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    urls = ("pulsar://127.0.0.1:21000", "http://127.0.0.1:21001")
    broker.usual_directory().mkdir(parents=True)
    broker.save_status(broker.BrokerStatus(broker.usual_directory(), 5, 21000, 21001))
    assert Connection.load(environ={}) == Connection()
    monkeypatch.setattr(broker, "is_ours", lambda pid, marker: pid == 5)
    connection = Connection.load(environ={})
    assert (connection.service_url, connection.admin_url) == urls
    # The two addresses are never those of two clusters.
    assert Connection.load(service_url="pulsar://h", environ={}).admin_url == "http://h:8080"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('servcie_url = "pulsar://h:1"\nzzz = 1\n', "servcie_url, zzz"),
        *(
            (text, "")
            for text in ("service_url = ", f'token = "{SECRET}', "token_file = 3", "\xff")
        ),
    ],
)
def test_an_invalid_file_is_named_and_not_quoted(path: Path, text: str, named: str) -> None:
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=named) as caught:
        Connection.load(config_file=path, environ={})
    assert str(path) in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("service_url", "http://h:1"),
        ("service_url", "localhost:6650"),
        ("service_url", "pulsar://"),
        ("admin_url", "pulsar://h"),
        ("admin_url", f"https://user:{SECRET}@h"),
        ("tls_allow_insecure", "perhaps"),
        ("operation_timeout_seconds", "0"),
        ("operation_timeout_seconds", SECRET),
    ],
)
def test_an_invalid_value_is_named_with_its_source_and_not_quoted(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Connection.load(environ={f"DELAYLEVEL_{name.upper()}": value})
    assert str(caught.value).startswith(f"{name} (from the environment): ")
    assert SECRET not in str(caught.value)


def test_the_token_is_never_shown() -> None:
    connection = Connection.load(token=SECRET, environ={})
    assert connection.read_token() == SECRET
    shown = [repr(connection), str(connection), connection.model_dump_json()]
    assert SECRET not in " ".join([*shown, json.dumps(connection.model_dump(), default=str)])


def test_a_token_overrides_a_token_file_of_a_lower_source(path: Path) -> None:
    path.write_text("from the file")
    for given, environ, expected in (
        ({}, {"DELAYLEVEL_TOKEN_FILE": str(path)}, "from the file"),
        ({"token": SECRET}, {"DELAYLEVEL_TOKEN_FILE": str(path)}, SECRET),
        ({"token_file": path}, {"DELAYLEVEL_TOKEN": SECRET}, "from the file"),
    ):
        found = Connection.load(environ=environ, **given)  # type: ignore[arg-type]
        assert found.read_token() == expected
        assert found.token is None or found.token_file is None
    with pytest.raises(ConfigError, match="both token and token_file"):
        Connection.load(token=SECRET, token_file=path, environ={})


def test_the_token_file_is_read_at_each_use(path: Path) -> None:
    path.write_text("first\n")
    connection = Connection.load(token_file=path, environ={})
    assert connection.read_token() == "first"
    path.write_text("second\n")
    assert connection.read_token() == "second"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        connection.read_token()
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        connection.read_token()


def test_client_arguments_make_a_client(path: Path) -> None:
    path.touch()
    tls = {"tls_certificate_file": path, "tls_private_key_file": path}
    options: dict[str, Any] = {"tls_trust_certs_file": path, "operation_timeout_seconds": 3}
    url = "pulsar+ssl://h:1"
    connection = Connection.load(service_url=url, token=SECRET, environ={}, **tls, **options)
    kwargs = connection.client_kwargs()
    assert isinstance(kwargs.pop("authentication"), pulsar.AuthenticationToken)
    assert kwargs == {
        "service_url": url,
        "operation_timeout_seconds": 3,
        "tls_allow_insecure_connection": False,
        "tls_validate_hostname": True,
        "tls_trust_certs_file_path": str(path),
        "tls_certificate_file_path": str(path),
        "tls_private_key_file_path": str(path),
    }
    connection.open_client(logger=silent(), tls_validate_hostname=True).close()
    certificate_alone = Connection.load(environ={}, **tls).client_kwargs()  # type: ignore[arg-type]
    assert isinstance(certificate_alone["authentication"], pulsar.AuthenticationTLS)


def test_a_briefly_missing_token_file_is_harmless(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The Pulsar client calls back in its own thread, where an error would end the process.
    path.write_text(SECRET)
    source = TokenSource(Connection.load(token_file=path, environ={}).read_token)
    assert source() == SECRET
    path.write_text("")
    assert (source(), source()) == (SECRET, SECRET)
    path.unlink()
    assert source() == SECRET
    (said,) = caplog.messages  # one warning, not one for every use
    assert "is empty; using the previous one" in said
    assert SECRET not in said
    path.write_text("renewed")
    assert source() == "renewed"
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        TokenSource(Connection(token_file=path).read_token)


def test_the_token_callback_outlives_its_client(path: Path) -> None:
    # If the client's thread holds the last reference, the process aborts at exit.
    path.write_text(SECRET)
    source = TokenSource(Connection(token_file=path).read_token)
    pulsar.Client("pulsar://127.0.0.1:1", authentication=source.for_client()).close()
    alive = weakref.ref(source)
    del source
    gc.collect()
    assert alive() is not None


# -- several hosts


class Hosts:
    """A cluster: the hosts that hang, and the clients that were made.

    A client fails like the real one: of two hosts, it needs both.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.hanging: set[str] = set()
        self.urls: list[str] = []
        self.closed: list[str] = []
        self.failure: type[Exception] = pulsar.ConnectError
        patch.setattr(failover_client, "host_answers", self.answers)
        self.client = FailoverClient(self.open, BOTH)

    def answers(self, host: str, secure: bool) -> bool:
        assert not secure
        return host not in self.hanging

    def open(self, url: str) -> Any:
        def operation(topic: str, **options: Any) -> str:
            if any(host in url for host in self.hanging):
                raise self.failure("no answer")
            return f"{topic} at {url}"

        self.urls.append(url)
        names = ("subscribe", "create_producer", "create_reader", "get_topic_partitions")
        calls: dict[str, Any] = dict.fromkeys(names, operation)

        def close() -> None:
            self.closed.append(url)
            raise self.failure("no answer")

        return SimpleNamespace(**calls, close=close)


@pytest.mark.parametrize("failure", [pulsar.ConnectError, pulsar.Timeout])
def test_it_goes_on_with_the_hosts_that_answer(
    failure: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(monkeypatch)
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
    hosts.hanging = {"one:6650"}
    with pytest.raises(failure):  # in a thread that goes on meanwhile
        client.subscribe("t")
    assert hosts.closed == hosts.urls


def test_a_failure_that_no_other_host_helps_with_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch)
    hosts.hanging = {"one:6650", "two:6650"}
    with pytest.raises(pulsar.ConnectError):
        hosts.client.subscribe("t")
    hosts.hanging = {"6650"}  # each host answers, and the client fails all the same
    with pytest.raises(pulsar.ConnectError):
        hosts.client.subscribe("t")
    assert hosts.urls == [BOTH]


def test_threads_that_fail_together_open_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch)
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


class Refusing(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        received = self.request.recv(100)
        if int.from_bytes(received[:4], "big") == len(received) - 4:  # a frame of Pulsar's
            self.request.sendall(b"refused")


def test_a_host_that_accepts_and_says_nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delaylevel.cluster.connection.failover_client._ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host = f"127.0.0.1:{listening.getsockname()[1]}"
        assert not host_answers(host, False)
        assert not host_answers(host, True)
    with socketserver.TCPServer(("127.0.0.1", 0), Refusing) as living:
        threading.Thread(target=living.handle_request, daemon=True).start()
        host = f"127.0.0.1:{living.server_address[1]}"
        assert host_answers(host, False)
    assert not host_answers(host, False), "nobody listens"
    assert not host_answers("no:port:here", False)


def test_services_use_it_if_several_hosts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(Connection, "open_client", lambda _, **options: made.append(options))
    client = Connection(service_url=BOTH).open_service_client(io_threads=2)
    assert isinstance(client, FailoverClient)
    Connection(service_url="pulsar://one:6650").open_service_client(io_threads=3)
    assert made == [{"io_threads": 2, "service_url": BOTH}, {"io_threads": 3}]
