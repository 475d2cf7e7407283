"""Every command that shows something, in terminals of 80 and of 120 columns, on a real broker."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from delaylevel.broker.embedded import EmbeddedBroker

pytest.importorskip("pyte")
import contextlib
from datetime import timedelta

import pulsar

from delaylevel import DelayLevelClient, PartitionStrategy
from delaylevel.cluster import logs
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels
from delaylevel.topics import registry as topics
from support.terminal import Terminal

LONG_NAME = "payments-of-a-team-whose-name-is-rather-long-in-europe-west"
LEVELS = Levels(
    [
        PartitionStrategy(partition_by=timedelta(days=1), maximum_delay=timedelta(days=5)),
        PartitionStrategy(
            partition_by=timedelta(hours=1),
            maximum_delay=timedelta(hours=24),
            lead=timedelta(minutes=5),
        ),
    ]
)


def fill(connection: Connection, messages: int = 400) -> None:
    """Create level topics with messages that wait, are overdue, held, dead, or cancelled."""
    full = [f"persistent://public/default/{name}" for name in ("orders", "invoices", LONG_NAME)]
    with (
        Admin.from_connection(connection) as admin,
        contextlib.closing(_client(connection)) as client,
        DelayLevelClient.from_connection(connection, logger=logs.silent()) as ours,
    ):
        for name in full:
            client.subscribe(name, "app").close()
        wanted = LevelTopicDescription(
            topic=topics.default_name(admin, full[0]),
            levels=LEVELS,
            targets=tuple(full[:2]),
        )
        topics.create(admin, wanted)
        topics.create(
            admin,
            LevelTopicDescription(
                topic=topics.default_name(admin, full[2]), levels=LEVELS, targets=(full[2],)
            ),
        )
        for name, share in ((full[0], 1.0), (full[2], 0.1)):
            producer = ours.create_producer(name, enable_delay_level_topic=True)
            for number in range(int(messages * share)):
                producer.send(
                    b'{"amount": %d}' % number,
                    # Most are due soon, and a few in days.
                    deliver_after=timedelta(minutes=5 + number**2 % 6900),
                    partition_key=f"customer-{number % 7}",
                    properties={"kind": "reminder", "amount": str(number)},
                )
        producer = ours.create_producer(full[0], enable_delay_level_topic=True)
        for _ in range(5):
            producer.send(b"overdue soon", deliver_after=timedelta(seconds=1))
        producer.cancel(producer.schedule(b"renew", deliver_after=timedelta(days=2)))
        _put(client, "_orders-delay-level-held", 3, {"delaylevel.reason": "the target refused"})
        reasons = ("delaylevel.due is missing", "not a parked message: " + "it has no target " * 6)
        for reason in reasons:
            _put(client, "_orders-delay-level-DLQ", 1, {"delaylevel.reason": reason})


def _client(connection: Connection) -> pulsar.Client:
    return connection.open_client(logger=logs.silent())


def _put(client: pulsar.Client, topic: str, messages: int, properties: dict[str, str]) -> None:
    """Store messages as a mover or dispatcher stores what it sets aside."""
    now_ms = SystemClock().now_ms()
    producer = client.create_producer(topic, batching_enabled=False)
    for number in range(messages):
        due = {"delaylevel.due": str(now_ms - 60_000 * number)}
        target = {"delaylevel.target": "persistent://public/default/orders"}
        producer.send(b"pay me", {**due, **target, **properties}, partition_key="customer-7")
    producer.close()


#: Arguments of the program, and a text that its screen has.
COMMANDS = (
    ("levels list", "PROBLEMS"),
    ("levels describe orders", "DEAD LETTERS    2"),
    (f"levels describe {LONG_NAME}", "OLDEST HAND OFF"),
    ("doctor", "--all shows them"),
    ("doctor orders --all", "ack holes"),
    ("pending orders --limit 20", "WAITS IN"),
    ("pending orders --limit 5 --payload", "PAYLOAD"),
    (f"pending {LONG_NAME} --limit 5", "customer-"),
    ("pending average orders amount", "COUNTED"),
    ("pending outcome orders", ""),
    ("horizon orders", "DUE FROM (UTC)"),
    ("horizon orders --exact", "DUE WITHIN"),
    ("dlq list orders", "REASON"),
    ("broker status", ""),
    ("plan --rate 50 --max-delay 7d --size 300", "PARTITIONS"),
    ("run --help", "Examples:"),
    ("plan --help", "Examples:"),
    ("mover run --help", "Examples:"),
)
#: Seconds until a process shows something, also on a busy machine.
PATIENCE_S = 120


@pytest.fixture(scope="module")
def environment(broker_with: Callable[..., EmbeddedBroker]) -> dict[str, str]:
    """The variables that name a broker with messages in every state."""
    # A setting of its own, so that no other test has this broker.
    connection = broker_with({"topicFencingTimeoutSeconds": 7}).connection
    fill(connection, 300)
    return {
        "DELAYLEVEL_SERVICE_URL": connection.service_url,
        "DELAYLEVEL_ADMIN_URL": connection.admin_url,
        "DELAYLEVEL_OPERATION_TIMEOUT_SECONDS": "60",
    }


@pytest.fixture
def terminal(environment: dict[str, str]) -> Iterator[Callable[..., Any]]:
    """``terminal("levels list", columns, lines)``: the program in a terminal."""
    opened: list[Any] = []

    def run(line: str, columns: int, lines: int, **variables: str) -> Any:
        command = [sys.executable, "-m", "delaylevel.cli.main", *line.split()]
        opened.append(Terminal(command, columns, lines, {**environment, **variables}))
        return opened[-1].__enter__()

    yield run
    for each in opened:
        each.__exit__(None, None, None)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(("line", "shown"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_a_command_fits_the_terminal(
    terminal: Callable[..., Any], line: str, shown: str, columns: int
) -> None:
    screen = terminal(line, columns, 150)
    code = screen.wait(PATIENCE_S)
    text = "\n".join(screen.rows)
    assert "Traceback" not in text
    assert code == (1 if line.startswith("doctor") else 0), text
    assert shown in text
    # Only a name or a command that is longer than a row continues in the next: it can be copied.
    too_long = [row for row in screen.continued if "`" not in row and LONG_NAME not in row]
    assert too_long == []
    assert not re.search(r"persistent://|\.\d{3}Z", text), "names and times are short"


def test_a_service_writes_its_log_above_its_state(terminal: Callable[..., Any]) -> None:
    screen = terminal("-v run orders", 100, 60)

    def is_whole(rows: Sequence[str]) -> bool:
        states = [number for number, row in enumerate(rows) if row.startswith("orders: ")]
        logged = [number for number, row in enumerate(rows) if "INFO" in row]
        return bool(logged) and states == [len(rows) - 1] and "pending" in rows[-1]

    screen.wait_for(is_whole, PATIENCE_S)


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_mark_what_is_wrong(
    terminal: Callable[..., Any], variables: dict[str, str], coloured: bool
) -> None:
    screen = terminal("doctor orders", 80, 100, **variables)
    screen.wait(PATIENCE_S)
    assert screen.rows[0].startswith("FAIL")
    found = {cell.fg for row in screen.screen.buffer.values() for cell in row.values()}
    assert found == ({"default", "red"} if coloured else {"default"})
