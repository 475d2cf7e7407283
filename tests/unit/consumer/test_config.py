"""Tests of the configuration of producers and listeners: sources, their order, and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulsar
import pytest

from delaylevel import DelayLevelProducer
from delaylevel.consumer.config import LISTENER_SETTINGS, ApplicationConfig
from delaylevel.consumer.listener import listeners_of
from delaylevel.consumer.listeners import Listeners
from delaylevel.consumer.retry import Backoff
from delaylevel.errors import ConfigError
from delaylevel.testing import MemoryPulsar

Write = Callable[[str], Path]

FILE = """
service_url = "pulsar://broker.example:6650"

[producer]
enable_delay_level_topic = true
compression_type = "LZ4"
batching_max_messages = 100

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


def test_a_file_has_the_connection_producers_and_listeners(write: Write) -> None:
    config = ApplicationConfig.load(write(FILE), environ={})
    assert config.connection.service_url == "pulsar://broker.example:6650"
    assert config.producer == {
        "enable_delay_level_topic": True,
        "compression_type": pulsar.CompressionType.LZ4,
        "batching_max_messages": 100,
    }
    shared = {"subscription": "shop", "concurrency": 2, "retry": Backoff("10s", "5m")}
    bill = {"concurrency": 8, "subscription_type": pulsar.ConsumerType.KeyShared}
    earliest = pulsar.InitialPosition.Earliest
    ship = {"retry": Backoff("1d"), "deduplicate": True, "initial_position": earliest}
    for name, own in {"other": {}, "bill": bill, "ship": ship}.items():
        assert config.listener(name) == {**shared, **own}


def test_each_source_overrides_the_ones_below_it(write: Write) -> None:
    environ = {"DELAYLEVEL_CONFIG": str(write(FILE))}
    assert ApplicationConfig.load(environ=environ).listener("x")["concurrency"] == 2
    config = ApplicationConfig.load(
        environ=environ, listeners={"concurrency": 4}, producer={"batching_max_messages": 8}
    )
    assert config.listener("x")["concurrency"] == 4
    assert config.listener("bill")["concurrency"] == 8, "the name overrides the defaults"
    assert config.producer["batching_max_messages"] == 8


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
        ('[producer]\ncompression_type = "rar"', r"is one of none, lz4, zlib, zstd, snappy"),
        ("[producer]\nbatching_max_messages = -1", r"\[producer\] in .* whole number from 0 up"),
        ("[consumer]\nx = 1", r"unknown settings: consumer .*\[producer\], \[listeners\]"),
    ],
)
def test_a_wrong_file_is_refused_in_our_own_words(write: Write, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        ApplicationConfig.load(write(text), environ={})


@pytest.mark.parametrize("variable", ["LISTENERS_CONCURRENCY", "PRODUCER_COMPRESSION_TYPE"])
def test_a_variable_for_a_table_is_refused(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} is not a setting: write it into"):
        ApplicationConfig.load(environ={f"DELAYLEVEL_{variable}": "2"})


def test_every_setting_of_a_listener_is_an_option_of_a_listener() -> None:
    values: dict[str, Any] = {
        "subscription": "s",
        "subscription_type": "Failover",
        "retry": ["1s"],
        "deduplicate": False,
        "concurrency": 2,
        "initial_position": "latest",
        "receiver_queue_size": 10,
    }
    assert set(values) == set(LISTENER_SETTINGS)
    options = ApplicationConfig.load(listeners=values, environ={}).listener("x")
    (found,) = listeners_of(lambda message: None, "orders", "x", options)
    assert (found.concurrency, found.backoff) == (2, Backoff("1s"))
    assert found.options["receiver_queue_size"] == 10


def test_producers_have_the_configured_options(
    write: Write, memory_pulsar: MemoryPulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ApplicationConfig, "open_client", lambda self: memory_pulsar.client())
    app = Listeners.from_config(write(FILE), environ={})
    assert isinstance(app.create_producer("orders"), DelayLevelProducer)
    plain = app.create_producer("orders", enable_delay_level_topic=False)
    assert not isinstance(plain, DelayLevelProducer)
