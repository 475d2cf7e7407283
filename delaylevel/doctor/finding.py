"""What a check says."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class State(str, enum.Enum):
    """How a check ended."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Attributes:
        says: what, in one line.
        remedy: what to do about it, in one line.
    """

    says: str
    remedy: str


@dataclass(frozen=True)
class Outcome:
    """What a check returns.

    Attributes:
        problems: what is wrong, the worst first.
        note: what is good to know where nothing is, or why the check was not made.
        skipped: whether it was not made.
    """

    problems: tuple[Problem, ...] = ()
    note: str = ""
    skipped: bool = False

    @classmethod
    def skip(cls, why: str) -> Outcome:
        """Return the outcome of a check that was not made."""
        return cls(note=why, skipped=True)

    @classmethod
    def of(cls, *problems: Problem, note: str = "") -> Outcome:
        """Return an outcome."""
        return cls(problems, note)


@dataclass(frozen=True)
class Finding:
    """One line of an examination.

    Attributes:
        check: the check's name.
        subject: the level topic, or the cluster.
        outcome: what it says.
    """

    check: str
    subject: str
    outcome: Outcome

    @property
    def state(self) -> State:
        """How the check ended."""
        if self.outcome.problems:
            return State.FAILED
        return State.SKIPPED if self.outcome.skipped else State.OK

    @property
    def says(self) -> str:
        """What is wrong, or what is good to know, in one line."""
        problems = self.outcome.problems
        if not problems:
            return self.outcome.note
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return problems[0].says + more

    @property
    def remedies(self) -> tuple[str, ...]:
        """What to do, each once."""
        return tuple(dict.fromkeys(problem.remedy for problem in self.outcome.problems))
