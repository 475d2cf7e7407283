"""Tests of the runner of the official client's suite: configuration, outcomes and counts."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

CONF = """
# Comments and names of the container's files do not apply.
webServicePort=8080
brokerServicePortTls=6651
zookeeperServers=
tokenSecretKey=file:///pulsar/data/tokens/secret.key
# acknowledgmentAtBatchIndexLevelEnabled=false
acknowledgmentAtBatchIndexLevelEnabled = true
tlsCertificateFilePath=test-conf/broker-cert.pem
superUserRoles=localhost,superUser,admin
"""


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``suite("broker")``: a module of the runner."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"tools.official_suite.{name}")


def event(test: str, result: str, reason: str = "") -> str:
    return json.dumps({"test": test, "result": result, "reason": reason})


def test_settings_of_the_suite_apply_without_ports_and_files_of_its_container(suite: Any) -> None:
    assert suite("broker").settings(CONF, Path("/tests")) == {
        "acknowledgmentAtBatchIndexLevelEnabled": "true",
        "tlsCertificateFilePath": "/tests/test-conf/broker-cert.pem",
        "superUserRoles": "localhost,superUser,admin",
    }


def test_the_tests_use_the_ports_of_the_private_broker(suite: Any) -> None:
    text = "'pulsar://localhost:6650' 'http://localhost:8080' 'pulsar://192.0.2.1:6650'"
    assert suite("broker").with_ports(text, {6650: 21000, 8080: 21001}) == (
        "'pulsar://localhost:21000' 'http://localhost:21001' 'pulsar://192.0.2.1:6650'"
    )


def test_outcomes_are_the_last_ones_and_name_the_test_that_did_not_end(suite: Any) -> None:
    outcomes = suite("outcomes")
    lines = [
        event("a.py::T::one", "started"),
        event("a.py::T::one", "passed"),
        event("a.py::T::one", "failed", "at its end"),
        event("a.py::T::two", "started"),
    ]
    found, running = outcomes.parse(lines)
    assert found == [outcomes.Outcome("a.py::T::one", "failed", "at its end")]
    assert running == "a.py::T::two"
    assert found[0].name == "a::one"
    assert outcomes.parse(lines[:3])[1] is None


def test_only_tests_that_pass_in_the_baseline_are_new_failures(suite: Any) -> None:
    outcomes = suite("outcomes")
    baseline = [
        outcomes.Outcome("pulsar_test.py::T::good", "passed"),
        outcomes.Outcome("pulsar_test.py::T::bad", "failed"),
        outcomes.Outcome("asyncio_test.py::T::good", "passed"),
    ]
    mode = [
        outcomes.Outcome("pulsar_test.py::T::good", "hung"),
        outcomes.Outcome("pulsar_test.py::T::bad", "failed"),
        outcomes.Outcome("asyncio_test.py::T::good", "skipped"),
    ]
    assert outcomes.worse(mode, baseline) == [mode[0], mode[2]]
    assert outcomes.table({"plain": baseline, "wrap": mode}, "plain") == [
        "MODE   CLIENT   TESTS  PASSED  SKIPPED  FAILED  HUNG  NEW FAILURES",
        "plain  sync     2      1       0        1       0",
        "plain  asyncio  1      1       0        0       0",
        "wrap   sync     2      0       0        1       1     1",
        "wrap   asyncio  1      0       1        0       0     1",
    ]
