"""A test of the deployed Function: messages arrive as sent, and its status tells how it does."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import urllib3

from delaylevel.cluster.connection.settings import Connection
from delaylevel.functions import health
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import LevelTopicDescription, Role
from support.world import RealWorld


def test_every_message_arrives_as_it_was_sent(
    description: LevelTopicDescription,
    producer: Any,
    deployed: Callable[..., Any],
    world: RealWorld,
    connection: Connection,
) -> None:
    get = world.arrivals(description.targets[0])
    made = deployed(description)
    bodies = [b"007", b"1e5", b" 12 ", b"", None, b"\x00\xff", b'{"a": 1}', b"null", "ü".encode()]
    for number, body in enumerate(bodies):
        producer.send(
            body,
            partition_key=f"key-{number}",
            ordering_key=f"order-{number}",
            event_timestamp=1_000 + number,
            properties={"number": str(number), "empty": ""},
            deliver_after=timedelta(seconds=2 + number % 5),
        )
    found = {int(item.message.properties()["number"]): item for item in get(len(bodies), 60)}
    assert len(found) == len(bodies)
    for number, body in enumerate(bodies):
        message = found[number].message
        assert message.has_null_value() == (body is None)
        assert message.data() == (body or b"")
        assert message.partition_key() == f"key-{number}"
        assert message.ordering_key() == f"order-{number}"
        assert message.event_timestamp() == 1_000 + number
        own = {k: v for k, v in message.properties().items() if not k.startswith("delaylevel.")}
        assert own == {"number": str(number), "empty": ""}
        assert message.properties()["delaylevel.id"]
        assert found[number].late_ms > -1500, "early by more than a tick of the broker"
    world.drained(description)

    def at() -> health.FunctionStatus:
        now_ms = SystemClock().now_ms()
        return health.status(connection, world.admin, description, now_ms)

    stands = at()
    assert stands.running == 1
    world.eventually(lambda: at().problems == (), "the end of problems")

    def handed_off() -> float:
        """Return the metrics that docs/alerts.yml uses."""
        text = urllib3.request("GET", f"{connection.admin_url}/metrics").data.decode()
        pattern = r'^pulsar_function_user_metric_sum\{.*metric="(\w+)".*\} (\S+)$'
        served = dict(re.findall(pattern, text, re.MULTILINE))
        names = ("delaylevel_function_window_total", "delaylevel_function_due_total")
        return sum(float(served.get(name, 0)) for name in names)

    # The worker and its broker report what happened some seconds later.
    world.eventually(lambda: handed_off() == len(bodies), "the worker's own metrics")
    names = {name for row in stands.level.rows(Role.LEVEL) for name in row.consumers}
    assert names == {f"delaylevel-function@{made.function}#0"}, (
        "the worker's consumers are not closed"
    )
