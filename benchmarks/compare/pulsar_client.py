"""Client of a broker: publishes through the wrapper or the plain client, consumes, cancels."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pulsar
from common import QUIET, stamped

from delaylevel import DelayLevelClient, OutcomeStatus

from .client import CALLS, IN_FLIGHT, Arrivals, Progress, numbers, options, say
from .system import TOPIC

_SETTINGS = {"block_if_queue_full": True, "max_pending_messages": IN_FLIGHT}


def publish(given: dict[str, str]) -> None:
    """Publish the plan; with ``sure``, repeat every message that is not confirmed."""
    dues = numbers(given["plan"])
    named = given["named"] == "yes"
    with closing(_client(given)) as client:
        producer = _producer(client, given)

        def send(number: int, confirmed: Callable[[Any, Any], Any]) -> None:
            extra = {"message_id": _name(number)} if named else {}
            body = stamped(number, dues[number])
            producer.send_async(body, confirmed, deliver_at=dues[number], **extra)

        began = time.perf_counter()
        if given["sure"] == "yes":
            flags = _send_until_confirmed(len(dues), send, producer, float(given["limit_s"]))
            Path(given["out"]).write_bytes(flags)
        else:
            # A dict's method as callback runs no Python code for each message.
            results: dict[Any, Any] = {}
            for number in range(len(dues)):
                send(number, results.setdefault)
            producer.flush()
            if set(results) != {pulsar.Result.Ok}:
                raise RuntimeError(f"messages were not stored: {set(results)}")
        seconds = time.perf_counter() - began
        say("result", f'{{"seconds": {seconds:.3f}}}')


def _send_until_confirmed(
    count: int,
    send: Callable[[int, Callable[[Any, Any], Any]], None],
    producer: Any,
    limit_s: float,
) -> bytearray:
    flags = bytearray(count)
    failed: list[int] = []

    def callback(number: int) -> Callable[[Any, Any], None]:
        def done(result: Any, _: object) -> None:
            if result == pulsar.Result.Ok:
                flags[number] = 1
            else:
                failed.append(number)

        return done

    progress = Progress(lambda: flags.count(1))
    deadline = time.monotonic() + limit_s
    todo = list(range(count))
    while todo and time.monotonic() < deadline:
        for number in todo:
            try:
                send(number, callback(number))
            except pulsar.PulsarException:
                failed.append(number)
        with suppress(pulsar.PulsarException):
            producer.flush()
        todo, failed[:] = failed[:], []
        if todo:
            time.sleep(0.1)
    progress.end()
    return flags


def consume(given: dict[str, str]) -> None:
    """Receive and acknowledge each message, until SIGTERM."""
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    with closing(pulsar.Client(given["service_url"], logger=QUIET)) as client:
        consumer = client.subscribe(
            TOPIC,
            "bench",
            pulsar.ConsumerType.Shared,
            initial_position=pulsar.InitialPosition.Earliest,
        )
        say("ready")
        found = Arrivals(given["out"])
        while not over.is_set():
            try:
                message = consumer.receive(200)
            except pulsar.Timeout:
                found.write()
                continue
            found.add(message.data()[:25])
            found.write_if_old()
            with suppress(pulsar.PulsarException):  # it comes again
                consumer.acknowledge(message)
        found.write()


def cancel(given: dict[str, str]) -> None:
    """Cancel messages by their IDs, in several threads."""
    dues, chosen = numbers(given["plan"]), numbers(given["numbers"])
    with closing(_client(given)) as client, ThreadPoolExecutor(CALLS) as pool:
        producer: Any = _producer(client, given)

        def one(number: int) -> int:
            outcome = producer.cancel(message_id=_name(number), deliver_at=dues[number])
            return int(outcome.status in (OutcomeStatus.ACCEPTED, OutcomeStatus.CANCELLED))

        began = time.perf_counter()
        flags = bytes(pool.map(one, chosen))
        seconds = time.perf_counter() - began
        Path(given["out"]).write_bytes(flags)
        say("result", f'{{"seconds": {seconds:.3f}}}')


def _client(given: dict[str, str]) -> Any:
    if given["kind"] == "ours":
        return DelayLevelClient(given["service_url"], admin_url=given["admin_url"], logger=QUIET)
    return pulsar.Client(given["service_url"], logger=QUIET)


def _producer(client: Any, given: dict[str, str]) -> Any:
    extra = {"enable_delay_level_topic": True} if given["kind"] == "ours" else {}
    return client.create_producer(TOPIC, **_SETTINGS, **extra)


def _name(number: int) -> str:
    return f"m-{number}"


if __name__ == "__main__":
    action, found = options()
    sys.exit({"publish": publish, "consume": consume, "cancel": cancel}[action](found))
