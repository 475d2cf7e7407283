"""``delaylevel send``: a message, or a file of JSON lines with one message each."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import click

from delaylevel.cluster.connection import Connection
from delaylevel.errors import InvalidInputError
from delaylevel.model.clock import SystemClock, duration_ms
from delaylevel.model.features import CANCEL
from delaylevel.model.formatting import parse_duration
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.outcome import Receipt
from delaylevel.model.topic_name import TopicName

from . import options
from .command import examples, pass_connection, settings_of
from .delivery import note_undelivered, note_unsubscribed
from .output import Column, emit_one, note, progress
from .values import DURATION, TIME, parse_time_ms

_COLUMNS = (
    Column("topic"),
    Column("sent", "number"),
    Column("failed", "number"),
    Column("message_id"),
    Column("due_ms", "time"),
)
_PATIENCE_S = 10.0
_LINE_KEYS = frozenset(
    (
        *("body", "base64", "key", "ordering_key", "properties", "event_time", "id"),
        *("at", "after", "expires_at", "expires_after"),
    )
)


@dataclass
class Outgoing:
    """A message as given on the command line or in a JSON line.

    Attributes:
        body: the payload; None for a null value.
        arguments: further arguments of ``DelayLevelProducer.send``, by name.
        line: the number of its JSON line; None for a message of the command line.
    """

    body: bytes | None
    arguments: dict[str, Any]
    line: int | None = None

    def fix_due(self, now_ms: int) -> None:
        """Replace a delay by a due time, so that the result shows the due time that is sent."""
        after = self.arguments["deliver_after"]
        if after and self.arguments["deliver_at"] is None:
            self.arguments |= {"deliver_at": now_ms + duration_ms(after), "deliver_after": None}


def parse_line(text: str, now_ms: int) -> Outgoing:
    """Parse a JSON line.

    Args:
        text: an object with ``body`` (text, or null for a null value) or ``base64``. Optional keys
            are ``key``, ``ordering_key``, ``properties``, ``event_time``, ``at`` or ``after``,
            ``expires_at`` or ``expires_after``, and ``id``. Times are ISO-8601, epoch ms or
            ``+2h``; ``after`` and ``expires_after`` are durations (``3d``).
        now_ms: the present, in ms since the epoch; ``+2h`` is relative to it.

    Raises:
        InvalidInputError: the line is wrong; the text says why.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidInputError(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidInputError("it is not a JSON object")
    unknown = sorted(set(value) - _LINE_KEYS)
    if unknown:
        raise InvalidInputError(f"unknown key {unknown[0]!r}: use {sorted(_LINE_KEYS)}")
    if ("body" in value) == ("base64" in value):
        raise InvalidInputError("give either body (text or null) or base64")
    body = _text(value, "body")
    content = body.encode() if body is not None else None
    if "base64" in value:
        try:
            content = base64.b64decode(_text(value, "base64") or "", validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidInputError(f"base64: {error}") from None
    properties = value.get("properties") or {}
    if not (isinstance(properties, dict) and all(isinstance(v, str) for v in properties.values())):
        raise InvalidInputError("properties is not an object whose values are all strings")
    after, expires_after = _text(value, "after"), _text(value, "expires_after")
    try:
        arguments = {
            "partition_key": _text(value, "key"),
            "ordering_key": _text(value, "ordering_key"),
            "properties": properties or None,
            "event_timestamp": _time(value, "event_time", now_ms),
            "deliver_at": _time(value, "at", now_ms),
            "deliver_after": parse_duration(after) if after is not None else None,
            "expires_at": _time(value, "expires_at", now_ms),
            "expires_after": parse_duration(expires_after) if expires_after is not None else None,
            "message_id": _text(value, "id"),
        }
    except ValueError as error:
        raise InvalidInputError(str(error)) from None
    return Outgoing(content, arguments)


def _text(value: dict[str, Any], name: str) -> str | None:
    found = value.get(name)
    if found is not None and not isinstance(found, str):
        raise InvalidInputError(f"{name} is {json.dumps(found)}, not a string")
    return found


def _time(value: dict[str, Any], name: str, now_ms: int) -> int | None:
    found = value.get(name)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, (str, int)):
        raise InvalidInputError(f"{name} is {json.dumps(found)}: write ISO-8601, epoch ms or +2h")
    return parse_time_ms(str(found), now_ms)


@examples(
    "delaylevel send orders 'pay me' --after 3d",
    "delaylevel send orders 'call back' --after 3d --expires-after 2h",
    "delaylevel send orders --at 2030-01-31T12:00:00Z --key customer-7 < body.bin",
    "delaylevel send orders --jsonl reminders.jsonl",
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
    jsonl: TextIO | None,
    output: str,
    **arguments: Any,
) -> None:
    """Send BODY (or stdin) to TOPIC, at once or delayed.

    A long delay goes through the level topic. With --jsonl, each line is an object: body (text or
    null) or base64; key, ordering_key, properties, event_time; at or after; expires_at or
    expires_after; id. A wrong line ends the command with exit code 2 and the line's number; the
    lines before it are sent.

    With -o json, the result of a delayed message has its receipt, with which it can be cancelled,
    if the level topic allows that.
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
    result = _deliver(connection, topic, place, messages, length)
    emit_one(result, _COLUMNS, output)
    if result["failed"]:
        click.get_current_context().exit(1)


def _deliver(
    connection: Connection,
    topic: str,
    place: dict[str, str | None],
    messages: Iterable[Outgoing],
    length: int | None,
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
    with (
        contextlib.closing(client),
        client.create_producer(
            topic,
            enable_delay_level_topic=True,
            **place,
            create_level_topic=False,
            block_if_queue_full=True,
            batching_enabled=True,
        ) as producer,
        progress(f"Sending to {topic}", length) as bar,
    ):
        try:
            for message in messages:
                message.fix_due(SystemClock().now_ms())
                due_ms = message.arguments["deliver_at"]
                delayed = delayed or due_ms is not None
                try:
                    if due_ms is not None and message.line is None and _cancellable(producer):
                        receipt = producer.schedule(message.body, **message.arguments)
                        confirmed("Ok", _message_id(receipt))
                    else:
                        producer.send_async(message.body, confirmed, **message.arguments)
                except InvalidInputError as error:
                    raise _on_line(message.line, error) from error
                attempted += 1
                bar.update(1)
        except InvalidInputError as error:
            _flush(producer, lambda: outcomes.total() == attempted)
            if length == 1 and not attempted:
                raise
            raise InvalidInputError(
                f"{error} ({outcomes['Ok']} messages before it were sent)"
            ) from error
        _flush(producer, lambda: outcomes.total() == attempted)
        if delayed and client.admin is not None:
            note_undelivered(client.admin, producer.description, topic)
            note_unsubscribed(client.admin, TopicName.parse(topic))
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


def _cancellable(producer: Any) -> bool:
    """Return True if the messages of a producer can be cancelled, so that a receipt is of use."""
    described = producer.description
    return CANCEL in described.features and described.final_window is FinalWindow.TRACKER


def _message_id(receipt: Receipt) -> str:
    """Return the position of a receipt as the client writes it."""
    if receipt.place is None:
        return ""
    topic, at = receipt.place
    partition = TopicName.parse(topic).partition_index if receipt.sent_directly else None
    return f"({at.ledger},{at.entry},{-1 if partition is None else partition},{at.batch})"


def _flush(producer: Any, answered: Callable[[], bool]) -> None:
    """Flush the producer and wait for the last callbacks, which may run shortly after its flush."""
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
