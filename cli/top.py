"""``delaylevel top``: a live view of a topic's messages on their way."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from time import sleep
from typing import Any

import click

from delaylevel.cli.views.live import LiveRegion, live_region
from delaylevel.cli.views.output import emit_one
from delaylevel.cli.views.tables import Column, format_second, local, red_if_any, render
from delaylevel.cli.views.terminal import Tone, cut, has_colour, painted, write
from delaylevel.inspection.flow import Flow, Rates, Stage, quantile, rates
from delaylevel.model.formatting import format_duration
from delaylevel.model.level_topic import ALL, Role

from . import options
from .command import Settings, examples, pass_settings
from .inspection import inspector, screen
from .options import DURATION_MS

_COLUMNS = (
    Column("stage"),
    Column("pending", "number", head="ENTRIES", tone=lambda _, row: row["wrong"]),
    Column("change", "number", head="CHANGE/s", rank=2),
    Column("in", "number", head="IN/s"),
    Column("out", "number", head="OUT/s"),
    Column("behind", "number", tone=red_if_any),
    Column("next", "number", head="NEXT HAND-OFF", rank=1),
)
# Roles of topics in which only what went wrong waits.
_WRONG: dict[Role | None, Tone] = {Role.HELD: "yellow", Role.DEAD_LETTER: "red"}
_LEGEND = "ENTRIES wait now, a batch is one; IN/s and OUT/s are messages."


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


def flow_text(
    before: Flow | None,
    now: Flow,
    width: int,
    height: int | None = None,
    *,
    colour: bool = False,
) -> str:
    """Return a flow for a person, in lines of at most ``width`` cells.

    Args:
        height: the most lines; business topics are left out beyond it. None for any.
    """
    changes = rates(before, now)
    below = ["", *_processes(now, width), (_lateness(now), None), *_pauses(now), (_LEGEND, None)]
    foot = [one if isinstance(one, tuple) else (one, None) for one in below]
    room = len(now.stages) if height is None else max(4, height - len(foot) - 3)
    shown, left_out = _most_important(now.stages, room)
    rows = [_stage_row(stage, changes[stage.name], now.now_ms) for stage in shown]
    lines = [cut(f"{local(now.topic)} at {format_second(now.now_ms)}", width), ""]
    lines += render(rows, _COLUMNS, width=width, colour=colour).splitlines()
    if left_out:
        lines.append(f"and {left_out} more business topics")
    lines += [painted(cut(text, width), tone if colour else None) for text, tone in foot]
    return "\n".join(lines)


def _most_important(stages: Sequence[Stage], room: int) -> tuple[list[Stage], int]:
    """Return the stages to show, without the last business topics if there are too many."""
    excess = max(0, len(stages) - room)
    business = [stage for stage in stages if stage.role is None]
    excess = min(excess + 1, len(business)) if excess else 0  # a line says so
    left_out = business[len(business) - excess :]
    return [stage for stage in stages if stage not in left_out], len(left_out)


def _processes(now: Flow, width: int) -> list[tuple[str, Tone | None]]:
    lines = [_consumers_line("movers:       ", now, Role.LEVEL, width)]
    (window,) = [stage for stage in now.stages if stage.role is Role.WINDOW]
    if window.estimate:
        lines.append(("dispatchers:  not needed, the broker delivers", None))
    else:
        lines.append(_consumers_line("dispatchers:  ", now, Role.WINDOW, width))
    return [*lines, (f"producers:    {now.producers} on the levels, movers included", None)]


def _consumers_line(title: str, now: Flow, role: Role, width: int) -> tuple[str, Tone | None]:
    found = _consumers(now, role)
    alone = sum(stage.unattended for stage in now.stages if stage.role is role)
    more = f" ({alone} {role.value} partitions have none)" if alone else ""
    names = cut(", ".join(found) or "none", width - len(title) - len(more))
    return f"{title}{names}{more}", "red" if not found else "yellow" if alone else None


def _lateness(now: Flow) -> str:
    middle, most = quantile(now.late_ms, 0.5), quantile(now.late_ms, 1.0)
    if middle is None or most is None:
        return "lateness:     no delayed message was delivered yet"
    return (
        f"lateness:     median {format_duration(middle)}, at most {format_duration(most)}, "
        f"of the last {len(now.late_ms)} messages"
    )


def _pauses(now: Flow) -> list[tuple[str, Tone | None]]:
    return [
        (
            f"paused:       {'all targets' if name == ALL else cut(local(name), 30)} since "
            f"{format_second(since_ms)}",
            "yellow",
        )
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
        "stage": local(stage.name) if stage.role is None else stage.name,
        "wrong": _WRONG.get(stage.role) if pending else None,
        "pending": None if pending is None else f"{about}{pending:,}",
        "change": None if change.pending is None else f"{change.pending:+,.1f}",
        "in": comes_in,
        "out": change.messages_out,
        "behind": None if stage.behind_ms is None else format_duration(stage.behind_ms),
        "next": None
        if stage.next_hand_off_ms is None
        else f"in {format_duration(stage.next_hand_off_ms - now_ms)}",
    }


_SHORTEST_S = 0.2


@examples(
    "delaylevel top orders",
    "delaylevel top orders --every 5s",
    "delaylevel top orders --refreshes 1 -o json",
)
@click.command()
@click.argument("topic")
@click.option(
    "--every", "every_ms", type=DURATION_MS, default="2s", help="Interval between refreshes."
)
@click.option(
    "--refreshes",
    type=click.IntRange(min=1),
    help="Number of refreshes; by default endless on a terminal, and 1 otherwise.",
)
@options.output
@pass_settings
def top(settings: Settings, topic: str, every_ms: int, refreshes: int | None, output: str) -> None:
    """Watch the messages of TOPIC on their way.

    Shows levels, window and business topics with their rates. Also shows the movers and dispatchers
    at work. ENTRIES is the backlog, in which a batch counts once, and cancelled messages and
    their cancellations count, too; rates are messages per second. The stage `outcomes` has the
    decisions on cancellations of about the last day.
    Ctrl-C ends it. Nothing is acknowledged or moved.
    """
    width, watched = screen()
    live = watched and output in ("table", "wide")
    turns = itertools.count() if live and refreshes is None else range(refreshes or 1)
    pause_s = max(_SHORTEST_S, every_ms / 1000)
    try:
        with inspector(settings, topic) as look, _drawn_on_stdout(live) as region:
            before = look.flow()
            _draw(region, None, before)
            for _ in turns:
                sleep(pause_s)
                now = look.flow()
                if output in ("json", "jsonl"):
                    emit_one(flow_view(before, now), (), output)
                elif region.live:
                    _draw(region, before, now)
                else:
                    write(flow_text(before, now, width, colour=has_colour(sys.stdout)))
                before = now
    except KeyboardInterrupt:
        pass  # Ctrl-C is the normal end


def _draw(region: LiveRegion, before: Flow | None, now: Flow) -> None:
    if region.live:
        width, height = region.size
        region.show(flow_text(before, now, width, height, colour=has_colour(sys.stdout)))


def _drawn_on_stdout(live: bool) -> AbstractContextManager[LiveRegion]:
    """Open a region on stdout that leaves its last text, or one that shows nothing."""
    return live_region(sys.stdout, keep=True) if live else nullcontext(LiveRegion(None))
