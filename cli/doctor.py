"""``delaylevel doctor``: checks of the cluster and the level topics, with remedies."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import click

from delaylevel import doctor as examination
from delaylevel.doctor import ExamOptions, Finding, State

from . import options
from .command import Settings, examples, pass_settings
from .output import Column, emit, note

_COLUMNS = (
    Column("state"),
    Column("check"),
    Column("subject", wide=True),
    Column("says", head="RESULT"),
)
_MARKS = {State.OK: "ok", State.WARNING: "warn", State.FAILED: "FAIL", State.SKIPPED: "-"}


@examples(
    "delaylevel doctor",
    "delaylevel doctor orders",
    "delaylevel doctor orders --delivery effectively-once --trigger 10s",
    "delaylevel doctor -o jsonl | jq 'select(.state == \"failed\")'",
)
@click.command()
@click.argument("topic", required=False)
@click.option(
    "--namespace",
    default="public/default",
    metavar="TENANT/NAMESPACE",
    help=options.NAMESPACE,
)
@options.delivery
@options.trigger
@options.spill_dir
@click.option(
    "--bookie-conf",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Configuration file of a bookie, whose settings brokers do not show.",
)
@options.output
@pass_settings
def doctor(
    settings: Settings,
    topic: str | None,
    namespace: str,
    output: str,
    **fields: Any,
) -> None:
    """Check cluster and level topics, and show remedies.

    Without TOPIC, every level topic of the namespace is checked. --delivery and --trigger describe
    the mover to check for; --spill-dir adds a check of that folder's disk. The exit code is 1 if a
    check fails. Nothing is changed.
    """
    exam = ExamOptions(**fields)
    connection = settings.connection()
    findings = list(examination.examine(connection, topic, namespace=namespace, options=exam))
    failed = [finding for finding in findings if finding.state is State.FAILED]
    warned = [finding for finding in findings if finding.state is State.WARNING]
    skipped = [finding for finding in findings if finding.state is State.SKIPPED]
    if output in ("table", "wide"):
        _print_tables(findings, output)
        for finding in (*failed, *warned):
            click.echo()
            click.echo(f"{finding.check} ({finding.subject}):")
            for problem in (*finding.outcome.problems, *finding.outcome.warnings):
                click.echo(f"  {problem.says}")
            for remedy in finding.remedies:
                click.echo(f"  -> {remedy}")
    else:
        emit([finding_view(finding) for finding in findings], _COLUMNS, output)
    note(f"{len(failed)} of {len(findings)} checks failed." if failed else "All is well.")
    if warned:
        note(f"Warnings: {', '.join(finding.check for finding in warned)}.")
    if skipped:
        note(f"Not checked: {', '.join(finding.check for finding in skipped)}.")
    if failed:
        raise SystemExit(1)


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


def _print_tables(findings: list[Finding], output: str) -> None:
    """Print a table for the cluster, and one for each level topic under its name."""
    for topic, found in itertools.groupby(findings, _level_topic):
        if topic is not None:
            click.echo(f"\n{topic}")
        rows = [{**finding_view(one), "state": _MARKS[one.state]} for one in found]
        emit(rows, _COLUMNS, output)


def _level_topic(finding: Finding) -> str | None:
    return None if finding.check in examination.CLUSTER_CHECKS else finding.subject
