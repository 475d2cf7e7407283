"""Level topics and messages in all their forms, written by the code of commit 9205e8a.

This file runs with that code only: its modules have the names of that time. They are imported by
name, because today's package does not have them.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import urllib3
from pulsar.schema import AvroSchema, Integer, JsonSchema, Record, String, StringSchema

NAMESPACE = "public/earlier-version"
DAY, HOUR, MINUTE = timedelta(days=1), timedelta(hours=1), timedelta(minutes=1)


class Order(Record):
    """The schema of structured payloads; tests declare the same."""

    number = Integer()
    text = String()


class AheadClock:
    """A clock that is ahead of the machine's by a time."""

    def __init__(self, ahead: timedelta = timedelta(0)) -> None:
        self._ahead_ms = round(ahead.total_seconds() * 1000)

    def now_ms(self) -> int:
        """Return the time, in ms since the epoch."""
        return time.time_ns() // 1_000_000 + self._ahead_ms


class Scenario:
    """The earlier version at work on a broker."""

    def __init__(self, service_url: str, admin_url: str) -> None:
        self.description = import_module("delaylevel.description")
        self.strategy = import_module("delaylevel.strategy")
        self.topics = import_module("delaylevel.topics")
        self.lifecycle = import_module("delaylevel.lifecycle")
        self.dispatcher = import_module("delaylevel.dispatcher")
        self.local = import_module("delaylevel.mover")
        self.delivery = import_module("delaylevel.delivery").Delivery
        self.reading = import_module("delaylevel.reading")
        self.release_state = import_module("delaylevel.releaselog").ReleaseState
        self.name = import_module("delaylevel.topicname").TopicName.parse
        self.admin = import_module("delaylevel.admin").Admin(admin_url)
        self.client = import_module("delaylevel").DelayLevelClient(service_url, admin_url=admin_url)
        self._rest = f"{admin_url}/admin/v2"
        self._rest_call("PUT", f"namespaces/{NAMESPACE}")
        self._rest_call("POST", f"namespaces/{NAMESPACE}/deduplication", json=True)

    def _rest_call(self, method: str, path: str, **body: Any) -> None:
        answer = urllib3.request(method, f"{self._rest}/{path}", **body)
        assert answer.status == 204, (path, answer.status, answer.data)

    @staticmethod
    def topic(name: str) -> str:
        """Return the full name of a topic."""
        return f"persistent://{NAMESPACE}/{name}"

    def producer(self, topic: str, level_topic: Any, **options: Any) -> Any:
        """Return a producer of the wrapper."""
        return self.client.create_producer(
            self.topic(topic),
            enable_delay_level_topic=True,
            delay_level_topic=level_topic.topic,
            **options,
        )

    def level_topic(self, topic: str, targets: list[str], *levels: Any, **values: Any) -> Any:
        """Create a level topic."""
        return self.topics.create(
            self.admin,
            self.description.LevelTopicDescription(
                self.topic(topic),
                self.strategy.Levels(list(levels)),
                tuple(map(self.topic, targets)),
                **values,
            ),
        )

    def move(self, level_topic: Any, ahead: timedelta) -> None:
        """Run the mover with a clock that is ahead."""
        mover = self.local.LocalMover(
            self.client, self.admin, self.topics.find(self.admin, level_topic.topic),
            AheadClock(ahead),
        )  # fmt: skip
        mover.run_once()
        mover.close()

    def dispatch(self, level_topic: Any, ahead: timedelta, delivery: Any) -> None:
        """Run the dispatcher, with a clock that is ahead, until the window is acknowledged."""
        with tempfile.TemporaryDirectory() as folder:
            settings = self.dispatcher.DispatchSettings(
                Path(folder), delivery=delivery, checkpoint_ms=100
            )
            service = self.dispatcher.Dispatcher(
                self.client, self.admin, [level_topic.topic], settings, AheadClock(ahead)
            )
            thread = threading.Thread(target=service.run)
            thread.start()
            wait(lambda: not self.backlog(level_topic.window_topic))
            service.stop()
            thread.join()

    def backlog(self, topic: Any) -> int:
        """Return the number of unacknowledged entries of a topic."""
        stats = self.admin.partitioned_stats(topic).values()
        return sum(each.subscriptions["delaylevel"].backlog_entries for each in stats)

    def record(self, level_topic: Any) -> dict[str, Any]:
        """Return the stored form of a level topic: its topics, properties and pending messages."""
        role = self.description.Role
        members = []
        for member in self.topics.find(self.admin, level_topic.topic).members():
            metadata = self.admin.partitioned_metadata(member.topic)
            whole = member.role is role.LOG
            partitions = [
                self._messages(member.topic.partition(index), whole)
                for index in range(member.partitions)
            ]
            members.append(
                {
                    "topic": member.topic.full,
                    "role": member.role.value,
                    "partitions": member.partitions,
                    "properties": dict(sorted(metadata.properties.items())),
                    "messages": partitions,
                    **({"states": [self._state(found) for found in partitions]} if whole else {}),
                }
            )
        return {"level_topic": level_topic.topic, "members": members}

    def _messages(self, partition: Any, whole: bool) -> list[dict[str, Any]]:
        last = self.admin.last_message_id(partition)
        if last is None or last.entry < 0:
            return []
        first = type(last)(0, 0)
        done = None if whole else self.admin.mark_delete_position(partition, "delaylevel")
        return [
            {
                "position": [message.ledger, message.entry, message.batch],
                "key": message.key,
                "ordering_key": message.ordering_key,
                "event_ms": message.event_ms,
                "properties": message.properties,
                "value": encoded(message.value),
            }
            for message in self.reading.read_range(
                self.client, partition.full, first, last.next_entry
            )
            if done is None or (message.ledger, message.entry) > (done.ledger, done.entry)
        ]

    def _state(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the state that the earlier version reads from its own records."""
        stored = [base64.b64decode(each["value"]) for each in records]
        state = self.release_state.read(stored)
        prefixes = [stored[:count] for count in range(1, len(stored) + 1)]
        return {
            "open_intents_after_each": [
                sorted(self.release_state.read(prefix).unfinished) for prefix in prefixes
            ],
            "low_watermark": state.mark,
            "released": sorted(state.released),
            "next_number": state.next_number,
            "sequences": state.sequences,
            "id_keys": sorted(state.memory.keys()),
        }


def encoded(value: bytes | None) -> str | None:
    """Return a payload as text."""
    return None if value is None else base64.b64encode(value).decode()


def wait(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def send_all_forms(producer: Any, prefix: str, **due: Any) -> None:
    """Send messages of every form, due at the same time."""
    send = producer.send
    send(f"{prefix} plain".encode(), **due)
    send(f"{prefix} key".encode(), partition_key="größe", ordering_key="o", **due)
    send(f"{prefix} more".encode(), properties={"color": "rot", "": "x"}, event_timestamp=7, **due)
    send(b"", properties={"form": f"{prefix} empty"}, **due)
    send(None, properties={"form": f"{prefix} null"}, partition_key="k", **due)
    send(f"{prefix} own id".encode(), message_id=f"order 7 / é / {prefix}", **due)
    for number in range(6):
        producer.send_async(f"{prefix} batch {number}".encode(), None, **due)
    producer.flush()


def run(at: Scenario) -> list[dict[str, Any]]:
    """Run the earlier version, and return what it stored."""
    levels = at.strategy.PartitionStrategy
    window, mover = at.description.FinalWindow, at.description.Mover
    missing = at.description.MissingTarget

    # The default: days, then hours, then a dispatcher. A second target is added later.
    orders = at.level_topic(
        "orders-delay-level", ["orders"], levels(),
        levels(partition_by="HOUR", maximum_delay=DAY),
    )  # fmt: skip
    orders = at.level_topic(
        "orders-delay-level", ["orders", "json", "avro", "text"], levels(),
        levels(partition_by="HOUR", maximum_delay=DAY),
    )  # fmt: skip
    producers = {
        "orders": at.producer("orders", orders),
        "json": at.producer("json", orders, schema=JsonSchema(Order)),
        "avro": at.producer("avro", orders, schema=AvroSchema(Order)),
        "text": at.producer("text", orders, schema=StringSchema()),
    }

    def send(prefix: str, **due: Any) -> None:
        send_all_forms(producers["orders"], prefix, **due)
        for name in ("json", "avro"):
            producers[name].send(Order(number=7, text=prefix), **due)
        producers["text"].send(f"{prefix} text", **due)

    send("released", deliver_after=30 * MINUTE)
    send("moved and released", deliver_after=90 * MINUTE)
    at.move(orders, 60 * MINUTE)
    for _ in range(2):
        at.dispatch(orders, 3 * HOUR, at.delivery.EFFECTIVELY_ONCE)
        send("released later", deliver_after=20 * MINUTE)
    at.dispatch(orders, 3 * HOUR, at.delivery.AT_LEAST_ONCE)
    garbage = at.client.create_producer(orders.level_topic(0).partition(0).full)
    garbage.send(b"garbage", properties={"delaylevel.due": "soon", "mine": "1"})
    producers["orders"].send(b"moved between levels", deliver_after=30 * HOUR)
    at.move(orders, 25 * HOUR)
    send("moved to the window", deliver_after=90 * MINUTE)
    at.move(orders, 60 * MINUTE)
    send("in the window", deliver_after=40 * MINUTE)
    send("in hours", deliver_after=3 * HOUR)
    send("in days", deliver_after=5 * DAY + HOUR)

    # The broker's own window; one target is missing, so its messages are held.
    bills = at.level_topic(
        "bills-delay-level", ["bills", "gone"], levels(lead=HOUR, overflow="recirculate"),
        final_window=window.BROKER, hold_pause_ms=1000,
    )  # fmt: skip
    at.client.create_producer(at.topic("gone")).close()
    for target in ("gone", "bills"):
        made = at.producer(target, bills)
        send_all_forms(made, f"{target} in days", deliver_after=100 * DAY)
        if target == "gone":
            made.send(b"held", deliver_after=30 * HOUR)
            made.close()
            at.admin.delete(at.name(at.topic("gone")), force=True)
    at.move(bills, 29 * HOUR + 30 * MINUTE)

    # Messages that the broker keeps until their hand-off, in a level topic that was expanded.
    ticks = at.level_topic(
        "ticks-delay-level", ["ticks"], levels(partition_by=HOUR, maximum_delay=4 * HOUR),
        mover=mover.FUNCTION, window_partitions=2, on_missing_target=missing.DROP,
    )  # fmt: skip
    longer = at.lifecycle.longer_levels(ticks.levels, 6 * HOUR)
    ticks = at.lifecycle.expand(at.admin, ticks.topic, longer)
    ticking = at.producer("ticks", ticks)
    send_all_forms(ticking, "ticks in hours", deliver_after=5 * HOUR + 30 * MINUTE)
    return [at.record(each) for each in (orders, bills, ticks)]


def main() -> None:
    """Run the scenario; the arguments are those of the calling process."""
    code, commit, service_url, admin_url, output = sys.argv[1:]
    found = import_module("delaylevel").__file__ or ""
    assert Path(found).is_relative_to(code), found
    at = Scenario(service_url, admin_url)
    try:
        stored = {"commit": commit, "namespace": NAMESPACE, "level_topics": run(at)}
    finally:
        at.client.close()
    text = json.dumps(stored, indent=1, sort_keys=True, ensure_ascii=False)
    Path(output).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
