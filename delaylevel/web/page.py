"""The status page of a process: HTML with inline SVG, without scripts or external files."""

from __future__ import annotations

from collections.abc import Sequence

from .reports import ProbeCheck, StatusSection


def status_page(sections: Sequence[StatusSection], checks: Sequence[ProbeCheck]) -> str:
    """Return the status page."""
    return ""
