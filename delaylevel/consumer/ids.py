"""Numbers that stand for the IDs of messages, and the interfaces of their stores."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

from delaylevel.errors import InvalidInputError

if TYPE_CHECKING:
    from delaylevel.structures.id_set import Ids

_POSITIVE = (1 << 63) - 1
_INT64 = struct.Struct("<q")


class InvalidIdError(InvalidInputError):
    """A value that cannot be the ID of a message, returned by a function of the application."""


class RememberedIds(Protocol):
    """The IDs that a process remembers, as a store sees them; any thread may call it."""

    def __len__(self) -> int:
        """Return the number of remembered IDs."""

    def add(self, ids: Ids) -> None:
        """Remember IDs that were saved earlier, or by another process; given oldest first."""

    def ids(self) -> Ids:
        """Return the remembered IDs, the older generation first."""


class IdLog(Protocol):
    """The open store of one subscription; any number of threads may use it."""

    def start(self, memory: RememberedIds) -> None:
        """Add all stored IDs to the memory, oldest first; called once, before any other method."""

    def append(self, key: int, saved: Callable[[], object]) -> None:
        """Store an ID, then call ``saved``, in this thread or a later one, in every case.

        If the store refuses the ID or does not answer, the message was handled all the same, and
        would certainly be handled again if it stayed unacknowledged. So ``saved`` is called, the
        failure is logged, and the ID is stored together with a later one.
        """

    def flush(self, timeout_s: float) -> bool:
        """Store what could not be stored earlier; return True if every ID is stored."""

    def close(self) -> None:
        """Release the store; IDs that are not flushed are lost."""

    @property
    def unsaved(self) -> int:
        """Number of IDs that are not stored yet."""


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
