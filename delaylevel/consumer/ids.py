"""Numbers that stand for the IDs of messages."""

from __future__ import annotations

import operator
import struct
from hashlib import blake2b

from delaylevel.errors import InvalidInputError

_POSITIVE = (1 << 63) - 1


class InvalidIdError(InvalidInputError):
    """A value that cannot be the ID of a message, returned by a function of the application."""


def key_of(value: object) -> int:
    """Return the number in [0, 2**63) that stands for an ID.

    Integers from 0 on stand for themselves. Texts and negative integers are hashed to 63 bits.
    """
    if isinstance(value, str):
        if not value:
            raise InvalidIdError("an empty text")
        digest = blake2b(str.encode(value, "utf-8", "surrogatepass"), digest_size=8)
        return int.from_bytes(digest.digest(), "little") & _POSITIVE
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise InvalidIdError(f"{value!r} ({type(value).__name__})")
    if 0 <= number <= _POSITIVE:
        return number
    try:
        packed = struct.pack("<q", number)
    except struct.error:
        raise InvalidIdError(f"{number}, which does not fit into 64 bits") from None
    digest = blake2b(packed, digest_size=8, person=b"integer")
    return int.from_bytes(digest.digest(), "little") & _POSITIVE
