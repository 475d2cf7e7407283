"""Conditions that select pending messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from delaylevel.topics.scan import ALWAYS, Window


@dataclass(frozen=True)
class Selection:
    """Conditions that select pending messages; a message must meet all of them.

    Attributes:
        due: the window of due times; if it has a bound, messages without a due time are left out.
        where: an SQL condition on the columns of
            :data:`delaylevel.inspection.rows.SCHEMA`, e.g. ``size > 1000``.
        key: the partition key.
        properties: properties of the application, with their values.
        id: the stable identity.
    """

    due: Window = ALWAYS
    where: str | None = None
    key: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    id: str | None = None
