"""Recently seen IDs per key, in two generations; the older generation expires as a whole."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from delaylevel.errors import InvalidInputError

from .id_set import Ids, IdSet, Mask
from .rows import checked_integers

_MAGIC = b"DLDEDUP1"
_LENGTHS = struct.Struct("<6Q")
_CHECKSUM = struct.Struct("<I")
_LIMIT = 1 << 63
#: IDs processed at once: bounds the memory for intermediate results.
_BATCH_SIZE = 8192


class DamagedSnapshotError(InvalidInputError):
    """Bytes that are not a complete snapshot of a Deduplicator; nothing was restored."""


# The previous generation of nearly all keys; it is replaced, and never changed.
_NONE = IdSet()
_NO_PARTS = _NONE.dump()
_KEPT = 1_024  # the snapshot of a key is kept up to this size, because most keys have few IDs


class _Generations:
    """The IDs of one key."""

    def __init__(self) -> None:
        self.current = IdSet()
        self.previous = _NONE
        self.saved = b""  # the snapshot, while it is true

    def flip(self) -> None:
        self.previous = self.current
        self.previous.compact()
        self.current = IdSet()

    def contains(self, ids: Ids) -> Mask:
        found = self.current.contains(ids)
        if self.previous.size:
            found |= self.previous.contains(ids)
        return found


class Deduplicator:
    """Set of recently saved IDs: for each key, at least the last capacity/2 distinct ones.

    Each key has a current and a previous generation. When a new ID arrives and the current
    generation has capacity/2 IDs, the current generation replaces the previous one. A key
    therefore remembers its last capacity/2 to capacity distinct IDs. Check and save are separate
    calls, so that a message that fails between them does not count as a duplicate later.

    Source: the "two generations of Roaring bitmaps" scheme, but with one counter per key instead
    of one for all keys.
    """

    def __init__(self, capacity: int = 100_000_000) -> None:
        """Create an empty deduplicator.

        Args:
            capacity: maximum number of IDs that one key remembers; even, at least 2.

        Raises:
            InvalidInputError: the capacity is odd or below 2.
        """
        if capacity < 2 or capacity % 2:
            raise InvalidInputError(f"capacity must be even and at least 2, got {capacity}")
        self.capacity = capacity
        self._half = capacity // 2
        self._keys: dict[str, _Generations] = {}

    def __len__(self) -> int:
        """Return the number of remembered IDs of all keys."""
        return sum(each.current.size + each.previous.size for each in self._keys.values())

    def keys(self) -> list[str]:
        """Return the keys that have saved IDs."""
        return list(self._keys)

    def is_duplicate(self, id: int, key: str) -> bool:  # noqa: A002 - a public name
        """Return whether an ID is remembered.

        Args:
            id: integer in [0, 2**63).
            key: non-empty string, such as a target topic.

        Raises:
            InvalidInputError: the ID is out of range, or the key is empty.
        """
        _checked_id(id)
        found = self._keys.get(_checked_key(key))
        return found is not None and (id in found.current or id in found.previous)

    def save(self, id: int, key: str) -> None:  # noqa: A002
        """Remember an ID; arguments and errors as for ``is_duplicate``."""
        _checked_id(id)
        found = self._generations(key)
        if id in found.current:
            return
        if found.current.size >= self._half:
            found.flip()
        found.current.add(id)
        found.saved = b""

    def is_duplicate_and_save(self, id: int, key: str) -> bool:  # noqa: A002
        """Return whether an ID is remembered, and remember it."""
        if self.is_duplicate(id, key):
            return True
        self.save(id, key)
        return False

    def are_duplicates(self, ids: npt.ArrayLike, key: str) -> Mask:
        """Return for each ID whether it is remembered; save nothing.

        Args:
            ids: integers in [0, 2**63), shape (n,).
            key: non-empty string.

        Returns:
            Booleans, shape (n,). A repetition within ``ids`` does not count as a duplicate.
        """
        values = _checked_ids(ids)
        found = self._keys.get(_checked_key(key))
        if found is None or not values.size:
            return np.zeros(values.size, dtype=np.bool_)
        distinct, inverse = np.unique(values, return_inverse=True)
        return found.contains(distinct)[inverse]

    def save_all(self, ids: npt.ArrayLike, key: str) -> None:
        """Remember many IDs, as ``save`` does for each in turn."""
        found = self._generations(key)
        for _ in self._save(found, _checked_ids(ids), lambda some: found.current.contains(some)):
            pass

    def deduplicate_and_save(self, ids: npt.ArrayLike, key: str) -> npt.NDArray[np.int64]:
        """Return the new IDs and remember them, as ``is_duplicate_and_save`` does for each.

        Args:
            ids: integers in [0, 2**63), shape (n,), n at most ``capacity``.
            key: non-empty string.

        Returns:
            The IDs that were not remembered, each once, in the given order.

        Raises:
            InvalidInputError: too many IDs, an ID out of range, or an empty key.
        """
        found = self._generations(key)
        values = _checked_ids(ids)
        self._check_amount(values.size)
        parts = [part[np.sort(first)] for part, first in self._save(found, values, found.contains)]
        return np.concatenate([np.empty(0, dtype=np.uint64), *parts]).astype(np.int64)

    def reconstruct(self, ids: npt.ArrayLike, key: str) -> None:
        """Replace the IDs of a key by these, given oldest first.

        Args:
            ids: integers in [0, 2**63), shape (n,), n at most ``capacity``.
            key: non-empty string.

        Raises:
            InvalidInputError: too many IDs, an ID out of range, or an empty key.
        """
        values = _checked_ids(ids)
        self._check_amount(values.size)
        self._keys.pop(_checked_key(key), None)
        self.save_all(values, key)

    def ids(self, key: str) -> npt.NDArray[np.int64]:
        """Return the remembered IDs of a key, for ``reconstruct``: the older generation first.

        Within a generation they are sorted. An ID in both generations occurs twice.
        """
        found = self._keys.get(_checked_key(key)) or _Generations()
        return np.concatenate((found.previous.all(), found.current.all())).astype(np.int64)

    def snapshot(self, key: str) -> bytes:
        """Return the IDs of a key as bytes, for ``restore``."""
        found = self._keys.get(_checked_key(key)) or _Generations()
        if found.saved:
            return found.saved
        parts = found.current.dump() + (found.previous.dump() if found.previous.size else _NO_PARTS)
        body = b"".join((_MAGIC, _LENGTHS.pack(*map(len, parts)), *parts))
        data = body + _CHECKSUM.pack(zlib.crc32(body))
        found.saved = data if len(data) <= _KEPT else b""
        return data

    def restore(self, data: bytes, key: str) -> None:
        """Replace the IDs of a key by those of a snapshot, which may have another capacity.

        Raises:
            DamagedSnapshotError: the bytes are truncated, changed, or not a snapshot.
        """
        _checked_key(key)
        body, checksum = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
        if not body.startswith(_MAGIC) or checksum != _CHECKSUM.pack(zlib.crc32(body)):
            raise DamagedSnapshotError(
                f"these {len(data)} bytes are not a complete snapshot of a Deduplicator; "
                "use an older snapshot, or reconstruct from the IDs"
            )
        at = len(_MAGIC) + _LENGTHS.size
        parts = []
        for length in _LENGTHS.unpack_from(body, len(_MAGIC)):
            parts.append(body[at : at + length])
            at += length
        found = _Generations()
        found.current = IdSet.load(parts[:3])
        previous = IdSet.load(parts[3:])
        found.previous = previous if previous.size else _NONE
        found.saved = data if len(data) <= _KEPT else b""
        self._keys[key] = found

    def _generations(self, key: str) -> _Generations:
        found = self._keys.get(key)
        if found is None:
            found = self._keys[_checked_key(key)] = _Generations()
        return found

    def _save(
        self, found: _Generations, values: Ids, known: Callable[[Ids], Mask]
    ) -> Iterator[tuple[Ids, npt.NDArray[np.int64]]]:
        """Save the IDs that are not known; yield parts, and the indices of the new IDs in each."""
        found.saved = b""
        for start in range(0, values.size, _BATCH_SIZE):
            batch = values[start : start + _BATCH_SIZE]
            while batch.size:
                distinct, first = _distinct(batch)
                fresh = ~known(distinct)
                distinct, first = distinct[fresh], first[fresh]
                room = max(self._half - found.current.size, 0)  # a snapshot may have more
                if distinct.size <= room:
                    found.current.update(distinct)
                    yield batch, first
                    break
                # The rest is looked up again: the flip forgets a generation.
                cut = int(np.partition(first, room)[room])
                before = first < cut
                found.current.update(distinct[before])
                yield batch, first[before]
                found.flip()
                batch = batch[cut:]

    def _check_amount(self, amount: int) -> None:
        if amount > self.capacity:
            raise InvalidInputError(
                f"{amount} IDs exceed the capacity of {self.capacity}; "
                "pass them in smaller batches, or create the Deduplicator with a larger capacity"
            )


def _distinct(values: Ids) -> tuple[Ids, npt.NDArray[np.int64]]:
    """Return the distinct IDs, sorted, and the index of the first occurrence of each."""
    if bool((values[1:] > values[:-1]).all()):
        return values, np.arange(values.size)
    return np.unique(values, return_index=True)


def _checked_key(key: str) -> str:
    if not isinstance(key, str) or not key:
        raise InvalidInputError(f"the key must be a non-empty string, got {key!r}")
    return key


def _checked_id(value: int) -> None:
    if not isinstance(value, (int, np.integer)) or not 0 <= value < _LIMIT:
        raise InvalidInputError(f"an ID must be an integer in [0, 2**63), got {value!r}")


def _checked_ids(ids: npt.ArrayLike) -> Ids:
    return checked_integers(ids, "ids", 0, 63).astype(np.uint64, copy=False)
