"""A test of the token of executors."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

pytest.importorskip("pyspark")

from delaylevel.cluster.connection.settings import Connection
from delaylevel.spark_sync.job import enter_environment


class Log4j:
    """A fake Log4j with some loggers at DEBUG, which records the levels that are set."""

    def __init__(self, *at_debug: str) -> None:
        self.levels: dict[str, str] = {}
        self.Level = SimpleNamespace(INFO="INFO")
        self.LogManager = SimpleNamespace(
            getLogger=lambda name: SimpleNamespace(isDebugEnabled=lambda: name in at_debug)
        )
        configurator = SimpleNamespace(setLevel=self.levels.__setitem__)
        self.core = SimpleNamespace(config=SimpleNamespace(Configurator=configurator))


def test_the_token_goes_into_the_workers_environment_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Keep it out of the logs that would show that environment."""
    environment = {"PATH": "executors only", "PYTHONPATH": "packages", "OTHER": "kept"}
    registration = "org.apache.spark.sql.DataSourceRegistration"
    log4j = Log4j(registration)
    jvm = SimpleNamespace(
        org=SimpleNamespace(apache=SimpleNamespace(logging=SimpleNamespace(log4j=log4j)))
    )
    context = SimpleNamespace(environment=environment, _jvm=jvm)
    session: Any = SimpleNamespace(sparkContext=context)
    caplog.set_level(logging.DEBUG, "py4j")
    enter_environment(session, Connection(token=SecretStr("t0ken")))
    assert environment == {"OTHER": "kept", "DELAYLEVEL_TOKEN": "t0ken"}
    assert log4j.levels == {registration: "INFO"}
    assert not logging.getLogger("py4j.clientserver").isEnabledFor(logging.DEBUG)
    enter_environment(session, Connection())
    assert environment["DELAYLEVEL_TOKEN"] == "t0ken"
