"""``delaylevel send``: a message, or a file of JSON lines with one message each."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TextIO

import click

from delaylevel.cluster.connection import Connection
from delaylevel.errors import InvalidInputError
from delaylevel.model.clock import SystemClock
from delaylevel.model.outcome import Receipt
from delaylevel.model.topic_name import TopicName

from . import options
from .command import examples, pass_connection, settings_of
from .delivery import note_undelivered, note_unsubscribed
from .json_lines import Outgoing, parse_line
from .output import Column, emit_one, note, progress
from .values import DURATION, TIME

_COLUMNS = (
    Column("topic", "topic"),
    Column("sent", "number"),
    Column("failed", "number"),
    Column("message_id"),
    Column("due_ms", "time"),
)
_PATIENCE_S = 10.0


@examples(
    "delaylevel send orders 'pay me' --after 3d",
    "delaylevel send orders 'call back' --after 3d --expires-after 2h",
    "delaylevel send orders --at 2030-01-31T12:00:00Z --key customer-7 < body.bin",
    "delaylevel send orders --jsonl reminders.jsonl",
    "delaylevel send orders --jsonl reminders.jsonl --spread 10m",
    'echo \'{"body": "hi", "after": "2h", "key": "k"}\' | delaylevel send orders --jsonl -',
)
@click.command()
@click.argument("topic")
@click.argument("body", required=False)
@click.option("--after", "deliver_after", type=DURATION, help="Delay before delivery: 90s, 2h, 3d.")
@options.at("deliver_at")
@click.option("--expires-at", type=TIME, help="Expiry: no release from then on.")
@click.option("--expires-after", type=DURATION, help="Time from due time to expiry.")
@click.option("--key", "partition_key", metavar="KEY", help="Partition key.")
@click.option("--ordering-key", metavar="KEY", help="Ordering key, for Key_Shared subscriptions.")
@options.pairs("--property", "properties", help="Property of the message. Repeatable.")
@click.option("--event-time", "event_timestamp", type=TIME, help="Event time of the application.")
@click.option("--id", "message_id", metavar="ID", help="Stable ID (delaylevel.id) of the message.")
@click.option(
    "--spread",
    type=DURATION,
    help="Time over which the messages are spread, e.g. 10m; 0s for none.",
)
@options.level_topic
@options.level_namespace
@click.option(
    "--jsonl", type=click.File("r"), metavar="FILE", help="File of JSON lines; - for stdin."
)
@options.output
@pass_connection
def send(
    connection: Connection,
    topic: str,
    body: str | None,
    level_topic: str | None,
    level_namespace: str | None,
    spread: timedelta | None,
    jsonl: TextIO | None,
    output: str,
    **arguments: Any,
) -> None:
    """Send BODY (or stdin) to TOPIC, at once or delayed.

    A long delay goes through the level topic. With --jsonl, each line is an object: body (text or
    null) or base64; key, ordering_key, properties, event_time; at or after; expires_at or
    expires_after; id; target, if it is not TOPIC. Or it is a line of `pending export --payload`:
    its message keeps ID, target and due time. A wrong line ends the command with exit code 2 and
    the line's number; the lines before it are sent.

    With -o json, the result of a delayed message has its receipt, with which it can be cancelled,
    if the level topic allows that.

    --spread adds a random time of at most that length to the due time of each delayed message, so
    that they are not all due at once.
    """
    now_ms = SystemClock().now_ms()
    if jsonl is not None:
        # All other options describe one message.
        if body is not None or any(value not in (None, {}) for value in arguments.values()):
            raise click.UsageError(
                "with --jsonl, each line has its own body, keys, properties, times and ID: "
                "give none of them here"
            )
        messages: Iterable[Outgoing] = _lines(jsonl, now_ms)
        length = _count(jsonl)
    else:
        if arguments["deliver_after"] is not None and arguments["deliver_at"] is not None:
            raise click.UsageError("give --after or --at, not both")
        if arguments["expires_after"] is not None and arguments["expires_at"] is not None:
            raise click.UsageError("give --expires-after or --expires-at, not both")
        content = body.encode() if body is not None else sys.stdin.buffer.read()
        messages = [Outgoing(content, {**arguments, "properties": arguments["properties"] or None})]
        length = 1
    place = {"delay_level_topic": level_topic, "delay_level_namespace": level_namespace}
    result = _deliver(connection, topic, place, messages, length, spread)
    emit_one(result, _COLUMNS, output)
    if result["failed"]:
        click.get_current_context().exit(1)


def _deliver(
    connection: Connection,
    topic: str,
    place: dict[str, str | None],
    messages: Iterable[Outgoing],
    length: int | None,
    spread: timedelta | None,
) -> dict[str, Any]:
    """Send messages, wait for every confirmation, and return the result as one row.

    Raises:
        InvalidInputError: a message cannot be sent; the messages before it are sent.
    """
    from delaylevel.producer.client import DelayLevelClient

    logger = settings_of(click.get_current_context()).client_logger()
    client = DelayLevelClient.from_connection(connection, logger=logger)
    outcomes: Counter[str] = Counter()
    last: dict[str, Any] = {}
    lock = threading.Lock()

    def confirmed(result: Any, message_id: Any) -> None:
        with lock:
            outcomes[str(result).rpartition(".")[2]] += 1
            last["message_id"] = str(message_id)

    due_ms: int | None = None
    attempted = 0
    delayed = False
    receipt: Receipt | None = None
    own = TopicName.parse(topic).full
    with contextlib.ExitStack() as stack:
        stack.callback(client.close)
        producers: dict[str, Any] = {}

        def producer_for(target: str) -> Any:
            found = producers.get(target)
            if found is None:
                found = client.create_producer(
                    target,
                    enable_delay_level_topic=True,
                    **place,
                    create_level_topic=False,
                    block_if_queue_full=True,
                    batching_enabled=True,
                )
                producers[target] = stack.enter_context(found)
                if target == own:
                    # It serves the targets of other lines, too.
                    place.update(
                        delay_level_topic=found.description.topic, delay_level_namespace=None
                    )
            return found

        def flush() -> None:
            _flush(producers.values(), lambda: outcomes.total() == attempted)

        producer = producer_for(own)
        bar = stack.enter_context(progress(f"Sending to {topic}", length))
        try:
            for message in messages:
                message.fix_due(SystemClock().now_ms())
                due_ms = message.arguments["deliver_at"]
                if due_ms is not None:
                    delayed = True
                    message.arguments["spread"] = spread
                try:
                    if message.target is not None:
                        producer = producer_for(TopicName.parse(message.target).full)
                    else:
                        producer = producers[own]
                    if (
                        due_ms is not None
                        and message.line is None
                        and producer.description.cancellable
                    ):
                        receipt = producer.schedule(message.body, **message.arguments)
                        confirmed("Ok", _message_id(receipt))
                    else:
                        producer.send_async(message.body, confirmed, **message.arguments)
                except InvalidInputError as error:
                    raise _on_line(message.line, error) from error
                attempted += 1
                bar.update(1)
        except InvalidInputError as error:
            flush()
            if length == 1 and not attempted:
                raise
            raise InvalidInputError(
                f"{error} ({outcomes['Ok']} messages before it were sent)"
            ) from error
        flush()
        if delayed and client.admin is not None:
            note_undelivered(client.admin, producers[own].description, topic)
            for target in producers:
                note_unsubscribed(client.admin, TopicName.parse(target))
    if spread is not None and due_ms is not None:
        due_ms = None if receipt is None else receipt.due_ms
    refused = {name: count for name, count in outcomes.items() if name != "Ok"}
    for name, count in refused.items():
        note(f"{count} messages not stored: the Pulsar client reports {name}")
    return {
        "topic": topic,
        "sent": outcomes["Ok"],
        "failed": sum(refused.values()),
        "message_id": last.get("message_id") if attempted == 1 else None,
        "due_ms": due_ms if attempted == 1 else None,
        "receipt": None if receipt is None else str(receipt),
    }


def _message_id(receipt: Receipt) -> str:
    """Return the position of a receipt as the client writes it."""
    if receipt.place is None:
        return ""
    topic, at = receipt.place
    partition = TopicName.parse(topic).partition_index if receipt.sent_directly else None
    return f"({at.ledger},{at.entry},{-1 if partition is None else partition},{at.batch})"


def _flush(producers: Iterable[Any], answered: Callable[[], bool]) -> None:
    """Flush producers and wait for the last callbacks, which may run shortly after a flush."""
    for producer in producers:
        producer.flush()
    deadline = time.monotonic() + _PATIENCE_S
    while not answered() and time.monotonic() < deadline:
        time.sleep(0.001)


def _lines(source: TextIO, now_ms: int) -> Iterator[Outgoing]:
    for number, text in enumerate(source, 1):
        if text.strip():
            try:
                message = parse_line(text.strip(), now_ms)
            except InvalidInputError as error:
                raise _on_line(number, error) from error
            message.line = number
            yield message


def _on_line(number: int | None, error: InvalidInputError) -> InvalidInputError:
    return error if number is None else InvalidInputError(f"line {number}: {error}")


def _count(source: TextIO) -> int | None:
    """Return the number of lines of a file, or None for a pipe."""
    if not source.seekable():
        return None
    count = sum(1 for line in source if line.strip())
    source.seek(0)
    return count
