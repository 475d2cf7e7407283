"""Every command that shows something, with the width of a terminal, on a real broker."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

import pytest
from click.testing import Result, _NamedTextIOWrapper

from delaylevel import PartitionStrategy
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.strategy import Levels
from support.world import RealWorld

pytest.importorskip("duckdb")

LONG_NAME = "payments-of-a-team-whose-name-is-rather-long-in-europe-west"
LEVELS = Levels(
    [
        PartitionStrategy(maximum_delay=timedelta(days=5)),
        PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(days=1)),
    ]
)
#: Commands for a topic, and a text that each shows.
COMMANDS = {
    "levels list NAMESPACE": "PROBLEMS",
    "levels describe TOPIC": "DEAD LETTERS",
    "doctor TOPIC": "--all shows them",
    "doctor TOPIC --all": "ack holes",
    "pending list TOPIC --limit 20": "WAITS IN",
    "pending list TOPIC --limit 5 --payload": "PAYLOAD",
    "pending average TOPIC amount": "COUNTED",
    "pending outcome TOPIC": "",
    "horizon TOPIC": "DUE FROM (UTC)",
    "horizon TOPIC --exact": "DUE WITHIN",
    "dlq list TOPIC": "REASON",
    "plan --rate 50 --max-delay 7d --size 300": "PARTITIONS",
}


@pytest.mark.parametrize("name", ["orders", LONG_NAME])
def test_every_command_fits_the_terminal(
    name: str, world: RealWorld, invoke: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    description = world.level_topic(LEVELS, (name,), final_window=FinalWindow.TRACKER)
    (topic,) = description.targets
    producer = world.client().create_producer(topic, enable_delay_level_topic=True)
    for number in range(100):
        producer.send_async(
            b'{"amount": %d}' % number,
            None,
            deliver_after=timedelta(minutes=5 + number**2 % 6900),
            partition_key=f"customer-{number % 7}",
            properties={"kind": "reminder", "amount": str(number)},
        )
    producer.send(b"overdue soon", deliver_after=timedelta(milliseconds=1))
    producer.cancel(producer.schedule(b"renew", deliver_after=timedelta(days=2)))
    for aside in (description.held_topic, description.dead_letter_topic):
        set_aside = world.plain_client.create_producer(aside.full)
        for reason in ("the target refused", "not a parked message: " + "it has no target " * 6):
            due = {"delaylevel.due": str(world.clock.now_ms()), "delaylevel.target": topic}
            set_aside.send(b"pay me", {**due, "delaylevel.reason": reason}, "customer-7")

    monkeypatch.setattr(_NamedTextIOWrapper, "isatty", lambda _: True, raising=False)
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        for line, shown in COMMANDS.items():
            words = line.replace("TOPIC", topic).replace("NAMESPACE", world.namespace).split()
            text = re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", invoke(*words).stdout)
            assert shown in text
            # Only a name or a command that is longer than a row continues in the next.
            rows = [row for row in text.splitlines() if "`" not in row and LONG_NAME not in row]
            assert [row for row in rows if len(row) > columns] == [], line
            assert not re.search(r"persistent://|\.\d{3}Z", text), "names and times are short"
