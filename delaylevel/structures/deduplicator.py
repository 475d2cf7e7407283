"""Which ids were seen: two generations for each key, the older of which is forgotten at once."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from delaylevel.errors import InvalidInputError

from .id_set import Ids, IdSet, Mask

_MAGIC = b"DLDEDUP1"
_LENGTHS = struct.Struct("<6Q")
_CHECKSUM = struct.Struct("<I")
_LIMIT = 1 << 63
#: So many ids are handled at once, which bounds the memory for intermediate results.
_BATCH = 8192


class DamagedSnapshotError(InvalidInputError):
    """Bytes that are not a whole snapshot of a Deduplicator; nothing was restored."""


class _Generations:
    """The ids of one key."""

    def __init__(self) -> None:
        self.current = IdSet()
        self.previous = IdSet()

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
    """Remembers ids, for each key at least the last capacity/2 distinct ones that were saved.

    Each key has a current and a previous generation with a counter of its own. Where the current
    one has capacity/2 ids and another one comes, it becomes the previous one and what that held is
    forgotten: at any time a key remembers its last capacity/2 to capacity distinct ids. Check and
    save are separate calls, so that a message that fails between them is not taken for a duplicate
    later.

    After "two generations of Roaring bitmaps", where the counter is shared by all keys; here it is
    not.
    """

    def __init__(self, capacity: int = 100_000_000) -> None:
        """Create an empty deduplicator.

        Args:
            capacity: the most ids that one key remembers; even, from 2.

        Raises:
            InvalidInputError: the capacity is odd or below 2.
        """
        if capacity < 2 or capacity % 2:
            raise InvalidInputError(f"capacity must be even and from 2, got {capacity}")
        self.capacity = capacity
        self._half = capacity // 2
        self._keys: dict[str, _Generations] = {}

    def __len__(self) -> int:
        """Return how many ids are remembered, of all keys."""
        return sum(map(self.count, self._keys))

    def keys(self) -> list[str]:
        """Return the keys that ids were saved for."""
        return list(self._keys)

    def count(self, key: str) -> int:
        """Return how many ids of a key are held; one saved in both generations counts twice."""
        found = self._keys.get(_checked_key(key))
        return found.current.size + found.previous.size if found else 0

    def forget(self, key: str) -> None:
        """Forget all ids of a key."""
        self._keys.pop(_checked_key(key), None)

    def is_duplicate(self, id: int, key: str) -> bool:  # noqa: A002 - the name that callers know
        """Return whether an id is remembered.

        Args:
            id: from 0, below 2**63.
            key: not empty, such as a target topic.

        Raises:
            InvalidInputError: the id is out of range, or the key is empty.
        """
        _checked_id(id)
        found = self._keys.get(_checked_key(key))
        return found is not None and (id in found.current or id in found.previous)

    def save(self, id: int, key: str) -> None:  # noqa: A002
        """Remember an id; as ``is_duplicate`` in arguments and errors."""
        _checked_id(id)
        found = self._of(key)
        if id in found.current:
            return
        if found.current.size == self._half:
            found.flip()
        found.current.add(id)

    def is_duplicate_and_save(self, id: int, key: str) -> bool:  # noqa: A002
        """Return whether an id is remembered, and remember it if it is not."""
        if self.is_duplicate(id, key):
            return True
        self.save(id, key)
        return False

    def are_duplicates(self, ids: npt.ArrayLike, key: str) -> Mask:
        """Return for each of many ids whether it is remembered; nothing is saved.

        Args:
            ids: integers, shape (n,).
            key: not empty.

        Returns:
            Booleans, shape (n,); an id that is in ``ids`` twice is not a duplicate for that.
        """
        values = _checked_ids(ids)
        found = self._keys.get(_checked_key(key))
        if found is None or not values.size:
            return np.zeros(values.size, dtype=np.bool_)
        distinct, inverse = np.unique(values, return_inverse=True)
        return found.contains(distinct)[inverse]

    def save_all(self, ids: npt.ArrayLike, key: str) -> None:
        """Remember many ids, as ``save`` of one after the other."""
        found = self._of(key)
        values = _checked_ids(ids)
        for start in range(0, values.size, _BATCH):
            batch = values[start : start + _BATCH]
            while batch.size:
                distinct, first = _distinct(batch)
                fresh = ~found.current.contains(distinct)
                batch = self._fill(found, batch, distinct[fresh], first[fresh])

    def deduplicate_and_save(self, ids: npt.ArrayLike, key: str) -> npt.NDArray[np.int64]:
        """Return the ids that are new, and remember them: as ``is_duplicate_and_save`` of each.

        Args:
            ids: integers from 0, below 2**63, shape (n,), at most ``capacity`` of them.
            key: not empty.

        Returns:
            The ids that were not remembered, each once, in the order in which they were given.

        Raises:
            InvalidInputError: too many ids, one out of range, or the key is empty.
        """
        found = self._of(key)
        values = _checked_ids(ids)
        self._check_amount(values.size)
        parts: list[Ids] = []
        for start in range(0, values.size, _BATCH):
            batch = values[start : start + _BATCH]
            while batch.size:
                distinct, first = _distinct(batch)
                fresh = ~found.contains(distinct)
                order = first[fresh]
                rest = self._fill(found, batch, distinct[fresh], order)
                order = np.sort(order[order < batch.size - rest.size])
                parts.append(batch[order])
                batch = rest
        return np.concatenate([np.empty(0, dtype=np.uint64), *parts]).astype(np.int64)

    def reconstruct(self, ids: npt.ArrayLike, key: str) -> None:
        """Forget what a key remembers and remember these ids, the oldest first.

        Args:
            ids: integers from 0, below 2**63, shape (n,), at most ``capacity`` of them.
            key: not empty.

        Raises:
            InvalidInputError: too many ids, one out of range, or the key is empty.
        """
        values = _checked_ids(ids)
        self._check_amount(values.size)
        self.forget(key)
        self.save_all(values, key)

    def snapshot(self, key: str) -> bytes:
        """Return what a key remembers, for ``restore``."""
        found = self._keys.get(_checked_key(key)) or _Generations()
        parts = found.current.dump() + found.previous.dump()
        body = b"".join((_MAGIC, _LENGTHS.pack(*map(len, parts)), *parts))
        return body + _CHECKSUM.pack(zlib.crc32(body))

    def restore(self, data: bytes, key: str) -> None:
        """Replace what a key remembers by a snapshot, which may have come from another capacity.

        Raises:
            DamagedSnapshotError: the bytes are cut short, changed, or something else.
        """
        _checked_key(key)
        body, checksum = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
        if not body.startswith(_MAGIC) or checksum != _CHECKSUM.pack(zlib.crc32(body)):
            raise DamagedSnapshotError(
                f"these {len(data)} bytes are not a whole snapshot of a Deduplicator; "
                "use an older one, or reconstruct from the ids"
            )
        at = len(_MAGIC) + _LENGTHS.size
        parts = []
        for length in _LENGTHS.unpack_from(body, len(_MAGIC)):
            parts.append(body[at : at + length])
            at += length
        found = _Generations()
        found.current = IdSet.load(parts[:3])
        found.previous = IdSet.load(parts[3:])
        self._keys[key] = found

    def _of(self, key: str) -> _Generations:
        found = self._keys.get(key)
        if found is None:
            found = self._keys[_checked_key(key)] = _Generations()
        return found

    def _fill(
        self, found: _Generations, values: Ids, fresh: Ids, first: npt.NDArray[np.int64]
    ) -> Ids:
        """Save the fresh ids up to the next flip; return the part of ``values`` not yet handled.

        Args:
            found: where to save.
            values: the ids as they were given.
            fresh: those to save, sorted, distinct.
            first: where each of them is in ``values``.
        """
        room = max(self._half - found.current.size, 0)
        if fresh.size <= room:
            found.current.update(fresh)
            return values[:0]
        if room:
            cut = int(np.partition(first, room)[room])
            found.current.update(fresh[first < cut])
        else:
            cut = int(first.min())
        found.flip()
        return values[cut:]

    def _check_amount(self, amount: int) -> None:
        if amount > self.capacity:
            raise InvalidInputError(
                f"{amount} ids are more than the capacity of {self.capacity}; "
                "give them in smaller batches, or create the Deduplicator with a larger capacity"
            )


def _distinct(values: Ids) -> tuple[Ids, npt.NDArray[np.int64]]:
    """Return the distinct ids, sorted, and where each of them is first."""
    if bool((values[1:] > values[:-1]).all()):
        return values, np.arange(values.size)
    return np.unique(values, return_index=True)


def _checked_key(key: str) -> str:
    if not isinstance(key, str) or not key:
        raise InvalidInputError(f"the key must be a string that is not empty, got {key!r}")
    return key


def _checked_id(value: int) -> None:
    if not isinstance(value, (int, np.integer)) or not 0 <= value < _LIMIT:
        raise InvalidInputError(f"an id must be an integer from 0, below 2**63, got {value!r}")


def _checked_ids(ids: npt.ArrayLike) -> Ids:
    values: npt.NDArray[Any] = np.asarray(ids)
    if not values.size:
        return np.empty(0, dtype=np.uint64)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise InvalidInputError(
            "ids must be a one-dimensional array of integers from 0, below 2**63, "
            f"not {values.dtype} of shape {values.shape}"
        )
    if int(values.min()) < 0 or int(values.max()) >= _LIMIT:
        raise InvalidInputError("every id must be an integer from 0, below 2**63")
    return values.astype(np.uint64, copy=False)
