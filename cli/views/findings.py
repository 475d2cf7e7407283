"""Views of ``delaylevel doctor``: what is wrong first, and what is fine as a number."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from delaylevel.cli.terminal import Tone, painted, wrapped
from delaylevel.doctor import CLUSTER_CHECKS, Finding, State

_MARKS = {State.OK: "ok", State.WARNING: "warn", State.FAILED: "FAIL", State.SKIPPED: "-"}
_TONES: dict[str, Tone] = {"FAIL": "red", "warn": "yellow"}


def finding_view(finding: Finding) -> dict[str, Any]:
    """Return a finding as one row."""
    return {
        "check": finding.check,
        "subject": finding.subject,
        "state": finding.state.value,
        "says": finding.says,
        "problems": [problem.says for problem in finding.outcome.problems],
        "warnings": [problem.says for problem in finding.outcome.warnings],
        "remedies": list(finding.remedies),
    }


def findings_text(
    findings: Sequence[Finding], width: int | None, *, everything: bool, colour: bool
) -> str:
    """Return findings for a person: failures, warnings, checks that were not made, and the rest.

    Args:
        width: number of cells of a line; None for any.
        everything: True for a table of all checks, False for the number of those that passed.
        colour: True to colour failures and warnings.
    """
    parts = [
        _paragraph(finding, width, colour)
        for state in (State.FAILED, State.WARNING)
        for finding in findings
        if finding.state is state
    ]
    skipped = [finding for finding in findings if finding.state is State.SKIPPED]
    if everything:
        parts += _tables(findings, width, colour)
    elif skipped:
        parts.append("\n".join(_skipped_line(finding, width) for finding in skipped))
    passed = sum(finding.state is State.OK for finding in findings)
    if passed and not everything:
        checks, them = ("check", "it") if passed == 1 else ("checks", "them")
        parts.append(f"{passed} {checks} passed; --all shows {them}.")
    return "\n\n".join(parts)


def _paragraph(finding: Finding, width: int | None, colour: bool) -> str:
    mark = _MARKS[finding.state]
    found = (*finding.outcome.problems, *finding.outcome.warnings)
    return "\n".join(
        (
            f"{painted(mark, _TONES[mark] if colour else None)}  {finding.check} "
            f"({_short(finding.subject)})",
            *(wrapped(_short(problem.says), width, "  ", "    ") for problem in found),
            *(wrapped(_short(remedy), width, "  -> ", "     ") for remedy in finding.remedies),
        )
    )


def _skipped_line(finding: Finding, width: int | None) -> str:
    text = f"{finding.check} ({finding.subject}): {finding.says}"
    return wrapped(_short(text), width, "-     ", "      ")


def _tables(findings: Sequence[Finding], width: int | None, colour: bool) -> Iterator[str]:
    """Yield a table for the cluster, and one for each level topic under its name."""
    for topic, found in itertools.groupby(findings, _level_topic):
        listed = list(found)
        checks = max(len(finding.check) for finding in listed)
        lines = [] if topic is None else [_short(topic)]
        lines.append(f"STATE   {'CHECK'.ljust(checks)}   RESULT")
        for finding in listed:
            mark = _MARKS[finding.state]
            head = f"{mark.ljust(5)}   {finding.check.ljust(checks)}   "
            line = wrapped(_short(finding.says), width, head, " " * len(head)).rstrip()
            tone = _TONES.get(mark) if colour else None
            lines.append(painted(mark, tone) + line.removeprefix(mark))
        yield "\n".join(lines)


def _level_topic(finding: Finding) -> str | None:
    return None if finding.check in CLUSTER_CHECKS else finding.subject


def _short(text: str) -> str:
    """Return a text with the shortest names of topics, which every command takes."""
    return text.replace("persistent://public/default/", "").replace("persistent://", "")
