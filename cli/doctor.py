"""``delaylevel doctor``: checks of the cluster and the level topics, with remedies."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from delaylevel import doctor as examination
from delaylevel.doctor import ExamOptions, Finding, State
from delaylevel.model.clock import duration_ms
from delaylevel.model.delivery import Delivery

from .options import (
    Settings,
    delivery_option,
    examples,
    output_option,
    pass_settings,
    spill_dir_option,
    trigger_option,
)
from .output import Column, emit, note

_COLUMNS = (
    Column("state"),
    Column("check"),
    Column("subject", wide=True),
    Column("says"),
)
_MARKS = {State.OK: "ok", State.FAILED: "FAIL", State.SKIPPED: "-"}
_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(
    epilog=examples(
        "delaylevel doctor",
        "delaylevel doctor orders",
        "delaylevel doctor orders --delivery effectively-once --trigger 10s",
        "delaylevel doctor -o jsonl | jq 'select(.state == \"failed\")'",
    )
)
@click.argument("topic", required=False)
@click.option(
    "--namespace",
    default="public/default",
    show_default=True,
    metavar="TENANT/NAMESPACE",
    help="Namespace to check if no TOPIC is given.",
)
@delivery_option
@trigger_option
@spill_dir_option
@click.option(
    "--bookie-conf",
    type=_file,
    help="Configuration file of a bookie, whose settings brokers do not show.",
)
@output_option
@pass_settings
def doctor(
    settings: Settings,
    topic: str | None,
    namespace: str,
    delivery: str,
    trigger: timedelta | None,
    spill_dir: Path | None,
    bookie_conf: Path | None,
    output: str,
) -> None:
    """Check cluster and level topics, and show remedies.

    Without TOPIC, every level topic of the namespace is checked. --delivery and --trigger describe
    the mover to check for; --spill-dir adds a check of that folder's disk. The exit code is 1 if a
    check fails. Nothing is changed.
    """
    options = ExamOptions(
        delivery=Delivery(delivery),
        trigger_ms=duration_ms(trigger) if trigger is not None else None,
        spill_dir=spill_dir,
        bookie_conf=bookie_conf,
    )
    findings = list(
        examination.examine(settings.connection(), topic, namespace=namespace, options=options)
    )
    failed = [finding for finding in findings if finding.state is State.FAILED]
    if output in ("table", "wide"):
        _print_tables(findings, output)
        for finding in failed:
            click.echo()
            click.echo(f"{finding.check} ({finding.subject}):")
            for problem in finding.outcome.problems:
                click.echo(f"  {problem.says}")
            for remedy in finding.remedies:
                click.echo(f"  -> {remedy}")
    else:
        emit([finding_view(finding) for finding in findings], _COLUMNS, output)
    note(f"{len(failed)} of {len(findings)} checks failed." if failed else "All is well.")
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
        "remedies": list(finding.remedies),
    }


def _print_tables(findings: list[Finding], output: str) -> None:
    """Print a table for the cluster, and one for each level topic under its name."""
    rows: list[dict[str, Any]] = []
    previous = None
    for finding in findings:
        of_topic = finding.check not in examination.CLUSTER_CHECKS
        subject = finding.subject if of_topic else None
        if subject != previous:
            emit(rows, _COLUMNS, output)
            click.echo(f"\n{subject}")
            rows, previous = [], subject
        rows.append({**finding_view(finding), "state": _MARKS[finding.state]})
    emit(rows, _COLUMNS, output)
