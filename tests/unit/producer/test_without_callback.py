"""Tests of messages that are sent without a callback: their failures, counted and reported once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pytest
from pulsar.schema import BytesSchema

from delaylevel import PartitionStrategy, wrap
from delaylevel.errors import BrokerError, UnconfirmedMessagesError, UnsupportedOptionError
from delaylevel.producer import producer as producer_module
from delaylevel.producer.producer import CallbacklessMessages
from delaylevel.testing import MemoryPulsar

TWO_DAYS = timedelta(days=2)
WEEK = PartitionStrategy(maximum_delay=timedelta(days=7))
Result = pulsar.Result
FULL, TIMEOUT = Result.ProducerQueueIsFull, Result.Timeout


class FakeProducer:
    """A plain producer whose outcomes a test scripts.

    Attributes:
        results: results of the next messages; Ok after the last.
        late: True to call back after the flush has returned, as the real client may.
        failure: exception of the next flush.
    """

    def __init__(self, topic: str = "persistent://public/default/orders") -> None:
        self._schema = BytesSchema()
        self._topic = topic
        self.results: list[Any] = []
        self.late = False
        self.failure: Exception | None = None
        self.closed = False
        self._waiting: list[tuple[Callable[..., Any], Any]] = []
        self.threads: list[threading.Thread] = []

    def topic(self) -> str:
        return self._topic

    def send_async(self, content: bytes, callback: Callable[..., Any], **_: Any) -> None:
        result = self.results.pop(0) if self.results else Result.Ok
        if result == FULL:  # the client refuses it at once
            callback(result, None)
        else:
            self._waiting.append((callback, result))

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self.late:
            self.threads.append(threading.Timer(0.05, self._call_back, [waiting]))
            self.threads[-1].start()
        else:
            self._call_back(waiting)
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _call_back(self, waiting: list[tuple[Callable[..., Any], Any]]) -> None:
        for callback, result in waiting:
            # The client makes a new object for each outcome.
            callback(Result(result.value), None)

    def close(self) -> None:
        self.closed = True
        for thread in self.threads:
            thread.join()


class FakeClient:
    """A client whose level producers are fakes, too."""

    def __init__(self) -> None:
        self.made: list[tuple[FakeProducer, dict[str, Any]]] = []

    def create_producer(self, topic: str, **settings: Any) -> FakeProducer:
        self.made.append((FakeProducer(topic), settings))
        return self.made[-1][0]

    def get_topic_partitions(self, topic: str) -> list[str]:
        if "/_" not in topic:
            return [topic]  # the answer for a topic that does not exist: no earlier level topic
        count = 6 if topic.endswith("-delay-level") else 4
        return [f"{topic}-partition-{number}" for number in range(count)]


@pytest.fixture
def business() -> FakeProducer:
    return FakeProducer()


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def producer(business: FakeProducer, client: FakeClient) -> Any:
    return wrap(business, client, partition_strategy=WEEK)


def test_every_failure_is_counted_and_reported_once(
    producer: Any, business: FakeProducer, client: FakeClient
) -> None:
    producer.send_async(b"opens", None, deliver_after=TWO_DAYS)
    ((level, _),) = client.made
    level.results = [FULL, Result.Ok, FULL, TIMEOUT, FULL]
    business.results = [TIMEOUT]
    for _ in range(7):
        producer.send_async(b"parked", None, deliver_after=TWO_DAYS)
    producer.send_async(b"straight", None)
    with pytest.raises(UnconfirmedMessagesError) as reported:
        producer.flush()
    assert reported.value.count == 5
    assert reported.value.reasons == {"ProducerQueueIsFull": 3, "Timeout": 2}
    assert next(iter(reported.value.reasons)) == "ProducerQueueIsFull"
    assert isinstance(reported.value, pulsar.PulsarException)
    assert isinstance(reported.value, BrokerError)
    text = str(reported.value)
    assert text.startswith("5 messages sent without a callback failed (ProducerQueueIsFull: 3, ")
    for part in ("Timeout: 2", "block_if_queue_full=True", "may be stored or not", "callback"):
        assert part in text
    producer.flush()
    producer.close()


def test_close_reports_what_flush_did_not(
    producer: Any, business: FakeProducer, client: FakeClient
) -> None:
    business.results = [FULL]
    producer.send_async(b"straight", None)
    producer.send_async(b"parked", None, deliver_after=TWO_DAYS)
    with pytest.raises(UnconfirmedMessagesError, match=r"1 message sent .*ProducerQueueIsFull: 1"):
        producer.close()
    assert business.closed
    assert client.made[0][0].closed


def test_a_with_block_reports_failures(producer: Any, business: FakeProducer) -> None:
    business.results = [FULL]
    with pytest.raises(UnconfirmedMessagesError), producer:
        producer.send_async(b"straight", None)


def test_outcomes_that_follow_the_flush_are_awaited(producer: Any, business: FakeProducer) -> None:
    business.late = True
    for _ in range(3):
        business.results = [Result.Ok, TIMEOUT, Result.Ok]
        for _ in range(3):
            producer.send_async(b"straight", None)
        with pytest.raises(UnconfirmedMessagesError, match=r"1 message .*Timeout: 1"):
            producer.flush()
    producer.close()


def test_missing_outcomes_are_not_awaited_for_ever(
    producer: Any, business: FakeProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_module, "_PATIENCE_S", 0.01)
    producer.send_async(b"straight", None)
    business._waiting.clear()
    producer.flush()


def test_a_failure_of_a_flush_is_raised_and_is_the_cause_of_the_report(
    producer: Any, business: FakeProducer
) -> None:
    business.failure = failure = pulsar.Timeout("flush")
    with pytest.raises(pulsar.Timeout) as raised:
        producer.flush()
    assert raised.value is failure
    business.failure = failure
    business.results = [TIMEOUT]
    producer.send_async(b"straight", None)
    with pytest.raises(UnconfirmedMessagesError) as reported:
        producer.flush()
    assert reported.value.__cause__ is failure


def test_failures_of_messages_with_a_callback_go_to_the_callback(
    producer: Any, business: FakeProducer
) -> None:
    business.results = [FULL, TIMEOUT]
    seen: list[Any] = []
    for _ in range(2):
        producer.send_async(b"straight", lambda result, _: seen.append(result))
    producer.close()
    assert seen == [FULL, TIMEOUT]


def test_a_closed_producer_refuses_messages_without_a_callback(producer: Any) -> None:
    producer.send_async(b"opens", None, deliver_after=TWO_DAYS)
    producer.close()
    for after in (None, TWO_DAYS):
        with pytest.raises(pulsar.AlreadyClosed):
            producer.send_async(b"x", None, deliver_after=after)


def test_concurrent_failures_are_all_counted() -> None:
    messages = CallbacklessMessages()
    results = list(Result.__members__.values())

    def call_back() -> None:
        for _ in range(200):
            for result in results:
                messages.callback(Result(result.value), None)
                messages.sent()

    threads = [threading.Thread(target=call_back) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    messages.wait(messages.number_sent())
    error = messages.take_error()
    assert error is not None
    failures = {name: 800 for name in Result.__members__ if name != "Ok"}
    assert error.reasons == failures
    assert error.count == 800 * (len(results) - 1)
    assert messages.take_error() is None


def test_results_that_the_client_does_not_name_are_counted() -> None:
    messages = CallbacklessMessages()
    for value in (-1, 46, 46):
        messages.callback(Result(value), None)
    error = messages.take_error()
    assert error is not None
    assert error.reasons == {"Result -1": 1, "Result 46": 2}


def test_no_python_code_runs_for_a_stored_message() -> None:
    messages = CallbacklessMessages()
    assert type(messages.callback).__name__ == "builtin_function_or_method"
    ran: list[Any] = []
    sys.setprofile(lambda frame, event, _: ran.append((event, frame.f_code.co_name)))
    try:
        messages.callback(Result.Ok, None)
    finally:
        sys.setprofile(None)
    assert [name for event, name in ran if event == "call"] == []


def test_a_parked_message_takes_few_calls_of_python_code() -> None:
    given: list[tuple[Any, Any]] = []
    with MemoryPulsar() as memory:
        producer: Any = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=WEEK
        )
        producer._sends[0, 1] = lambda message, callback: given.append((message, callback))
        ran: list[str] = []

        def profile(frame: Any, event: str, _: Any) -> None:
            if event == "call":
                ran.append(frame.f_code.co_name)

        sys.setprofile(profile)
        try:
            producer.send_async(b"x", None, {"a": "b"}, "key", deliver_after=TWO_DAYS)
        finally:
            sys.setprofile(None)
        producer._sends.clear()
    assert ran == [
        "send_async",
        "refresh_if_old",
        "route_fast",
        "now_ms",
        "duration_ms",
        "build",
        "<lambda>",
    ]
    ((message, callback),) = given
    assert message.data() == b"x"
    assert callback.__name__ == "setdefault"


def test_a_refused_message_is_reported_in_memory_too() -> None:
    with MemoryPulsar() as memory:
        # With a Function, the messages of levels are not batched.
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=WEEK, mover="function"
        )
        producer.send(b"stored", deliver_after=TWO_DAYS)
        memory.admin.terminate(producer.description.level_topic(0))
        producer.send_async(b"refused", None, deliver_after=TWO_DAYS)
        with pytest.raises(UnconfirmedMessagesError, match="TopicTerminated: 1"):
            producer.close()


# -- settings of level producers


def test_wrapped_producers_wait_for_room_in_the_queue(
    business: FakeProducer, client: FakeClient
) -> None:
    wrap(business, client, partition_strategy=WEEK).send_async(b"", None, deliver_after=TWO_DAYS)
    refusing = wrap(business, client, partition_strategy=WEEK, block_if_queue_full=False)
    refusing.send_async(b"", None, deliver_after=TWO_DAYS)
    assert [settings["block_if_queue_full"] for _, settings in client.made] == [True, False]


def test_options_of_the_wrapped_producer_are_given_to_wrap(
    business: FakeProducer, client: FakeClient
) -> None:
    applied = {
        "compression_type": pulsar.CompressionType.LZ4,
        "send_timeout_millis": 7000,
        "max_pending_messages": 5,
        "batching_max_messages": 50,
        "batching_max_allowed_size_in_bytes": 4096,
        "batching_max_publish_delay_ms": 3,
        "properties": {"team": "a"},
    }
    others = {"schema": BytesSchema(), "producer_name": "mine", "batching_enabled": False}
    wrapped = wrap(business, client, partition_strategy=WEEK, **applied, **others)
    wrapped.send_async(b"", None, deliver_after=TWO_DAYS)
    ((_, settings),) = client.made
    assert {name: settings[name] for name in applied} == applied
    assert "producer_name" not in settings
    assert settings["batching_enabled"] is False


@pytest.mark.parametrize(
    "option",
    [
        {"encryption_key": "k"},
        {"chunking_enabled": True},
        {"message_router": lambda message, count: 0},
        {"access_mode": pulsar.ProducerAccessMode.Exclusive},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_that_delayed_messages_cannot_keep(
    business: FakeProducer, client: FakeClient, option: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedOptionError, match=next(iter(option))):
        wrap(business, client, partition_strategy=WEEK, **option)


def test_unknown_options_are_refused(business: FakeProducer, client: FakeClient) -> None:
    with pytest.raises(TypeError, match="compresion_type"):
        wrap(business, client, partition_strategy=WEEK, compresion_type=None)
    with pytest.raises(TypeError, match="topic"):
        wrap(business, client, partition_strategy=WEEK, topic="other")


@pytest.mark.parametrize(
    "option", [{"chunking_enabled": True}, {"send_timeout_millis": 0}, {"encryption_key": "k"}]
)
def test_options_are_checked_before_the_level_topic_is_created(option: dict[str, Any]) -> None:
    with MemoryPulsar() as memory:
        client = memory.client()
        with pytest.raises(UnsupportedOptionError, match=next(iter(option))):
            client.create_producer("orders", enable_delay_level_topic=True, **option)
        with pytest.raises(UnsupportedOptionError, match=next(iter(option))):
            wrap(client.create_producer("orders"), client, **option)
        assert memory.admin.list_partitioned_topics("public/default") == []
