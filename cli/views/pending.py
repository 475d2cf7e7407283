"""What the inspecting commands show, as text and as rows with stable keys; nothing is printed."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from delaylevel.cli.output import Column, format_duration, format_time, render
from delaylevel.inspection.flow import Flow, Rates, Stage, quantile, rates
from delaylevel.inspection.horizon import Bucket, DueWithin, Horizon, Part
from delaylevel.model.level_topic import Role
from delaylevel.model.topic_name import TopicName

if TYPE_CHECKING:
    from delaylevel.inspection.query import HistogramBar
    from delaylevel.inspection.rows import PendingRow

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_SHORTEST_BAR = 6
_LONGEST_BAR = 30
_DAY_MS = 86_400_000


def bar(share: float, width: int) -> str:
    """A bar of a share of a width, in eighths of a character; something for whatever is not 0."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def count(messages: float, exact: bool) -> str:
    """A number of messages: whole, or ``~`` and three digits of an estimate."""
    if exact or messages == 0:
        return f"{messages:,.0f}"
    digits = len(str(round(messages)))
    return f"~{round(messages, min(0, 3 - digits)):,.0f}"


def short(messages: float, exact: bool) -> str:
    """The same in little room: from 10,000 on three digits, and ``k``, ``M`` or ``G``."""
    if messages < 9_999.5:
        return count(messages, exact)
    for factor, unit in ((1e3, "k"), (1e6, "M"), (1e9, "G")):
        value = messages / factor
        if value < 999.5 or unit == "G":
            break
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{'' if exact else '~'}{value:.{digits}f}{unit}"


def shortened(text: str, width: int) -> str:
    """A text that fits into a width; it ends in ``…`` where something is missing."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def rate(per_second: float | None) -> str:
    """A rate in the unit in which it is easy to read."""
    if per_second is None:
        return "-"
    for factor, unit in ((1, "s"), (60, "min"), (3600, "h"), (86_400, "d")):
        if per_second * factor >= 1 or unit == "d":
            return f"{per_second * factor:,.1f}/{unit}" if per_second else "0"
    raise AssertionError("there is a last unit")


def local(topic: str) -> str:
    """A topic's name without its namespace."""
    return TopicName.parse(topic).local


# -- horizon


def horizon_view(found: Horizon) -> dict[str, Any]:
    """A horizon as one JSON object."""
    return {
        "topic": found.topic,
        "target": found.target,
        "now_ms": found.now_ms,
        "messages": found.messages,
        "exact": found.exact,
        "exact_parts": sorted(found.exact_parts),
        "looked_at": found.looked_at,
        "damaged": found.damaged,
        "window_by_clock": found.window_by_clock,
        "last_due_ms": found.last_due_ms,
        "targets": dict(found.targets),
        "within": [within_view(row) for row in found.within],
        "bucket_ms": found.bucket_ms,
        "profile": [bucket_view(row) for row in found.profile],
    }


def within_view(row: DueWithin) -> dict[str, Any]:
    """How much is due within a time, as one row."""
    return {
        "within": row.label,
        "within_ms": row.within_ms,
        "messages": row.messages,
        "parts": dict(row.parts),
        "per_second": row.per_second,
        "exact": row.exact,
    }


def bucket_view(row: Bucket) -> dict[str, Any]:
    """A stretch of a profile as one row."""
    return {
        "from_ms": row.from_ms,
        "before_ms": row.before_ms,
        "messages": row.messages,
        "parts": dict(row.parts),
    }


def horizon_text(found: Horizon, width: int, bars: bool) -> str:
    """A horizon for a person: one sentence, a table, and the profile as bars.

    Parameters:
        found: what is shown.
        width: of the terminal, in characters.
        bars: draw bars; otherwise only figures.
    """
    sections = [_sentence(found)]
    if found.messages or found.damaged:
        sections.append(_within_table(found, width, bars))
        if bars and len(found.profile) > 1:
            sections.append(_profile_bars(found, width))
        if len(found.targets) > 1:
            sections.append(_targets_table(found, width))
    return "\n\n".join(sections)


def horizon_note(found: Horizon) -> str | None:
    """What is to be said beside a horizon; None for nothing."""
    notes = []
    if not found.exact:
        notes.append(
            f"~ is an estimate: {found.looked_at:,} messages were looked at; --exact reads all."
        )
    if found.window_by_clock:
        notes.append(
            "The window's release log was not read: what was due when its last record was written "
            "is taken for released. --exact reads it."
        )
    if found.damaged:
        notes.append(
            f"{found.damaged:,} messages have no due time that can be read; movers set them aside "
            "as dead letters."
        )
    return "\n".join(notes) or None


def _sentence(found: Horizon) -> str:
    name = local(found.target or found.topic)
    if not found.messages:
        return f"{name}: nothing is pending."
    text = f"{name}: {count(found.messages, found.exact)} pending"
    if found.last_due_ms is None:
        return text
    left = found.last_due_ms - found.now_ms
    about = "" if found.exact else "about "
    length = format_duration(abs(left))
    when = f"in {about}{length}" if left > 0 else f"{about}{length} ago"
    until = 19 if found.exact else 16  # an estimate knows no seconds
    return f"{text}\nThe last is due {when}: {format_time(found.last_due_ms)[:until]}Z"


def _within_table(found: Horizon, width: int, bars: bool) -> str:
    """The table of the rows, as wide as may be: full figures, short ones, or no empty parts."""
    last = found.within[-1].parts
    shown = [part for part in found.parts if last[part.name] or part.role is not Role.HELD]
    lines = _within_lines(found, shown, count)
    if max(map(len, lines)) > width:
        lines = _within_lines(found, shown, short)
    if max(map(len, lines)) > width:
        lines = _within_lines(found, [part for part in shown if last[part.name]], short)
    longest = max(map(len, lines))
    room = min(_LONGEST_BAR, width - longest - 3)
    if not bars or room < _SHORTEST_BAR or not found.messages:
        return "\n".join(lines)
    drawn = ["", *(bar(row.messages / found.messages, room) for row in found.within)]
    return "\n".join(
        f"{line.ljust(longest)}   {one}".rstrip() for line, one in zip(lines, drawn, strict=True)
    )


def _within_lines(
    found: Horizon, shown: Sequence[Part], write: Callable[[float, bool], str]
) -> list[str]:
    columns = [
        Column("due_within"),
        Column("messages", "number"),
        Column("rate", "number"),
        *(Column(part.name, "number", head=part.name.upper()) for part in shown),
    ]
    rows: list[dict[str, Any]] = [
        {
            "due_within": row.label,
            "messages": count(row.messages, found.exact),
            "rate": rate(row.per_second),
            **{
                part.name: write(row.parts[part.name], part.name in found.exact_parts)
                for part in shown
            },
        }
        for row in found.within
    ]
    return render(rows, columns).splitlines()


def _profile_bars(found: Horizon, width: int) -> str:
    labels = [bucket_label(row.from_ms, found.bucket_ms) for row in found.profile]
    labels[0] = "now" if found.profile[0].from_ms == found.now_ms else labels[0]
    counts = [count(row.messages, found.exact) for row in found.profile]
    most = max(row.messages for row in found.profile) or 1
    return chart(
        ["DUE FROM (UTC)", *labels],
        ["MESSAGES", *counts],
        [0.0, *(row.messages / most for row in found.profile)],
        width,
    )


def _targets_table(found: Horizon, width: int) -> str:
    rows = [
        {
            "target": shortened(local(name), max(10, width - 20)),
            "messages": count(messages, found.exact),
        }
        for name, messages in sorted(found.targets.items(), key=lambda pair: -pair[1])
    ]
    return render(rows, (Column("target", head="FOR"), Column("messages", "number")))


def bucket_label(from_ms: int, length_ms: int) -> str:
    """The start of a stretch of time, no more exact than its length."""
    moment = datetime.fromtimestamp(from_ms / 1000, timezone.utc)
    if length_ms >= _DAY_MS:
        return moment.strftime("%a %Y-%m-%d")
    return moment.strftime("%a %d %H:%M:%S" if length_ms < 60_000 else "%a %d %H:%M")


def chart(labels: Sequence[str], counts: Sequence[str], shares: Sequence[float], width: int) -> str:
    """Bars with labels to their left and figures between; the first row is the head."""
    left, right = max(map(len, labels)), max(map(len, counts))
    room = max(_SHORTEST_BAR, min(_LONGEST_BAR * 2, width - left - right - 6))
    return "\n".join(
        f"{label.ljust(left)}   {figure.rjust(right)}   {bar(share, room)}".rstrip()
        for label, figure, share in zip(labels, counts, shares, strict=True)
    )


# -- pending


def row_view(row: PendingRow, payload: bool) -> dict[str, Any]:
    """A pending message as one row."""
    view = row._asdict()
    value = view.pop("value")
    view["position"] = f"{view.pop('ledger')}:{view.pop('entry')}:{view.pop('batch')}"
    if payload:
        view["value_base64"] = None if value is None else base64.b64encode(value).decode()
    return view


def histogram_view(one: HistogramBar, by: str) -> dict[str, Any]:
    """One bar as one row; the value's key says what it is."""
    return {"by": by, **vars(one)}


def histogram_text(found: Sequence[HistogramBar], by: str, width: int, bars: bool) -> str:
    """A histogram for a person."""
    labels = [_histogram_label(one.value, by) for one in found]
    counts = [f"{one.messages:,}" for one in found]
    most = max(one.messages for one in found)
    shares = [one.messages / most if bars else 0.0 for one in found]
    head = f"{by} (UTC)" if by in ("hour", "day") else by
    if by == "size":
        head = "size from"
    longest = max(10, width - 30)
    labels = [shortened(one, longest) for one in labels]
    return chart([head.upper(), *labels], ["MESSAGES", *counts], [0.0, *shares], width)


def _histogram_label(value: int | str | None, by: str) -> str:
    if value is None:
        return "(none)"
    if by in ("hour", "day") and isinstance(value, int):
        return bucket_label(value, _DAY_MS if by == "day" else 3_600_000)
    return f"{value:,}" if isinstance(value, int) else value


# -- top


def flow_view(before: Flow | None, now: Flow) -> dict[str, Any]:
    """The way of messages as one JSON object."""
    changes = rates(before, now)
    return {
        "topic": now.topic,
        "now_ms": now.now_ms,
        "producers": now.producers,
        "movers": movers(now),
        "dispatchers": dispatchers(now),
        "late_p50_ms": quantile(now.late_ms, 0.5),
        "late_max_ms": quantile(now.late_ms, 1.0),
        "stages": [_stage_view(stage, changes[stage.name]) for stage in now.stages],
    }


def movers(now: Flow) -> list[str]:
    """Names of those who hold a level."""
    levels = (stage for stage in now.stages if stage.role is Role.LEVEL)
    return sorted({name for stage in levels for name in stage.alive})


def dispatchers(now: Flow) -> list[str]:
    """Names of those who hold a partition of the window."""
    windows = (stage for stage in now.stages if stage.role is Role.WINDOW)
    return sorted({name for stage in windows for name in stage.alive})


def flow_text(before: Flow | None, now: Flow, width: int) -> str:
    """The way of messages for a person."""
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
    lines = [f"{local(now.topic)} at {format_time(now.now_ms)[:19]}Z", ""]
    lines += render(rows, columns).splitlines()
    lines += ["", *_who(now), _late(now)]
    return "\n".join(shortened(line, width) for line in lines)


def _who(now: Flow) -> list[str]:
    levels = [stage for stage in now.stages if stage.role is Role.LEVEL]
    alone = sum(stage.unattended for stage in levels)
    text = ", ".join(movers(now)) or "none"
    if alone:
        text += f" ({alone} level partitions have none)"
    lines = [f"movers:       {text}"]
    (window,) = [stage for stage in now.stages if stage.role is Role.WINDOW]
    if window.estimate:
        lines.append("dispatchers:  not needed, the broker delivers")
    else:
        text = ", ".join(dispatchers(now)) or "none"
        if window.unattended:
            text += f" ({window.unattended} window partitions have none)"
        lines.append(f"dispatchers:  {text}")
    return [*lines, f"producers:    {now.producers} on the levels, movers included"]


def _late(now: Flow) -> str:
    middle, most = quantile(now.late_ms, 0.5), quantile(now.late_ms, 1.0)
    if middle is None or most is None:
        return "lateness:     no delayed message has come out yet"
    return (
        f"lateness:     median {format_duration(middle)}, at most {format_duration(most)}, of the "
        f"last {len(now.late_ms)} messages"
    )


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
        comes_in = None  # it is the business topic's
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
