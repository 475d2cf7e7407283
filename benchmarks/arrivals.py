"""Messages that carry their number and due time, and a comparison of their arrivals with these."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import pulsar
from baselines import Case
from common import BODY, QUIET

# The number and the due time in ms, in digits, at the beginning of each payload.
_NUMBER, STAMP = 12, 25
# A producer sends 1,000 messages without a key to the same window partition in a row. The first run
# may be a few messages shorter, so those near the end of a run are not compared.
_RUN, _MARGIN = 1000, 10


def stamped(number: int, due_ms: int) -> bytes:
    """Return a payload of 1 KiB that begins with a number and a due time."""
    return f"{number:012}{due_ms:013}".encode() + BODY[STAMP:]


def consume(
    service_url: str, topic: str, shared: bool, count: int, keys: int, limit_s: float, answer: Any
) -> None:
    """Receive ``count`` messages; put a summary of their arrivals into a queue.

    The loop does only what is necessary, because the consumer shares the processors with the
    broker.

    Args:
        service_url: address of the broker.
        topic: business topic.
        shared: kind of subscription, True for Shared and False for Exclusive.
        count: number of messages to wait for.
        keys: number of different keys, as for :func:`summary`.
        limit_s: longest time to wait, in seconds.
        answer: queue for "ready", and then for the summary.
    """
    client = pulsar.Client(service_url, logger=QUIET)
    kind = pulsar.ConsumerType.Shared if shared else pulsar.ConsumerType.Exclusive
    consumer = client.subscribe(
        topic, "bench", kind, initial_position=pulsar.InitialPosition.Earliest
    )
    answer.put("ready")
    stamps: list[bytes] = []
    times: list[float] = []
    used_s = time.process_time()
    deadline = time.monotonic() + limit_s
    while not complete(stamps, count) and time.monotonic() < deadline:
        try:
            message = consumer.receive(1000)
        except pulsar.Timeout:
            continue
        times.append(time.time())
        stamps.append(message.data()[:STAMP])
        if shared:
            consumer.acknowledge(message)
        elif len(stamps) % 1000 == 0:
            consumer.acknowledge_cumulative(message)
    used_s = time.process_time() - used_s
    if stamps and not shared:
        consumer.acknowledge_cumulative(message)
    answer.put({**summary(stamps, times, count, keys), "consumer_cpu_s": round(used_s, 1)})
    client.close()


def complete(stamps: Sequence[bytes], count: int) -> bool:
    """Return True if ``count`` different messages have arrived."""
    return len(stamps) >= count and len(set(stamps)) >= count


def summary(stamps: Sequence[bytes], times: Sequence[float], count: int, keys: int) -> Case:
    """Return a table row for arrivals: losses, copies, order and lateness.

    Messages are out of order if one arrives after another of the same key that is due later, or at
    the same time but was sent later. Without keys, the messages of one window partition are
    compared.

    Args:
        stamps: first bytes of the payloads, in the order of their arrival.
        times: times of the arrivals, in seconds since the epoch, shape (n,).
        count: number of messages that were sent.
        keys: number of different keys; 0 for messages without keys.
    """
    numbers = np.array([int(stamp[:_NUMBER]) for stamp in stamps], dtype=np.int64)
    dues_ms = np.array([int(stamp[_NUMBER:]) for stamp in stamps], dtype=np.int64)
    _, firsts = np.unique(numbers, return_index=True)
    firsts.sort()
    late = (np.asarray(times) * 1000 - dues_ms)[firsts]
    low, middle, high, most = np.quantile(late, [0, 0.5, 0.99, 1]) if late.size else [0.0] * 4
    disorder = _disorder(dues_ms[firsts], numbers[firsts], keys)
    return {
        "lost": count - late.size,
        "twice": len(stamps) - late.size,
        "early": int((late < 0).sum()),
        "disorder": disorder,
        "least_ms": round(float(low), 1),
        "p50_ms": round(float(middle), 1),
        "p99_ms": round(float(high), 1),
        "max_ms": round(float(most), 1),
    }


def _disorder(dues_ms: Any, numbers: Any, keys: int) -> int:
    """Return the number of messages that arrived out of order."""
    if not keys:
        compared = numbers % _RUN < _RUN - _MARGIN
        dues_ms, numbers = dues_ms[compared], numbers[compared]
    groups = numbers % keys if keys else numbers // _RUN
    rows = np.argsort(groups, kind="stable")
    due_steps, number_steps = np.diff(dues_ms[rows]), np.diff(numbers[rows])
    behind = (due_steps < 0) | ((due_steps == 0) & (number_steps < 0))
    return int((behind & (np.diff(groups[rows]) == 0)).sum())


@contextlib.contextmanager
def watched(
    processes: Mapping[str, Sequence[psutil.Process]],
) -> Iterator[dict[str, tuple[float, int]]]:
    """Measure processor time in seconds and peak memory in bytes while a block runs.

    Child processes are included, also those that end meanwhile.

    Args:
        processes: the processes of each part, by its name.

    Yields:
        Processor time and peak memory of each part; they are known after the block.
    """
    found: dict[str, tuple[float, int]] = {}
    peaks = dict.fromkeys(processes, 0)

    def times() -> dict[str, float]:
        return {name: sum(map(_cpu_s, several)) for name, several in processes.items()}

    before = times()
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.2):
            for name, several in processes.items():
                peaks[name] = max(peaks[name], sum(map(_resident, several)))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        for name, used in times().items():
            found[name] = (used - before[name], peaks[name])


def _with_children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [process, *process.children(recursive=True)]
    return []


def _cpu_s(process: psutil.Process) -> float:
    used_s = 0.0
    for each in _with_children(process):
        with contextlib.suppress(psutil.Error):
            used_s += sum(each.cpu_times()[:4])  # also of children that have ended
    return used_s


def _resident(process: psutil.Process) -> int:
    found = 0
    for each in _with_children(process):
        with contextlib.suppress(psutil.Error):
            found += each.memory_info().rss
    return found


def wait(condition: Callable[[], bool], limit_s: float, give_up: bool = False) -> None:
    """Wait until a condition holds.

    Args:
        condition: function that eventually returns True.
        limit_s: longest time to wait, in seconds.
        give_up: outcome at the limit, True to return and False to raise an error.

    Raises:
        TimeoutError: the limit has passed.
    """
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            if give_up:
                return
            raise TimeoutError(f"the condition did not hold within {limit_s:.0f} s")
        time.sleep(0.1)
