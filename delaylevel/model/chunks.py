"""Dead letters in chunks: a message that no topic takes as a whole, cut into several messages.

Our own chunks, not the client's: an acknowledgement of a chunked message of the client leaves its
first entries behind, and a reader that starts inside one never gets past it. A letter here can be
acknowledged entry by entry, and what is left of an interrupted attempt can be seen and removed.

The payloads of all chunks together are the letter: the length of a header (4 bytes, big-endian),
the header as JSON (properties, keys, event time, a null value), then the value. Properties are in
there because they may be large, too. Each chunk has the property ``delaylevel.chunk``
(``digest:number:total``), and the reason for people who look at the topic with other tools.

The digest is that of the content. So, if a letter is stored again after an unknown outcome, its
copies are one letter, and the chunks of both attempts complete each other.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from delaylevel.errors import EnvelopeError

from . import envelope as env
from .message import ParkedMessage, Payload
from .position import Position

_HEADER_LENGTH_BYTES = 4
_DIGEST_BYTES = 16
_LONGEST_REASON = 500
_TEXT = re.compile(r"([0-9a-f]{32}):([0-9]{1,9}):([0-9]{1,9})", re.ASCII)


class Chunk(NamedTuple):
    """One chunk of a letter, to be sent as a message without key and event time."""

    properties: dict[str, str]
    value: bytes | None
    key: str = ""
    ordering_key: str = ""
    event_ms: int = 0


class ChunkRef(NamedTuple):
    """The place of a chunk in its letter, from the property ``delaylevel.chunk``.

    Attributes:
        digest: hexadecimal digest of the letter's content.
        number: number of the chunk, from 0.
        total: number of chunks of the letter.
    """

    digest: str
    number: int
    total: int

    def __str__(self) -> str:
        return f"{self.digest}:{self.number}:{self.total}"

    @classmethod
    def read(cls, message: ParkedMessage) -> ChunkRef | None:
        """Return the place of a message in its letter; None if the message is a whole letter."""
        match = _TEXT.fullmatch(message.properties.get(env.CHUNK, ""))
        if match is None:
            return None
        ref = cls(match[1], int(match[2]), int(match[3]))
        return ref if ref.number < ref.total else None


class Letter(NamedTuple):
    """A message of the dead-letter topic, and the entries that hold it.

    Attributes:
        message: the message. Its position is that of its first chunk.
        positions: positions of the message, or of all its chunks and their copies.
        latest_ms: publish time of its latest chunk, ms.
        damage: the reason why the chunks do not make a message; empty if they do. The message is
            then the first chunk.
    """

    message: ParkedMessage
    positions: Sequence[Position]
    latest_ms: int
    damage: str = ""


def split(message: Payload, properties: dict[str, str], chunk_bytes: int) -> list[Chunk]:
    """Cut a message into chunks.

    Args:
        message: the payload, key, ordering key and event time.
        properties: all properties; those of the message are not used.
        chunk_bytes: largest payload of a chunk, bytes.
    """
    header = json.dumps(
        {
            "properties": properties,
            "key": message.key,
            "ordering_key": message.ordering_key,
            "event_ms": message.event_ms,
            "null": message.value is None,
        }
    ).encode()
    content = len(header).to_bytes(_HEADER_LENGTH_BYTES, "big") + header
    content += message.value or b""
    digest = _digest(content)
    slices = [content[at : at + chunk_bytes] for at in range(0, len(content), chunk_bytes)]
    reason = properties.get(env.REASON, "")[:_LONGEST_REASON]
    return [
        Chunk({env.CHUNK: str(ChunkRef(digest, number, len(slices))), env.REASON: reason}, part)
        for number, part in enumerate(slices)
    ]


class ChunkJoiner:
    """The messages of a dead-letter topic, with the chunks of each letter joined."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int], dict[int, ParkedMessage]] = {}
        self._positions: dict[tuple[str, int], list[Position]] = {}

    def add(self, message: ParkedMessage) -> Letter | None:
        """Add the next message of the topic; return a letter that it is or completes.

        A copy of a chunk of a complete letter is added to the positions of that letter.
        """
        ref = ChunkRef.read(message)
        if ref is None:
            return Letter(message, [message.position], message.publish_ms)
        group = (ref.digest, ref.total)
        positions = self._positions.setdefault(group, [])
        positions.append(message.position)
        if len(positions) > 1 and group not in self._parts:
            return None
        parts = self._parts.setdefault(group, {})
        parts.setdefault(ref.number, message)
        if len(parts) < ref.total:
            return None
        del self._parts[group]
        return _joined(ref.digest, [parts[number] for number in range(ref.total)], positions)

    def incomplete(self) -> Iterable[Letter]:
        """Yield the letters with missing chunks, once all messages of the topic were added."""
        for (digest, total), parts in self._parts.items():
            damage = (
                f"incomplete: {len(parts)} of {total} chunks of a message that is being stored, or "
                "that was left behind when storing, replaying or discarding it was interrupted"
            )
            yield _letter(list(parts.values()), self._positions[digest, total], damage)


def _joined(digest: str, parts: Sequence[ParkedMessage], positions: list[Position]) -> Letter:
    content = b"".join(part.value or b"" for part in parts)
    if _digest(content) != digest:
        return _letter(parts, positions, f"{env.CHUNK} is not the digest of the chunks")
    letter = _letter(parts, positions, "")
    try:
        return letter._replace(message=_parsed(content, letter.message))
    except EnvelopeError as error:
        return letter._replace(damage=error.reason)


def _letter(parts: Sequence[ParkedMessage], positions: list[Position], damage: str) -> Letter:
    first = min(parts, key=lambda part: part.position)
    return Letter(first, positions, max(part.publish_ms for part in parts), damage)


def _parsed(content: bytes, first: ParkedMessage) -> ParkedMessage:
    start = _HEADER_LENGTH_BYTES + int.from_bytes(content[:_HEADER_LENGTH_BYTES], "big")
    try:
        header = json.loads(content[_HEADER_LENGTH_BYTES:start])
        return first._replace(
            key=header["key"],
            ordering_key=header["ordering_key"],
            event_ms=header["event_ms"],
            properties=header["properties"],
            value=None if header["null"] else content[start:],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise EnvelopeError(f"the chunks have no readable header ({error!r})") from error


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()
