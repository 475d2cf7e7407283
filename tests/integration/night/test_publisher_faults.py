"""Tests of faults during a send: only stored messages are reported as stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pulsar
import pytest
from pulsar.schema import BytesSchema

from delaylevel.cluster.publisher import BULK_SETTINGS, Publisher
from delaylevel.cluster.rest.admin import Admin
from support.publisher_faults import MESSAGES, kept_topic, messages, publisher, send, stored  # noqa: F401
from support.world import quiet_client


@pytest.mark.parametrize("timeout_ms", [30_000, 1000])
def test_a_broker_killed_during_a_send(private_broker: Callable[..., Any], timeout_ms: int) -> None:
    # With the shorter timeout the client drops its queue, but sends later messages.
    broker = private_broker()
    client = quiet_client(broker.connection)
    try:
        topic = kept_topic(client, "persistent://public/default/out")
        settings = {**BULK_SETTINGS, "send_timeout_millis": timeout_ms}
        producer = client.create_producer(topic.full, schema=BytesSchema(), **settings)
        publisher: Publisher[Any] = Publisher(producer, bulk=True)
        sent = send(publisher, 0, MESSAGES)
        assert broker.kill()
        sent |= send(publisher, MESSAGES, MESSAGES)
        if timeout_ms == 1000:
            with pytest.raises(pulsar.PulsarException):
                producer.flush()
        broker.start()
        sent |= send(publisher, 2 * MESSAGES, MESSAGES)
        failure = publisher.flush()[0]
        with Admin.from_connection(broker.connection) as admin:
            missing = sent - stored(client, admin, topic)
        assert failure is not None or not missing
        if timeout_ms == 1000:
            assert missing
            assert failure is not None
        for number in range(3, 23):  # a broker that has just started may be slower than the timeout
            more = send(publisher, number * MESSAGES, MESSAGES)
            failure = publisher.flush()[0]
            if failure is None:
                break
        assert failure is None
        with Admin.from_connection(broker.connection) as admin:
            assert more <= stored(client, admin, topic)
    finally:
        client.close()
