"""Tests of what an application says about its listeners, in code and in a configuration file."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest

from delaylevel.consumer import Backoff, Deduplication, Listener, Listeners, Retry, TopicIdStore
from delaylevel.consumer.config import CHECKS, ApplicationConfig
from delaylevel.consumer.listener import listener_of
from delaylevel.consumer.listeners import Listeners
from delaylevel.consumer.retry import Backoff
from delaylevel.errors import ConfigError, InvalidInputError
from delaylevel.testing import MemoryPulsar


def handle(message: Any) -> None:
    """Do nothing."""


async def await_message(message: Any) -> None:
    """Do nothing."""


def registered(handler: Callable[[Any], Any] = handle, **options: Any) -> Listener:
    app = Listeners(None)
    app.on("orders", **{"subscription": "billing", **options})(handler)
    (listener,) = app.listeners
    return listener


def test_the_defaults() -> None:
    listener = registered()
    assert (listener.name, listener.topic) == ("handle", "persistent://public/default/orders")
    assert listener.subscription_type == pulsar.ConsumerType.Shared
    assert listener.backoff == Backoff("10s", "1m", "10m", "1h")
    assert (listener.concurrency, listener.consumers, listener.deduplication) == (1, 1, None)
    assert not listener.is_coroutine
    # Coroutines run at once unless the order counts.
    for kind, concurrency in (("Key_Shared", 100), ("Failover", 1), ("Exclusive", 1)):
        listener = registered(await_message, subscription_type=kind)
        assert (listener.concurrency, listener.consumers) == (concurrency, 1)


@pytest.mark.parametrize(("number", "seconds"), [(0.0, 9), (0.5, 10), (1.0, 11)])
def test_jitter_makes_a_delay_shorter_or_longer(number: float, seconds: int) -> None:
    delay = Backoff("10s", jitter=0.1).delay(1, lambda: number)
    assert delay == timedelta(seconds=seconds)


class Service:
    """An object with handlers."""

    def method(self, message: Any) -> None:
        pass

    async def coroutine(self, message: Any) -> None:
        pass

    async def __call__(self, message: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("handler", "name", "is_coroutine"),
    [
        (Service().method, "method", False),
        (Service().coroutine, "coroutine", True),
        (Service(), "Service", True),
        (functools.partial(await_message), "await_message", True),
        (lambda message, more=1: None, "<lambda>", False),
        (print, "print", False),
    ],
)
def test_every_callable_can_be_a_handler(handler: Any, name: str, is_coroutine: bool) -> None:
    listener = registered(handler)
    assert (listener.name, listener.is_coroutine) == (name, is_coroutine)


def yielding(message: Any) -> Any:
    yield message


async def yielding_later(message: Any) -> Any:
    yield message


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (
            lambda: None,
            r"exactly one positional argument, the message, but this one is <lambda>\(\)",
        ),
        (lambda message, more: None, r"\(message, more\)"),
        (lambda *, message: None, "exactly one"),
        (Service.method, r"this one is method\(self, message"),
        (yielding, "has a yield"),
        (yielding_later, "has a yield"),
        (Service, "is a class"),
        ("handle", "is a function of the message"),
    ],
)
def test_a_wrong_handler_is_refused(handler: Any, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        registered(handler)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"subscription": None}, "subscription is a name, not None: give one"),
        ({"subscription_type": "Sharde"}, "Shared, Key_Shared, Failover or Exclusive"),
        ({"subscription_type": "Exclusive", "concurrency": 2}, "write concurrency=1"),
        ({"concurrency": 0}, "concurrency is 1 to"),
        ({"retry": 5}, "retry is Backoff"),
        ({"deduplicate": "yes"}, "deduplicate must be True, False"),
        ({"filter": "price > 5"}, "filter is a function of the message"),
        ({"filter": lambda: True}, "filter takes exactly one positional argument"),
        ({"schema": pulsar.schema.StringSchema}, "schema is an object of .*StringSchema"),
        ({"initial_position": "first"}, "earliest or latest"),
        ({"receiver_queue_size": 0}, "receiver_queue_size=0 works neither"),
        ({"concurency": 3}, "it has .* concurrency, and those of"),
        ({"message_listener": handle}, "but not .* message_listener"),
        ({"consumer_type": pulsar.ConsumerType.Shared}, "it has subscription, subscription_type"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said) as caught:
        registered(**options)
    assert str(caught.value).startswith("listener 'handle': ")


def test_wrong_delays_and_stores_are_refused_where_they_are_given() -> None:
    backoff: Any = Backoff
    deduplication: Any = Deduplication
    retry: Any = Retry
    for call, said in (
        (lambda: backoff("soon"), "is no duration"),
        (lambda: backoff(10), "is a timedelta or a text"),
        (lambda: backoff(timedelta(-1)), "is negative"),
        (lambda: backoff("1s", jitter=2), "jitter is a number from 0 to 1"),
        (lambda: backoff("1s", retry_on="ValueError"), "retry_on has classes of exceptions"),
        (lambda: backoff("1s", give_up_on=(OSError, int)), "give_up_on has classes of exceptions"),
        (lambda: retry("soon"), "after.* is no duration"),
        (lambda: retry(-1), "after is a timedelta or a text"),
        (lambda: deduplication(by="key"), "by must be a function"),
        (lambda: deduplication(capacity=3), "an even integer from 2 on, got 3"),
        (lambda: deduplication(capacity=2.0), "an even integer from 2 on, got 2.0"),
        (lambda: deduplication(capacity=True), "an even integer from 2 on, got True"),
        (lambda: deduplication(store="ids"), "a TopicIdStore or None, got 'ids'"),
        (lambda: deduplication(store=TopicIdStore), "a TopicIdStore or None, got <class"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            call()


@pytest.mark.parametrize("topic", ["", [], 5, ["orders", 5], "non-persistent://a/b/c", "a/b"])
def test_a_wrong_topic_is_refused(topic: Any) -> None:
    with pytest.raises(InvalidInputError, match="topic"):
        Listeners(None).on(topic, subscription="billing")(handle)


def test_a_list_of_topics_is_refused_with_the_remedy() -> None:
    several: Any = ["orders", "invoices"]
    with pytest.raises(InvalidInputError, match=r"'handle'.*register each topic by itself"):
        Listeners(None).on(several, subscription="billing")(handle)


def test_two_handlers_of_one_subscription_are_refused() -> None:
    app = Listeners(None)
    app.on("orders", subscription="billing")(handle)
    app.on("orders", subscription="audit", name="audit")(handle)
    for topic in ("public/default/orders", "orders-partition-0"):
        with pytest.raises(InvalidInputError, match="'handle' handles topic"):
            app.on(topic, subscription="billing")(await_message)
    assert len(app.listeners) == 2
    # One handler may have some partitions, each with consumers of its own.
    for topic in ("invoices-partition-0", "invoices-partition-1"):
        app.on(topic, subscription="billing")(handle)
    with pytest.raises(InvalidInputError, match="invoices-partition-0 with"):
        app.on("invoices-partition-2", subscription="billing")(await_message)


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
    ship = {"retry": Backoff("1d"), "deduplicate": Deduplication(), "initial_position": earliest}
    for name, own in {"other": {}, "bill": bill, "ship": ship}.items():
        assert config.listener(name) == {**shared, **own}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[listeners]\nconcurency = 2", r"concurency \(from \[listeners\] in .*\) is not a setti"),
        ("[listeners]\nconcurency = 2", "known are .* concurrency,"),
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
    assert set(values) == set(CHECKS)
    lines = (f"{name} = {json.dumps(value)}" for name, value in values.items())
    options = ApplicationConfig.load(write("\n".join(["[listeners]", *lines]))).listener("x")
    found = listener_of(lambda message: None, "orders", "x", options)
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
