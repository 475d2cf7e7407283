"""The numeric attribute by which live queries select messages and compute averages.

Every message has one number: the size of its payload, its delay in the window (from its publish
time there until it is due), or one of its properties. It is NaN without a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from delaylevel.model.level_topic import DELAY_ATTRIBUTE, SIZE_ATTRIBUTE
from delaylevel.model.number import number
from delaylevel.topics.description_cache import DescriptionCache

from .batches import is_cancellation
from .packing import PACKED_FIELDS, PackedRecord, as_plain
from .record import Recorder, WindowMessage

_DUE = WindowMessage._fields.index("due_ms")
_VALUE = WindowMessage._fields.index("value")
_PROPERTIES = WindowMessage._fields.index("properties")
_PACKED_SIZE = PackedRecord._fields.index("size")
_PACKED_PROPERTIES = PackedRecord._fields.index("properties")
#: Index of the delay, which follows the fields of a record if the attribute is the delay.
_DELAY = len(WindowMessage._fields)


class MessageAttribute:
    """The attribute of a level topic.

    Args:
        name: ``size``, ``delay``, or the name of a property.
    """

    def __init__(self, name: str = SIZE_ATTRIBUTE) -> None:
        self.name = name

    def of(self, records: Sequence[tuple[Any, ...]]) -> npt.NDArray[np.float64]:
        """Return the attribute of each record, shape (n,)."""
        found: list[float]
        if self.name == SIZE_ATTRIBUTE:
            found = [
                record[_PACKED_SIZE]
                if len(record) == PACKED_FIELDS
                else np.nan
                if is_cancellation(record)
                else len(record[_VALUE] or b"")
                for record in records
            ]
        elif self.name == DELAY_ATTRIBUTE:
            found = [record[_DELAY] if len(record) > _DELAY else np.nan for record in records]
        else:
            found = [
                np.nan if is_cancellation(record) else number(_properties(record).get(self.name))
                for record in records
            ]
        return np.array(found, dtype=np.float64)


def _properties(record: tuple[Any, ...]) -> Mapping[str, str]:
    packed = len(record) == PACKED_FIELDS
    properties: Mapping[str, str] = record[_PACKED_PROPERTIES if packed else _PROPERTIES]
    return properties


class DelayRecorder(Recorder):
    """Recorder that appends the delay of each message, in ms, to its record."""

    def packed(self, message: Any, ledger: int, entry: int, batch: int) -> tuple[Any, ...] | None:
        """Return the record of a message, and its delay, not packed; see `Recorder.packed`."""
        found = super().packed(message, ledger, entry, batch)
        if found is None or is_cancellation(found):
            return found
        return (*as_plain(found), found[_DUE] - message.publish_timestamp())


def recorder_of(descriptions: DescriptionCache, *arguments: Any) -> Recorder:
    """Return a recorder of what the attribute of the level topic needs; arguments as for it."""
    with_delay = descriptions.latest().attribute == DELAY_ATTRIBUTE
    return (DelayRecorder if with_delay else Recorder)(descriptions, *arguments)
