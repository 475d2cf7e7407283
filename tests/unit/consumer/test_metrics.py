"""Tests of the metrics and probes of listeners."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import urllib3

from delaylevel.consumer import Listeners, ReceivedMessage
from delaylevel.consumer.listener import ListenerHealth
from delaylevel.consumer.metrics import ListenerCollector
from delaylevel.testing import MemoryPulsar

pytest.importorskip("prometheus_client")
# In the middle of a test, CPython 3.11 now and then fails to parse it ("recursion depth mismatch").
pytest.importorskip("delaylevel.web.application")

TOPIC = "persistent://public/default/orders"


class Troubled(Listeners):
    """Listeners with a state that a test sets."""

    state: ListenerHealth | None = None

    def health(self) -> Any:
        return {} if self.state is None else {(TOPIC, "billing"): self.state}


@pytest.fixture
def app(memory_pulsar: MemoryPulsar) -> Troubled:
    """A listener that has handled one message and failed with two."""
    app = Troubled(memory_pulsar.client())

    @app.on("orders", subscription="billing", retry=False)
    def bill(message: ReceivedMessage) -> None:
        if message.data != b"good":
            raise ValueError

    producer = memory_pulsar.client().create_producer("orders")
    for body in (b"good", b"bad", b"ugly"):
        producer.send(body)
    memory_pulsar.advance(timedelta(0))
    app.state = ListenerHealth(True, True)
    return app


def samples(app: Listeners) -> dict[str, float]:
    """Return the values of all series by name."""
    labels = {"topic": TOPIC, "subscription": "billing", "listener": "bill"}
    found = {}
    for family in ListenerCollector(app).collect():
        for sample in family.samples:
            assert sample.labels.items() >= labels.items()
            found[sample.name + sample.labels.get("le", "")] = sample.value
    return found


def test_counts_and_durations(app: Troubled) -> None:
    found = samples(app)
    wanted = {"received": 3, "handled": 1, "failed": 2, "dead": 2, "retried": 0, "filtered": 0}
    expected = {f"{name}_total": count for name, count in wanted.items()}
    expected |= {"in_progress": 0, "duration_seconds_count": 3, "duration_seconds_bucket+Inf": 3}
    expected |= {"subscribed": 1}
    for name, count in expected.items():
        assert found[f"delaylevel_listener_{name}"] == count, name
    assert found["delaylevel_listener_duration_seconds_sum"] > 0
    app.state = ListenerHealth(True, False)
    assert samples(app)["delaylevel_listener_subscribed"] == 0


@pytest.mark.parametrize(
    ("state", "alive", "ready", "text"),
    [
        (ListenerHealth(True, True), 200, 200, "subscribed"),
        (ListenerHealth(True, False), 200, 503, "or the log has the reason"),
        (ListenerHealth(False, True), 503, 200, "a thread ended"),
        (None, 200, 503, "it has not started or has stopped"),
    ],
)
def test_probes(
    app: Troubled, state: ListenerHealth | None, alive: int, ready: int, text: str
) -> None:
    from delaylevel.prometheus import serve

    app.state = state
    with serve(ListenerCollector(app), 0) as port:
        health, readiness, page, other = (
            urllib3.request("GET", f"http://127.0.0.1:{port}{path}", timeout=60)
            for path in ("/healthz", "/readyz", "/", "/pending")
        )
    assert (health.status, readiness.status, other.status) == (alive, ready, 404)
    assert text.encode() in health.data + readiness.data
    names = [check["name"] for check in readiness.json()["checks"]]
    assert names == [f"consumers of bill ({TOPIC}, billing)"]
    for shown in (b"bill", b"Mean duration"):
        assert shown in page.data
