"""``delaylevel doctor``: checks of the cluster and the level topics, with remedies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from delaylevel import doctor as examination
from delaylevel.cli.views.output import emit, note
from delaylevel.cli.views.terminal import width_of, wrapped
from delaylevel.doctor import Finding, State
from delaylevel.model.delivery import Delivery

from . import options
from .options import Settings, examples, pass_settings

_MARKS = {State.OK: "ok", State.WARNING: "warn", State.FAILED: "FAIL", State.SKIPPED: "-"}


def finding_view(finding: Finding) -> dict[str, Any]:
    """Return a finding as one row."""
    return {
        "check": finding.check,
        "subject": finding.subject,
        "state": finding.state.value,
        "says": finding.says,
        "problems": [problem.says for problem in finding.problems],
        "warnings": [problem.says for problem in finding.warnings],
        "remedies": list(finding.remedies),
    }


def findings_text(findings: Sequence[Finding], width: int | None, *, everything: bool) -> str:
    """Return findings for a person: failures, warnings, checks that were not made, and the rest."""
    shown = [
        finding_text(finding, width)
        for state in (State.FAILED, State.WARNING, State.SKIPPED, State.OK)
        for finding in findings
        if finding.state is state and (everything or state is not State.OK)
    ]
    passed = sum(finding.state is State.OK for finding in findings)
    if passed and not everything:
        shown.append(f"{passed} passed; --all shows them.")
    return "\n".join(shown)


def finding_text(finding: Finding, width: int | None) -> str:
    """Return a finding, with each of its problems and remedies on lines of its own."""
    mark = f"{_MARKS[finding.state]:6}"
    head = _short(f"{finding.check} ({finding.subject})")
    found = (*finding.problems, *finding.warnings)
    if not found:
        return wrapped(f"{head}: {_short(finding.says)}", width, mark, "      ")
    problems = (wrapped(_short(problem.says), width, "  ", "    ") for problem in found)
    remedies = (wrapped(_short(each), width, "  -> ", "     ") for each in finding.remedies)
    return "\n".join((f"{mark}{head}", *problems, *remedies))


def _short(text: str) -> str:
    """Return a text with the shortest names of topics, which every command takes."""
    return text.replace("persistent://public/default/", "").replace("persistent://", "")


@examples(
    "delaylevel doctor",
    "delaylevel doctor orders",
    "delaylevel doctor orders --delivery effectively-once",
)
@click.command()
@click.argument("topic", required=False)
@options.namespace_option(default="public/default")
@options.delivery
@options.everything
@options.output
@pass_settings
def doctor(
    settings: Settings,
    topic: str | None,
    namespace: str,
    everything: bool,
    output: str,
    delivery: Delivery,
) -> None:
    """Check cluster and level topics, and show remedies.

    Without TOPIC, every level topic of the namespace is checked. Failures come first, then warnings
    and checks that could not be made. Checks that passed are only counted; --all shows all checks.

    --delivery describes the dispatchers to check for. The exit code is 1 if a check fails. Nothing
    is changed.
    """
    found = examination.examine(settings.connection, topic, namespace=namespace, delivery=delivery)
    findings = list(found)
    states = [finding.state for finding in findings]
    failed = states.count(State.FAILED)
    if output in ("json", "jsonl"):
        emit([finding_view(finding) for finding in findings], (), output)
    else:
        click.echo(findings_text(findings, width_of(sys.stdout), everything=everything))
    # Neither a possible problem nor an unknown one is well.
    well = "All is well." if set(states) <= {State.OK} else "No check failed."
    note(f"{failed} of {len(findings)} checks failed." if failed else well)
    if failed:
        raise SystemExit(1)
