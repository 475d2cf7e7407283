"""``delaylevel doctor``: checks of the cluster and the level topics, with remedies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from delaylevel import doctor as examination
from delaylevel.doctor import ExamOptions, State

from . import options
from .command import Settings, examples, pass_settings
from .output import emit, note
from .terminal import has_colour, width_of, write
from .views.findings import finding_view, findings_text


@examples(
    "delaylevel doctor",
    "delaylevel doctor orders",
    "delaylevel doctor orders --all",
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
@options.everything
@options.output
@pass_settings
def doctor(
    settings: Settings,
    topic: str | None,
    namespace: str,
    everything: bool,
    output: str,
    **fields: Any,
) -> None:
    """Check cluster and level topics, and show remedies.

    Without TOPIC, every level topic of the namespace is checked. Failures come first, then warnings
    and checks that could not be made. Checks that passed are only counted; --all shows all checks.

    --delivery and --trigger describe the mover to check for; --spill-dir adds a check of that
    folder's disk. The exit code is 1 if a check fails. Nothing is changed.
    """
    exam = ExamOptions(**fields)
    connection = settings.connection()
    findings = list(examination.examine(connection, topic, namespace=namespace, options=exam))
    failed = [finding for finding in findings if finding.state is State.FAILED]
    warned = [finding for finding in findings if finding.state is State.WARNING]
    skipped = [finding for finding in findings if finding.state is State.SKIPPED]
    if output in ("json", "jsonl"):
        emit([finding_view(finding) for finding in findings], (), output)
    else:
        width, colour = width_of(sys.stdout), has_colour(sys.stdout)
        shown = everything or output == "wide"
        write(findings_text(findings, width, everything=shown, colour=colour))
    note(f"{len(failed)} of {len(findings)} checks failed." if failed else "All is well.")
    if warned:
        note(f"Warnings: {', '.join(finding.check for finding in warned)}.")
    if skipped:
        note(f"Not checked: {', '.join(finding.check for finding in skipped)}.")
    if failed:
        raise SystemExit(1)
