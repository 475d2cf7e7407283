"""IDs of messages for which cancellations wait, each as often as there are cancellations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from delaylevel.structures.removable_ids import RemovableIds
from delaylevel.structures.rows import Int64s

from .ids import Mask, remove_ids, save_ids, seen_ids, unseen_ids


class AwaitedIds:
    """A set of IDs by key that counts repetitions, which are rare.

    Keys, indices and IDs are those of ``save_ids``.
    """

    def __init__(self) -> None:
        self._ids = RemovableIds()
        self._again: Counter[tuple[str, int]] = Counter()

    def __len__(self) -> int:
        """Return the number of distinct IDs."""
        return len(self._ids)

    def seen(self, keys: Sequence[str], key_index: npt.NDArray[np.integer], ids: Int64s) -> Mask:
        """Return which IDs are in the set, shape (n,)."""
        return seen_ids(self._ids, keys, key_index, ids)

    def add(self, keys: Sequence[str], key_index: npt.NDArray[np.integer], ids: Int64s) -> None:
        """Add each ID once more."""
        unseen = unseen_ids([self._ids], keys, key_index, ids)
        save_ids(self._ids, keys, key_index[unseen], ids[unseen])
        for index, number in zip(key_index[~unseen].tolist(), ids[~unseen].tolist(), strict=True):
            self._again[keys[index], number] += 1

    def remove(self, keys: Sequence[str], key_index: npt.NDArray[np.integer], ids: Int64s) -> None:
        """Remove each ID once; one that is missing does no harm."""
        if self._again:
            last = np.ones(ids.size, dtype=np.bool_)
            for row, (index, number) in enumerate(
                zip(key_index.tolist(), ids.tolist(), strict=True)
            ):
                identity = keys[index], number
                if identity in self._again:
                    last[row] = False
                    self._again[identity] -= 1
                    if not self._again[identity]:
                        del self._again[identity]
            key_index, ids = key_index[last], ids[last]
        remove_ids(self._ids, keys, key_index, ids)
