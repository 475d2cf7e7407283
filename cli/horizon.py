"""``delaylevel horizon``: the number of pending messages by due time."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import click

from delaylevel.cli.views.levels import note_undelivered
from delaylevel.cli.views.output import emit, emit_one, note
from delaylevel.cli.views.tables import Column, bucket_label, count, rate, render, short
from delaylevel.cli.views.terminal import width_of
from delaylevel.inspection.horizon import DueWithin, Horizon
from delaylevel.model.formatting import format_instant
from delaylevel.model.level_topic import Role
from delaylevel.model.topic_name import TopicName

from . import options
from .options import Settings, examples, pass_settings


def _within_view(row: DueWithin) -> dict[str, Any]:
    view = dict(vars(row))
    return {"within": view.pop("label"), **view}


def horizon_text(found: Horizon, width: int) -> str:
    """Return a horizon for a person: a summary, and tables of what is due when, and for whom."""
    sections = [_summary(found)]
    if found.messages or found.damaged:
        last = found.within[-1].parts
        shown = [name for name, messages in last.items() if messages or name != Role.HELD.value]
        columns = [
            Column("due_within"),
            *(Column(name, "number") for name in ("messages", "rate")),
            *(Column(name, "number", head=name.upper(), rank=1) for name in shown),
        ]
        rows = [
            {
                "due_within": row.label,
                "messages": count(row.messages, found.exact),
                "rate": rate(row.per_second),
                # A part without messages gives way first.
                **{
                    name: short(messages, found.exact) if last[name] else None
                    for name, messages in row.parts.items()
                },
            }
            for row in found.within
        ]
        sections.append(render(rows, columns, width=width))
    # The first period begins now, and may be shorter than the others.
    if len(found.profile) > 1:
        labels = {row.from_ms: bucket_label(row.from_ms, found.bucket_ms) for row in found.profile}
        labels[found.now_ms] = "now"
        profile = [(labels[row.from_ms], row.messages) for row in found.profile]
        sections.append(_counts(found, Column("name", head="DUE FROM (UTC)"), profile, width))
    if len(found.targets) > 1:
        largest = sorted(found.targets.items(), key=lambda pair: -pair[1])
        sections.append(_counts(found, Column("name", "topic", head="FOR"), largest, width))
    return "\n\n".join(sections)


def _counts(found: Horizon, column: Column, counts: Iterable[tuple[str, float]], width: int) -> str:
    rows = [{"name": name, "messages": count(messages, found.exact)} for name, messages in counts]
    return render(rows, (column, Column("messages", "number")), width)


def _summary(found: Horizon) -> str:
    name = TopicName.parse(found.target or found.topic).short
    if not found.messages:
        return f"{name}: nothing is pending."
    text = f"{name}: {count(found.messages, found.exact)} pending"
    if found.last_due_ms is None:
        return text
    until = 19 if found.exact else 16  # an estimate is not exact to the second
    return f"{text}\nThe last is due at {format_instant(found.last_due_ms)[:until]}Z"


@examples("delaylevel horizon orders", "delaylevel horizon orders --exact")
@click.command()
@click.argument("topic")
@click.option("--exact", is_flag=True, help="Read every message instead of estimating.")
@options.target
@options.output
@pass_settings
def horizon(settings: Settings, topic: str, exact: bool, target: str | None, output: str) -> None:
    """Count pending messages of TOPIC by time until due.

    Shows how many are due in the next minute, hour, day and week, and where they wait. TOPIC is a
    business topic or its level topic. A few thousand messages are counted. More are sampled, and
    ~ marks the estimates. Nothing is acknowledged or moved.
    """
    with settings.inspector(topic, target=target) as look:
        found = look.horizon(exact=exact)
        note_undelivered(look.admin, look.description, topic)
    within = list(map(_within_view, found.within))
    if output == "json":
        profile = [vars(row) for row in found.profile]
        more = {"messages": found.messages, "within": within, "profile": profile}
        emit_one({**vars(found), **more}, (), output)
        return
    if output == "jsonl":
        emit(within, (), output)
        return
    click.echo(horizon_text(found, width_of(sys.stdout) or 80))
    if not found.exact:
        note(f"~ is an estimate: {found.looked_at:,} messages were looked at; --exact reads all.")
    if found.damaged:
        note(
            f"{found.damaged:,} messages have no readable due time; movers set them aside as dead "
            "letters."
        )
