"""Exact sets of IDs per key, from which IDs can be removed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .id_set import Ids, IdSet, Mask

#: Removed IDs are kept apart up to this number, or an eighth of the set if that is more.
_LEAST_GONE = 4_096


class _KeyIds:
    """The IDs of one key: those that were added, without those that are gone."""

    def __init__(self) -> None:
        self.added = IdSet()
        self.gone = IdSet()

    @property
    def size(self) -> int:
        return self.added.size - self.gone.size

    def contains(self, ids: Ids) -> Mask:
        found = self.added.contains(ids)
        if self.gone.size:
            found &= ~self.gone.contains(ids)
        return found

    def add(self, ids: Ids) -> None:
        fresh = ids[~self.contains(ids)]
        if self.gone.size and bool(self.gone.contains(fresh).any()):
            self.compact()
        self.added.update(fresh)

    def remove(self, ids: Ids) -> None:
        self.gone.update(ids[self.contains(ids)])
        self.compact_if_large()

    def compact_if_large(self) -> None:
        if self.gone.size > max(_LEAST_GONE, self.added.size // 8):
            self.compact()

    def compact(self) -> None:
        gone = self.gone.all()
        self.gone = IdSet()
        if gone.size == self.added.size:
            self.added = IdSet()  # frees its memory
        else:
            self.added.remove(gone)


class RemovableIds:
    """Set of IDs for each key, from which IDs can be removed.

    Unlike a `Deduplicator`, it forgets nothing. An ID is an integer in [0, 2**63), and a key is a
    non-empty string; the caller checks them.
    """

    def __init__(self) -> None:
        self._keys: dict[str, _KeyIds] = {}

    def __len__(self) -> int:
        """Return the number of IDs of all keys."""
        return sum(found.size for found in self._keys.values())

    def is_duplicate(self, id: int, key: str) -> bool:  # noqa: A002 - as in a Deduplicator
        """Return whether an ID is in the set."""
        found = self._keys.get(key)
        return found is not None and id in found.added and id not in found.gone

    def are_duplicates(self, ids: npt.ArrayLike, key: str) -> Mask:
        """Return for each ID whether it is in the set, shape (n,)."""
        found = self._keys.get(key)
        distinct, inverse = np.unique(np.asarray(ids).astype(np.uint64), return_inverse=True)
        if found is None or not distinct.size:
            return np.zeros(inverse.size, dtype=np.bool_)
        return found.contains(distinct)[inverse]

    def save(self, id: int, key: str) -> None:  # noqa: A002
        """Add an ID; it may be in the set."""
        found = self._keys.setdefault(key, _KeyIds())
        if id in found.gone:
            found.compact()
        if id not in found.added:
            found.added.add(id)

    def save_all(self, ids: npt.ArrayLike, key: str) -> None:
        """Add IDs, shape (n,); some may be in the set, or repeated."""
        distinct = np.unique(np.asarray(ids).astype(np.uint64))
        self._keys.setdefault(key, _KeyIds()).add(distinct)

    def remove(self, id: int, key: str) -> None:  # noqa: A002
        """Remove an ID; it may be missing."""
        found = self._keys.get(key)
        if found is None or found.added.discard_recent(id):
            return
        if id in found.added and id not in found.gone:
            found.gone.add(id)
            found.compact_if_large()

    def remove_all(self, ids: npt.ArrayLike, key: str) -> None:
        """Remove IDs, shape (n,); some may be missing, or repeated."""
        found = self._keys.get(key)
        if found is None:
            return
        found.remove(np.unique(np.asarray(ids).astype(np.uint64)))
