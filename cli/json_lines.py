"""JSON lines of messages to send, also those that ``pending export`` has written."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any

from delaylevel.errors import InvalidInputError
from delaylevel.model.clock import duration_ms
from delaylevel.model.envelope import EXPIRES
from delaylevel.model.formatting import parse_duration

from .values import parse_time_ms

_LINE_KEYS = frozenset(
    (
        *("body", "base64", "key", "ordering_key", "properties", "event_time", "id"),
        *("at", "after", "expires_at", "expires_after", "target"),
    )
)
# Keys of a line of `pending export` that describe the present place of the message.
_EXPORTED_KEYS = frozenset(
    (
        *("due_ms", "event_ms", "publish_ms", "delay_ms", "size", "place", "role", "level"),
        *("partition", "topic", "position", "value_base64"),
    )
)


@dataclass
class Outgoing:
    """A message as given on the command line or in a JSON line.

    Attributes:
        body: the payload; None for a null value.
        arguments: further arguments of ``DelayLevelProducer.send``, by name.
        line: the number of its JSON line; None for a message of the command line.
        target: the business topic that its JSON line names; None for that of the command.
    """

    body: bytes | None
    arguments: dict[str, Any]
    line: int | None = None
    target: str | None = None

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
            ``expires_at`` or ``expires_after``, ``id`` and ``target``. Times are ISO-8601, epoch ms
            or ``+2h``; ``after`` and ``expires_after`` are durations (``3d``). Or a line that
            ``pending export --payload`` has written.
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
    exact: dict[str, Any] = {}
    if "due_ms" in value and "position" in value:
        exact = {"event_timestamp": value.get("event_ms"), "deliver_at": value["due_ms"]}
        value = _exported(value)
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
    return Outgoing(content, {**arguments, **exact}, target=_text(value, "target"))


def _exported(row: dict[str, Any]) -> dict[str, Any]:
    """Return the line for a message that ``pending export`` has written."""
    if "value_base64" not in row:
        raise InvalidInputError("it has no payload: export the messages with --payload")
    if row["due_ms"] is None:
        raise InvalidInputError("its due time could not be read: see `delaylevel dlq`")
    line = {key: item for key, item in row.items() if key not in _EXPORTED_KEYS}
    payload = row["value_base64"]
    line |= {"body": None} if payload is None else {"base64": payload}
    properties = row.get("properties") or {}
    if isinstance(properties, dict) and EXPIRES in properties:
        line["expires_at"] = properties[EXPIRES]
    return line


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
