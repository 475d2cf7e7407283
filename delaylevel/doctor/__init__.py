"""Looking for what is wrong with broker, level topics, movers and clocks; nothing is changed.

:func:`examine` runs every check and returns a line for each, with a remedy for what has failed.
"""

from __future__ import annotations

from .context import ExamOptions
from .examination import CHECKS, CLUSTER_CHECKS, examine
from .finding import Finding, Problem, State

__all__ = ["CHECKS", "CLUSTER_CHECKS", "ExamOptions", "Finding", "Problem", "State", "examine"]
