"""Tests of connection settings: sources, precedence, and secrecy."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path

import pulsar
import pytest

from delaylevel.cluster.connection import local_brokers as broker
from delaylevel.cluster.connection.settings import Connection, TokenSource
from delaylevel.cluster.logs import silent
from delaylevel.errors import ConfigError

SECRET = "s3cret-token-value"


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "config.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_arguments_override_the_environment_which_overrides_the_file(
    config_file: Callable[[str], Path],
) -> None:
    path = config_file(
        'service_url = "pulsar://file:1"\nadmin_url = "http://file:2"\n'
        "operation_timeout_seconds = 5\n"
    )
    environ = {"DELAYLEVEL_CONFIG": str(path), "DELAYLEVEL_ADMIN_URL": "http://environment:2"}
    connection = Connection.load(environ=environ)
    assert connection.service_url == "pulsar://file:1"
    assert connection.admin_url == "http://environment:2"
    assert connection.operation_timeout_seconds == 5

    connection = Connection.load(
        service_url="pulsar://argument:1", operation_timeout_seconds=7, environ=environ
    )
    assert connection.service_url == "pulsar://argument:1"
    assert connection.admin_url == "http://environment:2"
    assert connection.operation_timeout_seconds == 7


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status = broker.BrokerStatus(
        name="mine",
        directory=Path("/nowhere"),
        running=True,
        pid=1,
        service_url="pulsar://127.0.0.1:21000",
        admin_url="http://127.0.0.1:21001",
        functions=False,
        started_ms=0,
    )
    monkeypatch.setattr(broker, "running_instance", lambda: status)
    connection = Connection.load(environ={})
    assert connection.service_url == status.service_url
    assert connection.admin_url == status.admin_url
    assert "mine" in connection.origin
    # The two addresses are never those of two clusters.
    assert Connection.load(service_url="pulsar://h", environ={}).admin_url == "http://h:8080"


def test_unknown_settings_in_the_file_are_named(config_file: Callable[[str], Path]) -> None:
    path = config_file('servcie_url = "pulsar://h:1"\nzzz = 1\n')
    with pytest.raises(ConfigError, match=r"servcie_url, zzz") as caught:
        Connection.load(config_file=path, environ={})
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["service_url = ", 'token = "' + SECRET, "token_file = 3", "\xff"])
def test_an_invalid_file_is_named_and_not_quoted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
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
    for text in (
        repr(connection),
        str(connection),
        connection.model_dump_json(),
        json.dumps(connection.model_dump(), default=str),
    ):
        assert SECRET not in text
    assert connection.read_token() == SECRET


def test_a_token_overrides_a_token_file_of_a_lower_source(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("from the file")
    environ = {"DELAYLEVEL_TOKEN_FILE": str(path)}
    assert Connection.load(environ=environ).read_token() == "from the file"
    connection = Connection.load(token=SECRET, environ=environ)
    assert connection.read_token() == SECRET
    assert connection.token_file is None
    connection = Connection.load(token_file=path, environ={"DELAYLEVEL_TOKEN": SECRET})
    assert connection.read_token() == "from the file"
    with pytest.raises(ConfigError, match="both token and token_file"):
        Connection.load(token=SECRET, token_file=path, environ={})


def test_the_token_file_is_read_at_each_use(tmp_path: Path) -> None:
    path = tmp_path / "token"
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


def test_client_arguments_make_a_client(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(SECRET)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    for file in (cert, key):
        file.touch()
    connection = Connection.load(
        service_url="pulsar+ssl://h:1",
        token_file=path,
        tls_trust_certs_file=cert,
        tls_certificate_file=cert,
        tls_private_key_file=key,
        operation_timeout_seconds=3,
        environ={},
    )
    kwargs = connection.client_kwargs()
    assert isinstance(kwargs.pop("authentication"), pulsar.AuthenticationToken)
    assert kwargs == {
        "service_url": "pulsar+ssl://h:1",
        "operation_timeout_seconds": 3,
        "tls_allow_insecure_connection": False,
        "tls_validate_hostname": True,
        "tls_trust_certs_file_path": str(cert),
        "tls_certificate_file_path": str(cert),
        "tls_private_key_file_path": str(key),
    }
    connection.open_client(logger=silent(), tls_validate_hostname=True).close()


def test_a_briefly_missing_token_file_is_harmless(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The Pulsar client calls back in its own thread, where an error would end the process.
    path = tmp_path / "token"
    path.write_text(SECRET)
    source = TokenSource(Connection.load(token_file=path, environ={}).read_token)
    assert source() == SECRET
    path.write_text("")
    assert (source(), source()) == (SECRET, SECRET)
    path.unlink()
    assert source() == SECRET
    (said,) = caplog.messages  # one warning, not one for every use
    assert "is empty; using the previous token" in said
    assert SECRET not in said
    path.write_text("renewed")
    assert source() == "renewed"
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        TokenSource(Connection(token_file=path).read_token)


def test_the_token_callback_outlives_its_client(tmp_path: Path) -> None:
    # If the client's thread holds the last reference, the process aborts at exit.
    path = tmp_path / "token"
    path.write_text(SECRET)
    source = TokenSource(Connection(token_file=path).read_token)
    pulsar.Client("pulsar://127.0.0.1:1", authentication=source.for_client()).close()
    alive = weakref.ref(source)
    del source
    gc.collect()
    assert alive() is not None


def test_a_certificate_alone_authenticates(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    for file in (cert, key):
        file.touch()
    connection = Connection.load(tls_certificate_file=cert, tls_private_key_file=key, environ={})
    assert isinstance(connection.client_kwargs()["authentication"], pulsar.AuthenticationTLS)
