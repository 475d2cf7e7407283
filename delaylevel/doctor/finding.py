"""Results of checks."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class State(str, enum.Enum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Problem:
    """A problem that a check found.

    Attributes:
        says: a description in one line.
        remedy: a remedy in one line.
    """

    says: str
    remedy: str


@dataclass(frozen=True)
class CheckResult:
    """The return value of a check.

    Attributes:
        problems: the problems, the worst first.
        note: a remark on a check without problems, or the reason why it was skipped.
        skipped: True if the check could not run.
        warnings: possible problems, which do not count as failures.
    """

    problems: tuple[Problem, ...] = ()
    note: str = ""
    skipped: bool = False
    warnings: tuple[Problem, ...] = ()

    @classmethod
    def skip(cls, reason: str) -> CheckResult:
        """Return the outcome of a check that could not run."""
        return cls(note=reason, skipped=True)

    @classmethod
    def failed(cls, says: str, remedy: str) -> CheckResult:
        """Return the outcome of a check that found one problem."""
        return cls((Problem(says, remedy),))

    @classmethod
    def warn(cls, says: str, remedy: str) -> CheckResult:
        """Return the outcome of a check that found a possible problem."""
        return cls(warnings=(Problem(says, remedy),))

    @classmethod
    def of(cls, problems: Iterable[Problem], note: str = "") -> CheckResult:
        """Return the outcome of a check that may have found problems."""
        return cls(tuple(problems), note)


@dataclass(frozen=True)
class Finding:
    """The result of one check on one subject.

    Attributes:
        check: the check's name.
        subject: the level topic, or the cluster.
        outcome: the check's outcome.
    """

    check: str
    subject: str
    outcome: CheckResult

    @property
    def state(self) -> State:
        """The result of the check."""
        if self.outcome.problems:
            return State.FAILED
        if self.outcome.warnings:
            return State.WARNING
        return State.SKIPPED if self.outcome.skipped else State.OK

    @property
    def says(self) -> str:
        """The first problem or warning, or the remark, in one line."""
        problems = self.outcome.problems or self.outcome.warnings
        if not problems:
            note = self.outcome.note
            return f"not checked: {note}" if self.outcome.skipped else note
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return problems[0].says + more

    @property
    def remedies(self) -> tuple[str, ...]:
        """The remedies of all problems and warnings, without duplicates."""
        found = (*self.outcome.problems, *self.outcome.warnings)
        return tuple(dict.fromkeys(problem.remedy for problem in found))
