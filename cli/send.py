"""``delaylevel send``: a message, or a file of JSON lines with one message each."""

from __future__ import annotations

import base64
import contextlib
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import click

from delaylevel import changes
from delaylevel.cli.views.levels import note_undelivered, note_unsubscribed
from delaylevel.cli.views.output import emit, emit_one, note, progress
from delaylevel.cli.views.tables import Column
from delaylevel.cluster.failures import close_quietly, is_ok
from delaylevel.cluster.schemas import find
from delaylevel.errors import InvalidInputError
from delaylevel.model.clock import SystemClock, duration_ms
from delaylevel.model.envelope import EXPIRES, SCHEMA, UNREADABLE, SchemaRef
from delaylevel.model.outcome import Receipt
from delaylevel.model.topic_name import TopicName
from delaylevel.producer.client import DelayLevelClient
from delaylevel.producer.client_calls import error_of

from . import options
from .options import DURATION, TIME, Settings, examples, pass_settings

_COLUMNS = (
    Column("line", "number"),
    Column("outcome"),
    Column("id", "id"),
    Column("due_ms", "time"),
    Column("message_id", rank=1),
    Column("reason", rank=2),
)
_PATIENCE_S = 10.0
# Keys of a line of `pending list` that describe the present place of the message.
_EXPORTED_KEYS = frozenset(
    (
        *("due_ms", "event_ms", "publish_ms", "delay_ms", "size", "place", "role", "level"),
        *("partition", "topic", "position", "value_base64"),
    )
)


@examples(
    "delaylevel send orders 'pay me' --after 3d",
    "delaylevel send orders 'call back' --after 3d --expires-after 2h",
    "delaylevel send orders --at 2030-01-31T12:00:00Z --key k7 < body.bin",
    "delaylevel send orders --jsonl reminders.jsonl",
    'echo \'{"body": "hi", "after": "2h"}\' | delaylevel send orders --jsonl -',
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
@click.option(
    "--id",
    "message_id",
    metavar="ID",
    help="ID (delaylevel.id) of the message. It identifies the message together with its topic and "
    "key: of several messages with the same three, the dispatcher delivers one.",
)
@options.level_topic
@options.level_namespace
@click.option(
    "--jsonl", type=click.File("rb"), metavar="FILE", help="File of JSON lines; - for stdin."
)
@options.output
@pass_settings
def send(
    settings: Settings,
    topic: str,
    body: str | None,
    level_topic: str | None,
    level_namespace: str | None,
    jsonl: BinaryIO | None,
    output: str,
    **arguments: Any,
) -> None:
    """Send BODY (or stdin) to TOPIC, at once or delayed.

    A long delay goes through the level topic. With --jsonl, each line is an object: body (text or
    null) or base64; key, ordering_key, properties, event_time; at or after; expires_at or
    expires_after; id; target, if it is not TOPIC. Or it is a line of `pending list --payload`:
    its message keeps everything, its schema included.

    There is a row for each message: `stored`; `failed` with the reason, e.g. for a wrong line; or
    `unconfirmed` if nobody knows. After an interruption, lines without a row were not sent. The
    exit code is 1 unless all of them are stored.

    With -o json, the result of a delayed message has its receipt, with which it can be cancelled;
    not that of a line of --jsonl, and not with the final window broker.
    """
    if jsonl is not None:
        # All other options describe one message.
        if body is not None or any(value not in (None, {}) for value in arguments.values()):
            raise click.UsageError(
                "with --jsonl, each line has its own body, keys, properties, times and ID: "
                "give none of them here"
            )
        messages: Iterable[Outgoing | _Row] = _lines(jsonl)
    else:
        content = body.encode() if body is not None else sys.stdin.buffer.read()
        arguments["properties"] = arguments["properties"] or None
        messages = [Outgoing(content, arguments)]
    place = {"delay_level_topic": level_topic, "delay_level_namespace": level_namespace}
    with contextlib.ExitStack() as stack:
        client = settings.producer_client()
        stack.callback(close_quietly, client, "client")
        sending = _Sending(stack, client, topic, place)
        tell = progress(f"Sending to {topic}")
        try:
            for message in messages:
                if isinstance(message, Outgoing):
                    sending.send(message)
                else:
                    sending.rows.append(message)
                tell(1)
        except KeyboardInterrupt:
            note("Interrupted: lines after the last row are not sent.")
            sending.interrupted = True
        sending.flush()
        done = sum(row["outcome"] == "stored" for row in sending.rows)
        # Nothing that can fail stands between the messages and their rows.
        if jsonl is None:
            (row,) = sending.rows
            emit_one(row, _COLUMNS[1:], output)
            if row["reason"]:
                note(f"The message is {row['outcome']}: {row['reason']}")
        else:
            emit(sending.rows, _COLUMNS, output, empty="There is no line.")
        sending.note_delivery()
    if jsonl is not None and done != len(sending.rows):
        note(f"{done:,} of {len(sending.rows):,} messages are stored.")
    if done != len(sending.rows) or sending.interrupted:
        click.get_current_context().exit(1)


_Row = dict[str, Any]


class _Sending:
    """Messages that are sent through one client, each with a row for its result."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        client: DelayLevelClient,
        topic: str,
        place: dict[str, str | None],
    ) -> None:
        self._stack = stack
        self._client = client
        self._topic = topic
        self._own = TopicName.parse(topic).full
        self.rows: list[_Row] = []
        self.interrupted = False
        self._place = place  # the arguments that name the level topic
        # By target and text of the schema; or the reason for which there is none.
        self._producers: dict[tuple[str, str], Any] = {}
        self._described = self._producer(self._own, None).description
        # It serves the targets of lines, too.
        self._place = {"delay_level_topic": self._described.topic}

    def send(self, message: Outgoing) -> None:
        """Send a message; its row is complete after the next flush."""
        arguments = message.arguments
        after = arguments["deliver_after"]
        if after and arguments["deliver_at"] is None:  # the row shows the due time that is sent
            due_ms = SystemClock().now_ms() + duration_ms(after)
            arguments |= {"deliver_at": due_ms, "deliver_after": None}
        due_ms = arguments["deliver_at"]
        row: _Row = {
            "line": message.line,
            "outcome": "unconfirmed",
            "id": arguments["message_id"],
            "due_ms": due_ms,
            "message_id": None,
            "reason": None,
            "target": message.target or self._own,
            "receipt": None,
        }
        self.rows.append(row)

        def confirmed(result: Any, message_id: Any) -> None:
            if is_ok(result):
                row.update(outcome="stored", message_id=str(message_id))
            else:
                row.update(_failure(error_of(result)))

        try:
            producer = self._producer(row["target"], message.schema)
            # Only a single message waits for its receipt; lines are sent in batches.
            single = due_ms is not None and message.line is None
            if single and producer.description.cancellable:
                receipt = producer.schedule(message.body, **arguments)
                row |= {"outcome": "stored", "id": receipt.id, "due_ms": receipt.due_ms}
                row |= {"message_id": _message_id(receipt), "receipt": str(receipt)}
            else:
                producer.send_async(message.body, confirmed, **arguments)
        except Exception as error:
            failure = _failure(error)
            if message.line is None and failure["outcome"] != "unconfirmed":
                raise
            row.update(failure)

    def flush(self) -> None:
        """Wait for every confirmation."""
        producers = [one for one in self._producers.values() if not isinstance(one, Exception)]
        try:
            for producer in producers:
                producer.flush()
            # The last callbacks may run shortly after a flush.
            deadline = time.monotonic() + _PATIENCE_S
            while not all(map(_is_settled, self.rows)) and time.monotonic() < deadline:
                time.sleep(0.001)
        except Exception as error:
            note(f"Not everything was confirmed: {_failure(error)['reason']}")
        except KeyboardInterrupt:
            self.interrupted = True
        for row in self.rows:
            if not _is_settled(row):
                row["reason"] = "it was not confirmed in time"

    def note_delivery(self) -> None:
        """Print notes about what keeps messages from being delivered."""
        delayed = any(row.get("due_ms") is not None for row in self.rows)
        if delayed and self._client.admin is not None:
            note_undelivered(self._client.admin, self._described, self._topic)
            for target in dict.fromkeys(row["target"] for row in self.rows if "target" in row):
                note_unsubscribed(self._client.admin, TopicName.parse(target))

    def _producer(self, target: str, schema: SchemaRef | None) -> Any:
        key = target, str(schema)
        if key not in self._producers:
            try:
                self._producers[key] = self._open(target, schema)
            except Exception as error:  # the same for all lines
                self._producers[key] = error
        if isinstance(self._producers[key], Exception):
            raise self._producers[key]
        return self._producers[key]

    def _open(self, target: str, schema: SchemaRef | None) -> Any:
        """Return a producer of payloads that are encoded by a schema, or of plain bytes."""
        options: dict[str, Any] = dict(self._place)
        if schema is not None:
            admin = self._client.admin
            options["schema"] = admin and find(admin, TopicName.parse(target), schema)
            if options["schema"] is None:
                raise InvalidInputError(
                    f"the payload is encoded by schema {schema}, which the registry of {target} "
                    "does not have: consumers could not decode it. Register this version of the "
                    "schema for the topic first; the message was not sent"
                )
        return self._stack.enter_context(
            self._client.create_producer(
                target,
                enable_delay_level_topic=True,
                create_level_topic=False,
                block_if_queue_full=True,
                batching_enabled=True,
                **options,
            )
        )


def _failure(error: BaseException) -> _Row:
    found = changes.Failure.of(error)
    return {"outcome": found.outcome, "reason": found.reason}


def _is_settled(row: _Row) -> bool:
    return row["outcome"] != "unconfirmed" or row["reason"] is not None


def _message_id(receipt: Receipt) -> str | None:
    """Return the position of a receipt as the client writes it."""
    if receipt.place is None:
        return None
    topic, at = receipt.place
    partition = TopicName.parse(topic).partition_index if receipt.sent_directly else None
    return f"({at.ledger},{at.entry},{-1 if partition is None else partition},{at.batch})"


def _lines(source: BinaryIO) -> Iterator[Outgoing | _Row]:
    """Yield the message of each line; or the row of a wrong line."""
    for number, line in enumerate(source, 1):
        if line.strip():
            try:
                message = parse_line(line.decode().strip())
            # Of a line that nobody foresaw, too: earlier messages are stored and need their rows.
            except (ValueError, ArithmeticError, RecursionError) as error:
                yield {"line": number, **_failure(error)}
            else:
                message.line = number
                yield message


@dataclass
class Outgoing:
    """A message of the command line, or of a JSON line, which may name another topic."""

    body: bytes | None
    arguments: dict[str, Any]
    line: int | None = None
    target: str | None = None
    schema: SchemaRef | None = None


def parse_line(text: str) -> Outgoing:
    """Parse a JSON line, as the help of ``send`` describes it; a time may be a number."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidInputError(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidInputError("it is not a JSON object")
    exact: dict[str, Any] = {}
    schema = None
    if "due_ms" in value and "position" in value:
        exact = {"event_timestamp": value.get("event_ms"), "deliver_at": value["due_ms"]}
        value, schema = _exported(value)
    known = sorted({"body", "base64", "properties", "target", *_FIELDS})
    unknown = sorted(value.keys() - known)
    if unknown:
        raise InvalidInputError(f"unknown key {unknown[0]!r}: use {known}")
    if ("body" in value) == ("base64" in value):
        raise InvalidInputError("give either body (text or null) or base64")
    body = _read(value, "body")
    content = body.encode() if body is not None else None
    if "base64" in value:
        try:
            content = base64.b64decode(_read(value, "base64") or "", validate=True)
        except ValueError as error:
            raise InvalidInputError(f"base64: {error}") from None
    properties = value.get("properties") or {}
    if not (isinstance(properties, dict) and all(isinstance(v, str) for v in properties.values())):
        raise InvalidInputError("properties is not an object whose values are all strings")
    arguments = {argument: _read(value, name, kind) for name, (argument, kind) in _FIELDS.items()}
    arguments["properties"] = properties or None
    named = _read(value, "target")
    target = None if named is None else TopicName.parse(named).full
    return Outgoing(content, arguments | exact, target=target, schema=schema)


def _exported(row: dict[str, Any]) -> tuple[dict[str, Any], SchemaRef | None]:
    """Return the line for a message that ``pending list`` has written, and its schema."""
    if "value_base64" not in row:
        raise InvalidInputError("it has no payload: list the messages with --payload")
    if row["due_ms"] is None:
        raise InvalidInputError("its due time could not be read: see `delaylevel dlq`")
    line = {key: item for key, item in row.items() if key not in _EXPORTED_KEYS}
    payload = row["value_base64"]
    line |= {"body": None} if payload is None else {"base64": payload}
    properties = row.get("properties")
    if not isinstance(properties, dict):
        return line, None
    if UNREADABLE in properties:
        raise InvalidInputError(f"it would not be sent as it was: {properties[UNREADABLE]}")
    if EXPIRES in properties:
        line["expires_at"] = properties[EXPIRES]
    schema = properties.get(SCHEMA)
    return line, None if schema is None else SchemaRef.parse(str(schema))


#: Keys of a line, each with the argument that it becomes, and its type: that of the option.
_FIELDS: dict[str, tuple[str, Any]] = {
    "key": ("partition_key", click.STRING),
    "ordering_key": ("ordering_key", click.STRING),
    "event_time": ("event_timestamp", TIME),
    "at": ("deliver_at", TIME),
    "after": ("deliver_after", DURATION),
    "expires_at": ("expires_at", TIME),
    "expires_after": ("expires_after", DURATION),
    "id": ("message_id", click.STRING),
}


def _read(line: dict[str, Any], name: str, kind: Any = click.STRING) -> Any:
    """Return the value of a key, as the option of this type has it; None if it is not given."""
    found = line.get(name)
    if kind is TIME and type(found) is int:
        found = str(found)
    if found is None:
        return None
    if not isinstance(found, str):
        raise InvalidInputError(f"{name} is {json.dumps(found)}, not a string")
    try:
        return kind.convert(found, None, None)
    except click.BadParameter as error:
        raise InvalidInputError(error.message) from None
