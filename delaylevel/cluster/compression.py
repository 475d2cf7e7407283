"""Compression of producers, by the names that parked messages carry."""

from __future__ import annotations

from typing import Any

import pulsar

from delaylevel.model.envelope import COMPRESSIONS


def compression_name(compression_type: Any) -> str | None:
    """Return the name of a ``pulsar.CompressionType``; None for no compression, or no argument."""
    name = getattr(compression_type, "name", None)
    return name if name in COMPRESSIONS else None


def compression_settings(name: str | None) -> dict[str, Any]:
    """Return the arguments of ``create_producer`` that set a compression; none for None.

    Args:
        name: one of :data:`delaylevel.model.envelope.COMPRESSIONS`, or None.
    """
    if name is None:
        return {}
    return {"compression_type": getattr(pulsar.CompressionType, name)}
