"""Tests of the configuration of listeners: sources, their order, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulsar
import pytest

from delaylevel.consumer.config import LISTENER_SETTINGS, ApplicationConfig
from delaylevel.consumer.listener import listeners_of
from delaylevel.consumer.listeners import Listeners
from delaylevel.consumer.retry import Backoff
from delaylevel.errors import ConfigError
from delaylevel.testing import MemoryPulsar

Write = Callable[[str], Path]

FILE = """
service_url = "pulsar://broker.example:6650"

[listeners]
subscription = "shop"
concurrency = 2
retry = ["10s", "5m"]

[listeners.bill]
concurrency = 8
subscription_type = "key_shared"

[listeners.ship]
retry = "1d"
deduplicate = true
initial_position = "earliest"
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a configuration file."""
    path = tmp_path / "delaylevel.toml"
    return lambda text: (path.write_text(text, encoding="utf-8"), path)[1]


def test_a_file_has_the_connection_and_the_listeners(write: Write) -> None:
    config = ApplicationConfig.load(environ={"DELAYLEVEL_CONFIG": str(write(FILE))})
    assert config.connection.service_url == "pulsar://broker.example:6650"
    shared = {"subscription": "shop", "concurrency": 2, "retry": Backoff("10s", "5m")}
    bill = {"concurrency": 8, "subscription_type": pulsar.ConsumerType.KeyShared}
    earliest = pulsar.InitialPosition.Earliest
    ship = {"retry": Backoff("1d"), "deduplicate": True, "initial_position": earliest}
    for name, own in {"other": {}, "bill": bill, "ship": ship}.items():
        assert config.listener(name) == {**shared, **own}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[listeners]\nconcurency = 2", r"concurency \(from \[listeners\] in .*\) is not a setti"),
        ("[listeners]\nconcurency = 2", r"did you mean concurrency\?"),
        ("[listeners.bill]\nconcurrency = 0", r"\[listeners.bill\] in .*: concurrency is 1 to 10"),
        ('[listeners]\nsubscription = " "', r"subscription .*: subscription is a name"),
        ('[listeners]\nretry = ["10s", "5 parsecs"]', r"retry .*5 parsecs"),
        ('[listeners]\nretry = { first = "1s" }', r"retry .*a list of delays, or False"),
        ('listeners = "bill"', r"listeners must be a table: write \[listeners\]"),
        ("[consumer]\nx = 1", r"unknown settings: consumer .*\[listeners\]"),
    ],
)
def test_a_wrong_file_is_refused_in_our_own_words(write: Write, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        ApplicationConfig.load(write(text), environ={})


def test_a_variable_for_listeners_is_refused() -> None:
    with pytest.raises(ConfigError, match="LISTENERS_CONCURRENCY is not a setting: write it into"):
        ApplicationConfig.load(environ={"DELAYLEVEL_LISTENERS_CONCURRENCY": "2"})


def test_every_setting_of_a_listener_is_an_option_of_a_listener(write: Write) -> None:
    values = {
        "subscription": "s",
        "subscription_type": "Failover",
        "retry": ["1s"],
        "deduplicate": False,
        "concurrency": 2,
        "initial_position": "latest",
        "receiver_queue_size": 10,
    }
    assert set(values) == set(LISTENER_SETTINGS)
    lines = (f"{name} = {json.dumps(value)}" for name, value in values.items())
    options = ApplicationConfig.load(write("\n".join(["[listeners]", *lines]))).listener("x")
    (found,) = listeners_of(lambda message: None, "orders", "x", options)
    assert (found.concurrency, found.backoff) == (2, Backoff("1s"))
    assert found.options["receiver_queue_size"] == 10


def test_a_listener_has_the_settings_of_its_name(
    write: Write,
    memory_pulsar: MemoryPulsar,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(ApplicationConfig, "open_client", lambda self: memory_pulsar.client())
    app = Listeners.from_config(write(FILE), environ={})

    @app.on("orders")
    def bill(message: Any) -> None: ...

    (listener,) = app.listeners
    assert (listener.subscription, listener.concurrency) == ("shop", 8)
    app.start()
    assert "[listeners.ship] has no effect" in caplog.text
    app.close()
