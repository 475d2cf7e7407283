"""Tests of level producers that open in the background, on a broker behind a proxy that breaks."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import UnconfirmedMessagesError
from delaylevel.model.strategy import PartitionBy, PartitionStrategy
from delaylevel.producer.client import DelayLevelClient
from support.proxy import Proxy
from support.world import QUIET, eventually

HOURS = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=40))
Result = pulsar.Result


def test_nothing_blocks_while_the_broker_is_away(
    proxied: Connection, proxy: Proxy, orders: str
) -> None:
    client = DelayLevelClient.from_connection(proxied, logger=QUIET)
    producer = client.create_producer(
        orders,
        enable_delay_level_topic=True,
        partition_strategy=HOURS,
        send_timeout_millis=1500,
        max_pending_messages=20,
    )
    proxy.cut()
    eventually(lambda: not producer.is_connected(), "the cut")
    results: list[Any] = []
    began = time.monotonic()
    near, far, farthest = (timedelta(hours=hours, minutes=30) for hours in (1, 2, 3))
    for _ in range(25):
        producer.send_async(b"lost", lambda result, _: results.append(result), deliver_after=near)
    producer.send_async(b"lost", None, deliver_after=far)
    assert results == [Result.ProducerQueueIsFull] * 5
    assert time.monotonic() - began < 1
    with pytest.raises(UnconfirmedMessagesError, match=r"1 message .*Timeout: 1") as reported:
        producer.flush()
    assert isinstance(reported.value.__cause__, pulsar.Timeout)
    assert results[5:] == [Result.Timeout] * 20
    with pytest.raises(pulsar.Timeout):
        producer.send(b"lost", deliver_after=farthest)
    assert time.monotonic() - began < 10
    client.shutdown()


PROGRAM = """
import os, signal, sys, time, warnings
from datetime import timedelta
import pulsar
from delaylevel import DelayLevelClient, PartitionBy, PartitionStrategy
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs of shells
warnings.simplefilter("ignore")
strategy = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=40))
quiet = pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)
client = DelayLevelClient({service!r}, admin_url={admin!r}, logger=quiet)
producer = client.create_producer(
    {topic!r}, enable_delay_level_topic=True, partition_strategy=strategy,
    batching_enabled=True, send_timeout_millis=60_000)
for opened in range(2):
    for hour in range(1, 31):
        producer.send_async(b"x", None, deliver_after=timedelta(hours=hour, minutes=30))
    if not opened:
        producer.flush()
        print("opened", flush=True)
        sys.stdin.readline()
for hour in range(31, 35):  # these wait for openings
    producer.send_async(b"x", None, deliver_after=timedelta(hours=hour, minutes=30))
print("waiting", flush=True)
began = time.monotonic()
try:
    {call}
except pulsar.Interrupted:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize(
    "call",
    [
        "producer.flush()",
        "producer.close()",
        "producer.send(b'x', deliver_after=timedelta(hours=36))",
        "pass",
    ],
)
def test_one_interrupt_ends_a_call_and_the_process_exits(
    proxied: Connection, proxy: Proxy, orders: str, call: str
) -> None:
    where = {"service": proxied.service_url, "admin": proxied.admin_url}
    program = PROGRAM.format(**where, topic=orders, call=call)
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "opened\n"
        proxy.hold()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "waiting\n"
        if call != "pass":
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=20)
        assert (output, process.returncode) == ("interrupted\n" * (call != "pass"), 0), errors
    finally:
        process.kill()
        process.communicate()
