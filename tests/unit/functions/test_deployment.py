"""Tests of the Function's configuration, archive, instance and status."""

from __future__ import annotations

import io
import json
import zipfile
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import _pulsar
import pulsar
import pytest

from delaylevel import __version__
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.port import PartitionStats, SubscriptionStats
from delaylevel.errors import AdminError, ConfigError, LevelTopicError
from delaylevel.functions import deployment, health
from delaylevel.functions.deployment import FunctionOptions, FunctionSettings, function_config
from delaylevel.functions.mover import ConsumerLoop, client_settings, instance_token, metrics_of
from delaylevel.functions.relay import RelayReport
from delaylevel.functions.worker import FunctionsWorker
from delaylevel.model.level_topic import (
    SUBSCRIPTION,
    FinalWindow,
    LevelTopicDescription,
    Mover,
    Role,
)
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.topics.status import LevelTopicStatus, PartitionStatus
from support.python import python

ORDERS = "persistent://public/default/orders"
LEVEL_TOPIC = f"{ORDERS}-delay-level"
LEVELS = Levels(
    [
        PartitionStrategy(maximum_delay=timedelta(days=30)),
        PartitionStrategy(partition_by=timedelta(hours=1), maximum_delay=timedelta(hours=30)),
    ]
)
CONNECTION = Connection(service_url="pulsar://broker:6650", admin_url="http://broker:8080")


def described(**values: Any) -> LevelTopicDescription:
    return LevelTopicDescription(
        LEVEL_TOPIC, LEVELS, (ORDERS,), **{"mover": Mover.FUNCTION, **values}
    )


# -- configuration


def config(description: LevelTopicDescription | None = None) -> dict[str, Any]:
    return function_config(description or described(), CONNECTION, FunctionOptions())


def test_the_default_configuration_protects_messages() -> None:
    found = function_config(described(), CONNECTION, FunctionOptions(parallelism=3, ram_mb=256))
    expected = {
        "processingGuarantees": "MANUAL",
        "autoAck": False,
        "cleanupSubscription": False,
        "subscriptionPosition": "Earliest",
        "subName": "delaylevel",
        "parallelism": 3,
        "resources": {"cpu": 1.0, "ram": 256 * 1024 * 1024},
    }
    assert {**json.loads(json.dumps(found)), **expected} == found
    members = [LEVEL_TOPIC, f"{LEVEL_TOPIC}-hour", f"{LEVEL_TOPIC}-held"]
    assert list(found["inputSpecs"]) == members, "neither the window nor its journal"
    assert config(described(final_window=FinalWindow.TRACKER)) == config()
    settings = FunctionSettings.from_config(found["userConfig"])
    assert settings == FunctionSettings(LEVEL_TOPIC, "http://broker:8080")


def test_what_cannot_be_deployed_is_refused() -> None:
    with pytest.raises(LevelTopicError, match="delaylevel run"):
        config(described(mover=Mover.SERVICE))
    options: list[dict[str, Any]] = [{"parallelism": 0}, {"cpu": 0.0}, {"ram_mb": 1}]
    for wrong in options:
        with pytest.raises(ConfigError):
            FunctionOptions(**wrong)
    with pytest.raises(ConfigError):
        FunctionSettings.from_config({"something": "else"})


@pytest.mark.parametrize("verified", [True, False])
def test_the_function_verifies_host_names_unless_told_otherwise(verified: bool) -> None:
    connection = Connection(admin_url="https://broker:8443", tls_validate_hostname=verified)
    given = function_config(described(), connection, FunctionOptions())["userConfig"]
    assert FunctionSettings.from_config(given).tls_validate_hostname is verified
    del given["tls_validate_hostname"]
    assert FunctionSettings.from_config(given).tls_validate_hostname is True


# -- the archive


@pytest.fixture(scope="module")
def package() -> bytes:
    return deployment.build()


def test_the_archive_has_what_the_function_needs(package: bytes) -> None:
    names = zipfile.ZipFile(io.BytesIO(package)).namelist()
    assert {name.split("/")[0] for name in names} == {"delaylevel-function"}
    assert "delaylevel-function/src/delaylevel/functions/mover.py" in names
    assert "delaylevel-function/src/delaylevel/model/router.py" in names
    packages = {name.split("/")[2] for name in names}
    assert packages >= {"pydantic", "pydantic_core", "urllib3"}
    assert not packages & {"pulsar", "_pulsar", "pyarrow", "grpc"}
    assert len(package) < 8 * 1024 * 1024
    assert deployment.build() == package, "the same files give another archive"


def test_the_archive_works_in_a_python_that_has_only_pulsar(package: bytes, tmp_path: Path) -> None:
    """Unpack it like python_instance_main.py does."""
    with zipfile.ZipFile(io.BytesIO(package)) as opened:
        opened.extractall(tmp_path)
    source, only = tmp_path / "delaylevel-function" / "src", tmp_path / "only"
    only.mkdir()
    library = Path(_pulsar.__file__)
    (only / "pulsar").symlink_to(Path(pulsar.__file__).parent)
    for path in (library, *library.parent.glob("pulsar_client.libs")):
        (only / path.name).symlink_to(path)
    program = (
        "import sys; sys.path[:0] = sys.argv[1:];"
        "from delaylevel.functions.mover import LevelMover; import delaylevel, pydantic, urllib3;"
        "assert LevelMover();"
        "print(delaylevel.__file__, pydantic.__file__)"
    )
    answer = python("-S", "-c", program, str(source), str(only))
    assert answer.returncode == 0, answer.stderr
    assert all(path.startswith(str(source)) for path in answer.stdout.split())


# -- the instance


TOKENS = "org.apache.pulsar.client.impl.auth.AuthenticationToken"


@pytest.mark.parametrize(
    ("words", "token"),
    [
        ("--x 1", None),
        ("--client_auth_params token:abc", "abc"),
        ("--client_auth_params 'token:abc'", "abc"),
        ("--client_auth_params file://{}/token", "from-file"),
        (f"--client_auth_plugin {TOKENS} --client_auth_params abc", "abc"),
        (f"--client_auth_plugin {TOKENS}", None),
        ("--client_auth_params tlsCertFile:/a,tlsKeyFile:/b", None),
    ],
)
def test_the_token_of_the_instance_is_used(words: str, token: str | None, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-file\n")
    assert instance_token(words.format(tmp_path).split()) == token


def test_a_token_file_without_a_token_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    for name, text in (("missing", "missing"), ("empty", "is empty")):
        with pytest.raises(ConfigError, match=text):
            instance_token(["--client_auth_params", f"file://{tmp_path}/{name}"])


def test_a_second_client_has_the_settings_of_the_workers_client() -> None:
    words = ["--py", "a.zip", "--pulsar_serviceurl", "pulsar://broker:6650"]
    assert client_settings(words) == {
        "service_url": "pulsar://broker:6650",
        "use_tls": False,
        "tls_allow_insecure_connection": False,
        "tls_validate_hostname": False,
    }
    words += ["--use_tls", "true", "--tls_trust_cert_path", "/ca.pem"]
    words += ["--hostname_verification_enabled", "true", "--tls_allow_insecure", "true"]
    words += ["--client_auth_plugin", TOKENS, "--client_auth_params", "token:abc"]
    found = client_settings(words)
    assert isinstance(found.pop("authentication"), pulsar.Authentication)
    assert found == {
        "service_url": "pulsar://broker:6650",
        "use_tls": True,
        "tls_trust_certs_file_path": "/ca.pem",
        "tls_allow_insecure_connection": True,
        "tls_validate_hostname": True,
    }


def test_the_loop_leaves_the_attributes_of_a_thread_alone() -> None:
    """Python 3.14 runs a thread in its attribute `_context`."""
    context = Mock()
    context.get_user_config_map.return_value = {"level_topic": LEVEL_TOPIC, "admin_url": "http://a"}
    context.consumers = {}
    assert vars(ConsumerLoop(context)).get("_context") is None


def test_metrics_are_sums_and_an_empty_report_has_no_metrics() -> None:
    assert metrics_of(RelayReport(), 5) == {}
    report = RelayReport(window=3, due=2, dead=1, latest_ms=-4000, lag_total_ms=50, lag_max_ms=30)
    expected = {"window_total": 3, "due_total": 2, "dead_total": 1}
    expected |= {"lag_seconds_total": 0.05, "lateness_seconds_max": 0}
    found = metrics_of(report, 7)
    for name, value in expected.items():
        assert found[f"delaylevel_function_{name}"] == value


# -- status


def level(behind_ms: int = 0, consumers: tuple[str, ...] = (), held: int = 0) -> LevelTopicStatus:
    now = 1_800_000_000_000

    def row(role: Role, entries: int, index: int) -> PartitionStatus:
        return PartitionStatus(
            topic=LEVEL_TOPIC,
            role=role,
            level=index,
            level_name="DAY",
            partition=0,
            backlog_entries=entries,
            storage_bytes=0,
            oldest_publish_ms=None,
            oldest_hand_off_ms=now - behind_ms if behind_ms else None,
            consumers=consumers,
            stats=PartitionStats(0, {SUBSCRIPTION: SubscriptionStats(entries)}),
        )

    return LevelTopicStatus(described(), now, (row(Role.LEVEL, 5, 0), row(Role.HELD, held, -1)))


def problems(answer: dict[str, Any], at: LevelTopicStatus, error_text: str = "") -> str:
    found = health.instances_of(answer, 1, error_text)
    return "\n".join(health.problems_of(config(), found, at))


def one(**status: Any) -> dict[str, Any]:
    return {"instances": [{"instanceId": 0, "status": {"running": True, **status}}]}


OURS = (f"delaylevel-function@{LEVEL_TOPIC}#0",)


@pytest.mark.parametrize(
    ("answer", "at", "words"),
    [
        (one(), level(consumers=OURS), None),
        ({}, level(), "instance 0 is down"),
        (one(running=False, error="UNAVAILABLE: io"), level(), "is down (UNAVAILABLE: io): it may"),
        (
            one(running=False, numRestarts=3),
            level(),
            "pip install 'pulsar-client[functions]>=3.13,<3.14'",
        ),
        (one(), level(behind_ms=3_600_000, consumers=OURS), "more --parallelism"),
        (one(), level(behind_ms=3_600_000), "--worker-admin-url"),
        (one(), level(held=12), "12 entries are held"),
        (one(), level(), "5 entries wait. Start one: `delaylevel mover deploy"),
        (
            one(latestUserExceptions=[{"exceptionString": "Traceback\nKeyError: 'x'"}]),
            level(),
            "instance 0 failed: KeyError: 'x'",
        ),
    ],
)
def test_problems_come_with_their_remedy(
    answer: dict[str, Any], at: LevelTopicStatus, words: str | None
) -> None:
    found = problems(answer, at, "Not alive")
    assert words in found if words else found == ""


def test_another_version_of_the_function_is_reported() -> None:
    text = "\n".join(health.problems_of({}, (), level(consumers=OURS)))
    assert f"this is {__version__}" in text


# -- the worker's REST interface


def test_a_cluster_without_a_worker_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def request(*_: Any, **__: Any) -> Any:
        raise AdminError("no", status=404, reason="HTTP 404 Not Found")

    worker = FunctionsWorker(CONNECTION)
    monkeypatch.setattr(worker._rest, "request", request)
    with pytest.raises(LevelTopicError, match="no functions worker"):
        worker.status("public/default/x")
