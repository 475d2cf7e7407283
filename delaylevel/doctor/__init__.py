"""Read-only checks of broker, level topics, movers and clocks, with remedies.

:func:`examine` runs every check and yields a finding for each, with a remedy for each problem.
"""

from __future__ import annotations

from delaylevel.cluster.rules import Problem

from .context import Finding, State
from .examination import CHECKS, examine

__all__ = ["CHECKS", "Finding", "Problem", "State", "examine"]
