"""Views of ``delaylevel top``: the stages that messages pass, and the processes at work."""

from __future__ import annotations

from typing import Any

from delaylevel.cli.output import Column, render
from delaylevel.inspection.flow import Flow, Rates, Stage, quantile, rates
from delaylevel.model.formatting import format_duration, format_instant
from delaylevel.model.level_topic import Role
from delaylevel.model.pauses import ALL

from .text import local, shortened


def flow_view(before: Flow | None, now: Flow) -> dict[str, Any]:
    """Return a flow as one JSON object, with its rates since an earlier flow."""
    changes = rates(before, now)
    return {
        "topic": now.topic,
        "now_ms": now.now_ms,
        "producers": now.producers,
        "movers": _consumers(now, Role.LEVEL),
        "dispatchers": _consumers(now, Role.WINDOW),
        "late_p50_ms": quantile(now.late_ms, 0.5),
        "late_max_ms": quantile(now.late_ms, 1.0),
        "stages": [_stage_view(stage, changes[stage.name]) for stage in now.stages],
        "paused": {"all" if name == ALL else name: since_ms for name, since_ms in now.paused},
    }


def _consumers(now: Flow, role: Role) -> list[str]:
    return sorted({name for stage in now.stages if stage.role is role for name in stage.alive})


def flow_text(before: Flow | None, now: Flow, width: int) -> str:
    """Return a flow for a person, in lines of at most ``width`` characters."""
    changes = rates(before, now)
    rows = [_stage_row(stage, changes[stage.name], now.now_ms) for stage in now.stages]
    columns = (
        Column("stage"),
        Column("pending", "number", head="ENTRIES"),
        Column("change", "number", head="CHANGE/s"),
        Column("in", "number", head="IN/s"),
        Column("out", "number", head="OUT/s"),
        Column("behind", "number"),
        Column("next", "number", head="NEXT HAND-OFF"),
    )
    lines = [f"{local(now.topic)} at {format_instant(now.now_ms)[:19]}Z", ""]
    lines += render(rows, columns).splitlines()
    lines += ["", *_processes(now), _lateness(now), *_pauses(now)]
    return "\n".join(shortened(line, width) for line in lines)


def _processes(now: Flow) -> list[str]:
    levels = [stage for stage in now.stages if stage.role is Role.LEVEL]
    alone = sum(stage.unattended for stage in levels)
    text = ", ".join(_consumers(now, Role.LEVEL)) or "none"
    if alone:
        text += f" ({alone} level partitions have none)"
    lines = [f"movers:       {text}"]
    (window,) = [stage for stage in now.stages if stage.role is Role.WINDOW]
    if window.estimate:
        lines.append("dispatchers:  not needed, the broker delivers")
    else:
        text = ", ".join(_consumers(now, Role.WINDOW)) or "none"
        if window.unattended:
            text += f" ({window.unattended} window partitions have none)"
        lines.append(f"dispatchers:  {text}")
    return [*lines, f"producers:    {now.producers} on the levels, movers included"]


def _lateness(now: Flow) -> str:
    middle, most = quantile(now.late_ms, 0.5), quantile(now.late_ms, 1.0)
    if middle is None or most is None:
        return "lateness:     no delayed message was delivered yet"
    return (
        f"lateness:     median {format_duration(middle)}, at most {format_duration(most)}, "
        f"of the last {len(now.late_ms)} messages"
    )


def _pauses(now: Flow) -> list[str]:
    return [
        f"paused:       {'all targets' if name == ALL else shortened(local(name), 30)} since "
        f"{format_instant(since_ms)[:19]}Z"
        for name, since_ms in now.paused
    ]


def _stage_view(stage: Stage, change: Rates) -> dict[str, Any]:
    return {
        "stage": stage.name,
        "role": None if stage.role is None else stage.role.value,
        "pending_entries": stage.pending_entries,
        "estimate": stage.estimate,
        "in_per_second": change.messages_in,
        "out_per_second": change.messages_out,
        "pending_per_second": change.pending,
        "behind_ms": stage.behind_ms,
        "next_hand_off_ms": stage.next_hand_off_ms,
        "alive": list(stage.alive),
        "unattended": stage.unattended,
    }


def _stage_row(stage: Stage, change: Rates, now_ms: int) -> dict[str, Any]:
    pending = stage.pending_entries
    about = "~" if stage.estimate and pending else ""
    comes_in = change.messages_in
    if stage.role is Role.WINDOW and stage.estimate:
        comes_in = None  # without a window topic the rate is that of the business topic
    return {
        "stage": shortened(local(stage.name), 30) if stage.role is None else stage.name,
        "pending": None if pending is None else f"{about}{pending:,}",
        "change": None if change.pending is None else f"{change.pending:+,.1f}",
        "in": comes_in,
        "out": change.messages_out,
        "behind": None if stage.behind_ms is None else format_duration(stage.behind_ms),
        "next": None
        if stage.next_hand_off_ms is None
        else f"in {format_duration(stage.next_hand_off_ms - now_ms)}",
    }
