"""Numbers that stand for the IDs of messages."""

from __future__ import annotations

import operator
import struct
from hashlib import blake2b

from delaylevel.errors import InvalidInputError

_POSITIVE = (1 << 63) - 1
_INT64 = struct.Struct("<q")


class InvalidIdError(InvalidInputError):
    """A value that cannot be the ID of a message, returned by a function of the application."""


def key_of(value: object) -> int:
    """Return the number in [0, 2**63) that stands for an ID.

    Integers from 0 on stand for themselves. Texts and negative integers are hashed to 63 bits.
    """
    if type(value) is str and value:
        text = value.encode("utf-8", "surrogatepass")
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") & _POSITIVE
    number = _integer(value)
    if 0 <= number <= _POSITIVE:
        return number
    try:
        packed = _INT64.pack(number)
    except struct.error:
        raise InvalidIdError(f"{number}, which does not fit into 64 bits") from None
    digest = blake2b(packed, digest_size=8, person=b"integer").digest()
    return int.from_bytes(digest, "little") & _POSITIVE


def _integer(value: object) -> int:
    if isinstance(value, str):
        if value:
            return key_of(str.__str__(value))
        raise InvalidIdError("an empty text")
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise InvalidIdError(f"{value!r} ({type(value).__name__})")
