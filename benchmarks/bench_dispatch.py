"""The dispatcher against the broker's own timer: lateness, cost and restart at a peak of due times.

Messages of 1 KiB, due at random within one minute, are published before that minute begins. A
separate process consumes them and compares the time of each arrival with its due time.
``tracker`` is a dispatcher that publishes in batches, ``deduplicated`` one that publishes through
broker deduplication, and ``native`` is deliver_at on the business topic with a Shared
subscription. ``loop`` is a process that has all messages in memory and sends each at its due time
with a plain producer: nothing is stored, and nothing is promised, so no dispatcher in Python can
cost less. Before the minute begins, the dispatcher is killed (-9) and started again; for
``native`` the topic is unloaded. "restart_s" is the time until all pending messages are known
again, and "cpu" is processor time in seconds from the first due time to the last arrival; "percent"
is the same as a share of one core. "disorder" counts messages that arrive in another order than
promised. ``nats`` is a NATS server with file storage and its message schedules.

``cancellable`` is ``tracker`` for messages with IDs and keys, and ``half cancelled`` the same after
half of them were cancelled, at random. "pending_mib" is the dispatcher's memory before it is
killed, "decided_s" the time from the first cancellation to the last outcome.

``--rates`` measures quiet hours, ``--burst`` makes all messages due at one instant; both without a
restart. "max_ms" of a burst is the time until the last message is received.

Examples:
    python benchmarks/bench_dispatch.py --burst --messages 300000 --sides tracker,nats
    python benchmarks/bench_dispatch.py --rates 100,1000 --seconds 40 --sides tracker,loop,nats
    python benchmarks/bench_dispatch.py --messages 1000000 --sides "cancellable,half cancelled"
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pulsar
from common import (
    QUIET,
    Case,
    DispatcherProcess,
    arguments,
    broker_with_defaults,
    consume,
    delay_index,
    in_process,
    memory,
    note,
    publish,
    report,
    stamped,
    wait,
    watched,
)
from compare import nats

from delaylevel import PartitionBy, PartitionStrategy, topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.rest.http import Rest
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.outcome import PAYLOAD, cancellation
from delaylevel.model.topic_name import TopicName

SIDES = ("tracker", "deduplicated", "native", "nats")
CANCELLABLE = ("cancellable", "half cancelled")
TOPIC = "persistent://public/default/orders"
STRATEGY = PartitionStrategy(partition_by=PartitionBy.HOUR)


def main() -> None:
    """Run the sides one after the other, and print the table."""
    parser = arguments(__doc__, messages=200_000, rounds=1)
    add = parser.add_argument
    add("--seconds", type=float, default=60, help="range of the due times (default: 60)")
    text = "sides, separated by commas (default: %(default)s)"
    add("--sides", default=",".join(SIDES), help=text)
    add("--rates", default="", help="rates of quiet hours, in messages/s, separated by commas")
    add("--burst", action="store_true", help="one due time for all messages")
    add("--keys", type=int, default=0, help="number of message keys (default: no keys)")
    text = "number of processes of the dispatcher (default: %(default)s)"
    add("--processes", type=int, default=1, help=text)
    text = "number of messages due within the run; the others are due 10 to 40 minutes later"
    add("--soon", type=int, default=0, help=f"{text} (default: all)")
    text = "factor for the time before the first due time, for a busy machine (default: 1)"
    add("--patience", type=float, default=1.0, help=text)
    options = parser.parse_args()
    rates = [int(rate) for rate in options.rates.split(",") if rate]
    rows = []
    for side in map(str.strip, options.sides.split(",")):
        for _ in range(options.rounds):
            for rate in rates or [0]:
                count = round(rate * options.seconds) or options.messages
                load = Load(count, options.seconds, options.burst, options.keys)
                load = replace(load, soon=options.soon or count, patience=options.patience)
                if side in CANCELLABLE:
                    load = replace(load, keys=load.keys or 1000, half=side == CANCELLABLE[1])
                row = run(side, load, not (rate or options.burst), options.processes)
                if row is not None:
                    rows.append(row)
                    note(str(row))
    report(rows, options.json)


@dataclass(frozen=True)
class Load:
    """The messages of one run.

    They are due within ``seconds``, or at one instant in a ``burst``, and have a number of keys or
    none. ``half`` of them are cancelled, and only ``soon`` of them are released within the run.
    """

    count: int
    seconds: float
    burst: bool
    keys: int
    half: bool = False
    soon: int = 0
    patience: float = 1.0

    @property
    def cancelled(self) -> list[int]:
        """Numbers of the messages that are cancelled."""
        return random.Random(8).sample(range(self.count), self.count // 2 if self.half else 0)

    @property
    def kept(self) -> int:
        """Number of the messages that are not cancelled."""
        return self.count - (self.count // 2 if self.half else 0)

    @property
    def released(self) -> int:
        """Number of the messages that are released within the run."""
        if self.soon == self.count:
            return self.kept
        cancelled = set(self.cancelled)
        return sum(number not in cancelled for number in self._first)

    @property
    def _first(self) -> set[int]:
        """Numbers of the messages that are due within the run."""
        return set(random.Random(9).sample(range(self.count), self.soon))

    @property
    def prepare_s(self) -> float:
        """Time to publish everything, to cancel and to restart, in seconds."""
        return self.patience * (20 + self.count / 12_000 + (self.count - self.kept) / 8_000)

    @property
    def limit_s(self) -> float:
        """Longest time until the last message arrives, in seconds."""
        return self.prepare_s + 3 * self.seconds + 240

    def dues_ms(self, begin_ms: int) -> Iterator[int]:
        """Return the due times of all messages."""
        chosen = random.Random(7)
        spread = 1 if self.burst else round(self.seconds * 1000)
        if self.soon == self.count:
            return (begin_ms + chosen.randrange(spread) for _ in range(self.count))
        first, later = self._first, (600_000, 2_400_000)
        return (
            begin_ms + (chosen.randrange(spread) if each in first else chosen.randint(*later))
            for each in range(self.count)
        )

    def row(
        self, side: str, arrivals: Case, restart_s: float, usage: Mapping[str, tuple[float, int]]
    ) -> Case:
        """Return the row of a run."""
        found: Case = {"side": side, "messages": self.count, **arrivals}
        if self.burst:
            found["rate_per_s"] = round(self.released / max(arrivals["max_ms"], 1) * 1000)
        else:
            found["restart_s"] = round(restart_s, 1)
        spent_s = arrivals["max_ms"] / 1000 if self.burst else self.seconds
        for name in ("dispatcher", "broker"):
            cpu_s, peak = usage.get(name, (0.0, 0))
            found[f"{name}_cpu_s"] = round(cpu_s, 1)
            found[f"{name}_percent"] = round(cpu_s / max(spent_s, 0.001) * 100, 1)
            found[f"{name}_us_per_message"] = round(cpu_s / self.released * 1e6, 1)
            found[f"{name}_peak_mib"] = peak >> 20
        return found


def run(side: str, load: Load, restart: bool, processes: int) -> Case | None:
    """Measure one side on its own broker; return None if the side is not installed."""
    if side == "nats":
        return measure_nats(load, restart)
    with broker_with_defaults() as (connection, broker, directory):
        if side == "loop":
            return measure_loop(load, connection, broker)
        return measure(side, load, restart, processes, connection, broker, directory)


def measure(
    side: str,
    load: Load,
    restart: bool,
    processes: int,
    connection: Connection,
    broker: psutil.Process,
    directory: Path,
) -> Case:
    """Publish, restart, wait for the first due time, and compare arrivals with due times."""
    admin = Admin.from_connection(connection)
    native, deduplicated = side == "native", side == "deduplicated"
    window = {"final_window": "broker" if native else "tracker"}
    reader, answer = consuming(connection, native, load)
    publish(connection, TOPIC, [], STRATEGY, **window)  # creates the level topic
    described = topics.describe(admin, TOPIC)
    if deduplicated:
        name = TopicName.parse(TOPIC)
        with contextlib.closing(Rest(connection.admin_url)) as rest:
            rest.post(f"{name.rest_path}/deduplicationEnabled", True)
        wait(lambda: bool(admin.partition_stats(name).deduplication), 30)
    with contextlib.ExitStack() as stack:

        def start() -> DispatcherProcess | None:
            if native:
                return None
            delivery = "effectively-once" if deduplicated else "at-least-once"
            spill = directory / "spill"
            one = DispatcherProcess(connection, TOPIC, delivery, spill, processes=processes)
            stack.callback(one.kill)
            return one

        dispatcher = start()
        begin_ms = round((time.time() + load.prepare_s) * 1000)
        began = time.monotonic()
        named = side in CANCELLABLE

        def options(number: int) -> Case:
            key = f"key-{number % load.keys}" if load.keys else None
            return {"partition_key": key, "message_id": f"m-{number}" if named else None}

        dues = load.dues_ms(begin_ms)
        publish(connection, TOPIC, dues, STRATEGY, options, **window)
        note(f"{side}: published in {time.monotonic() - began:.1f} s")
        figures: Case = {}
        restart_s = 0.0
        if dispatcher is None and restart:
            restart_s = unload(connection, admin, load.count)
        elif dispatcher is not None:
            wait(lambda: dispatcher.pending() >= load.count, load.prepare_s)
            note(f"{side}: all pending after {time.monotonic() - began:.1f} s")
            if side in CANCELLABLE:
                began = time.monotonic()
                dues_ms = list(load.dues_ms(begin_ms))
                orders = ((dues_ms[n], f"key-{n % load.keys}", f"m-{n}") for n in load.cancelled)
                cancel(connection.service_url, described, orders)
                note(f"{side}: cancelled in {time.monotonic() - began:.1f} s")
                wait(lambda: decided(dispatcher) >= load.count - load.kept, 60 + load.prepare_s)
                figures["decided_s"] = round(time.monotonic() - began, 1)
                figures["pending_mib"] = memory([dispatcher.process.pid])[0] >> 20
        if dispatcher is not None and restart:
            dispatcher.kill()
            again = time.monotonic()
            dispatcher = start()
            wait(lambda: dispatcher.releasing() == described.window_partitions, 120)
            restart_s = time.monotonic() - again
        sleep_until(side, begin_ms, restart_s)
        own = [] if dispatcher is None else [dispatcher.process.pid]
        with watched({"broker": [broker.pid], "dispatcher": own}) as usage:
            arrivals = answer.get(timeout=load.limit_s)
        reader.join()
        if side in CANCELLABLE:
            left = load.kept - load.released
            wait(lambda: dispatcher.pending() <= left, 60)
            figures["stored"] = admin.partition_stats(TopicName.parse(TOPIC)).messages_in
    return {**load.row(side, arrivals, restart_s, usage), **figures}


def consuming(connection: Connection, shared: bool, load: Load) -> tuple[Any, Any]:
    """Start a consumer; return its process, and the queue for the summary of the arrivals."""
    given = (connection.service_url, TOPIC, shared, load.released, load.keys, load.limit_s)
    return in_process(consume, *given)


def decided(dispatcher: DispatcherProcess) -> float:
    """Return the number of outcomes ``cancelled`` that are stored."""
    return dispatcher.series("delaylevel_dispatch_outcomes_total", status="cancelled")


def cancel(
    service_url: str, description: LevelTopicDescription, wanted: Iterable[tuple[int, str, str]]
) -> None:
    """Store cancellations in the window topic, in batches, by due time in ms, key and ID.

    `DelayLevelProducer.cancel` waits for each of them, which would take minutes.
    """
    settings = {"block_if_queue_full": True, "max_pending_messages": 10_000}
    outcomes: dict[Any, Any] = {}
    with contextlib.closing(pulsar.Client(service_url, logger=QUIET)) as client:
        partitions = map(description.window_topic.partition, range(description.window_partitions))
        window = [client.create_producer(each.full, **settings) for each in partitions]
        for due_ms, key, message_id in wanted:
            envelope = cancellation(due_ms, description.targets[0], message_id)
            window[description.window_partition(key, message_id)].send_async(
                PAYLOAD,
                outcomes.setdefault,
                properties=envelope.parked_properties({}),
                partition_key=key,
            )
        for producer in window:
            producer.flush()
    assert set(outcomes) <= {pulsar.Result.Ok}, outcomes.keys()


def measure_loop(load: Load, connection: Connection, broker: psutil.Process) -> Case:
    """Measure a loop that sends messages from memory at their due times."""
    reader, answer = consuming(connection, False, load)
    begin_ms = round((time.time() + load.prepare_s) * 1000)
    dues_ms = list(load.dues_ms(begin_ms))
    sender, _ = in_process(send_on_time, connection.service_url, dues_ms)
    sleep_until("loop", begin_ms, 0.0)
    with watched({"broker": [broker.pid], "dispatcher": [sender.pid]}) as usage:
        arrivals = answer.get(timeout=load.limit_s)
    reader.join()
    sender.kill()
    sender.join()
    return load.row("loop", arrivals, 0.0, usage)


def send_on_time(service_url: str, dues_ms: Sequence[int], ready: Any) -> None:
    """Send each message when it is due, and nothing else: keep nothing, look at no outcome."""
    client = pulsar.Client(service_url, logger=QUIET)
    producer = client.create_producer(TOPIC, block_if_queue_full=True, batching_enabled=False)
    ordered = sorted((due_ms, number) for number, due_ms in enumerate(dues_ms))
    ready.put("ready")
    for due_ms, number in ordered:
        # Rounded up, so that no message is early.
        time.sleep(max(0.0, due_ms / 1000 - time.time() + 0.0005))
        producer.send_async(stamped(number, due_ms), None)
    producer.flush()
    time.sleep(60)  # its processor time is read at the end of the measurement
    client.close()


def measure_nats(load: Load, restart: bool) -> Case | None:
    """Measure the schedules of a NATS server; return None if it is not installed."""
    if nats.server_path() is None:
        note(nats.MISSING)
        return None
    server = nats.Nats()
    with tempfile.TemporaryDirectory(prefix="delaylevel-bench-nats-") as directory:
        server.directory = Path(directory)
        server.start(False)
        try:
            begin_ms = round((time.time() + load.prepare_s) * 1000)
            flags = bytearray(load.count)
            seconds = nats.publish(server.port, list(load.dues_ms(begin_ms)), 120, flags)
            note(f"nats: published {sum(flags) / seconds:,.0f} /s")
            restart_s = 0.0
            if restart:
                server.kill()
                began = time.monotonic()
                server.restart()
                restart_s = time.monotonic() - began
            given = (server.port, load.count, load.keys, load.limit_s)
            reader, answer = in_process(nats.consume, *given)
            sleep_until("nats", begin_ms, restart_s)
            with watched({"broker": server.pids()}) as usage:
                arrivals = answer.get(timeout=load.limit_s)
            reader.join()
        finally:
            server.stop()
    return load.row("nats", arrivals, restart_s, usage)


def sleep_until(side: str, begin_ms: int, restart_s: float) -> None:
    """Sleep until one second before the first due time."""
    left_s = begin_ms / 1000 - time.time()
    note(f"{side}: restarted in {restart_s:.1f} s, {left_s:.0f} s before the first is due")
    time.sleep(max(0.0, left_s - 1))


def unload(connection: Connection, admin: Admin, count: int) -> float:
    """Unload the business topic; return the seconds until its index is complete again."""
    name, began = TopicName.parse(TOPIC), time.monotonic()
    admin.unload(name)
    wait(lambda: delay_index(connection, name)[1] >= count, 300, give_up=True)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
