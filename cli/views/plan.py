"""Views of ``delaylevel plan``: lists of levels with their requirements, and a simulated day."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from delaylevel.cli.output import Column
from delaylevel.model import benchmarked as bench
from delaylevel.model.formatting import exact_duration
from delaylevel.model.geometric import create_options
from delaylevel.model.plan import OVERHEAD_BYTES, Load, Plan, dispatcher_cores
from delaylevel.model.strategy import Levels
from delaylevel.simulation.year import BIN_MS, Recovery, SimulatedDay

from .text import short

LOAD = (
    Column("pending", "number"),
    Column("stored_bytes", "size", head="STORED"),
    Column("native_index_bytes", "size", head="INDEX NATIVE"),
    Column("native_rebuild_ms", "duration", head="REBUILD NATIVE"),
    Column("nine_messages", "number", head="DUE AT NINE"),
    Column("dispatchers", "number"),
    Column("nine_release_ms", "duration", head="RELEASED WITHIN"),
)
PLANS = (
    Column("units", head="LEVELS"),
    Column("partitions", "number"),
    Column("writes", "number"),
    Column("moves_short", "number", head="MOVES/S", wide=True),
    Column("peak_short", "number", head="PEAK/S"),
    Column("window_short", "number", head="WINDOW"),
    Column("movers", "number"),
    Column("cost_short", "number", head="COST"),
    Column("local_mover", head="WITHOUT SPARK", wide=True),
    Column("window_size_bytes", "size", head="WINDOW SIZE", wide=True),
    Column("index_bytes", "size", head="INDEX", wide=True),
    Column("tracker_bytes", "size", head="TRACKER", wide=True),
    Column("rebuild_ms", "duration", head="REBUILD", wide=True),
    Column("dispatcher_cores", "number", wide=True),
    Column("broker_cores", "number", wide=True),
    Column("create", wide=True),
)
FACTS = (
    Column("days", "number"),
    Column("units", head="LEVELS"),
    Column("topics", "number"),
    Column("partitions", "number"),
    Column("stored_bytes", "size", head="STORED"),
    Column("writes", "number", head="WRITES PER MESSAGE"),
    Column("written_bytes_per_s", "size", head="WRITTEN PER SECOND"),
    Column("mover", head="MOVER"),
    Column("dispatcher", head="DISPATCHERS"),
    Column("dispatcher_cores", "number"),
    Column("tracker_bytes", "size", head="TRACKER AT PEAK"),
)
PARTS = (
    Column("part"),
    Column("partitions", "number"),
    Column("messages", "number"),
    Column("stored_bytes", "size", head="SIZE"),
    Column("out", "number", head="OUT/S"),
    Column("peak", "number", head="PEAK/S"),
    Column("peak_at", head="PEAK AT"),
)
RECOVERIES = (
    Column("case"),
    Column("late_short", "number", head="LATE"),
    Column("worst_ms", "duration"),
    Column("near", head="< 1M LATE FROM"),
    Column("on_time", head="ON TIME FROM"),
)


def unit_names(levels: Levels) -> str:
    """Return the units of a list of levels."""
    return " ".join(exact_duration(level.unit_ms) for level in levels)


def load_view(load: Load) -> dict[str, Any]:
    """Return the load without levels as one row."""
    return {
        "pending": load.pending,
        "stored_bytes": load.stored_bytes,
        "native_index_bytes": load.native_index_bytes,
        "native_rebuild_ms": round(load.native_rebuild_s * 1000),
        "nine_messages": load.nine_messages,
        "dispatchers": load.dispatchers,
        "nine_release_ms": round(load.nine_release_s * 1000),
    }


def plan_view(item: Plan) -> dict[str, Any]:
    """Return a plan as one row; the keys that end in ``_short`` are for tables."""
    return {
        "levels": ", then ".join(str(strategy) for strategy in item.levels.strategies),
        "units": unit_names(item.levels),
        "create": create_options(item.levels),
        "partitions": item.partitions,
        "writes": round(item.writes, 2),
        "window": item.window,
        "peak_window": item.peak_window,
        "window_short": short(item.peak_window, True),
        "window_size_bytes": item.window_bytes,
        "index_bytes": item.index_bytes,
        "tracker_bytes": item.tracker_bytes,
        "rebuild_ms": round(item.rebuild_s * 1000),
        "moves_per_s": round(item.moves_per_s),
        "moves_short": short(item.moves_per_s, True),
        "peak_moves_per_s": round(item.peak_moves_per_s),
        "peak_short": short(item.peak_moves_per_s, True),
        "movers": item.movers,
        "local_mover": item.local_mover,
        "cost": round(item.cost, 2),
        "cost_short": f"{item.cost:,.1f}",
        "broker_cores": round(item.broker_cores, 2),
        "dispatchers": item.dispatchers,
        "dispatcher_cores": round(item.dispatcher_cores, 2),
    }


def facts_view(load: Load, found: SimulatedDay) -> dict[str, Any]:
    """Return the figures of a simulated day that concern the whole level topic."""
    size = load.size + OVERHEAD_BYTES
    mean = found.due.mean
    return {
        "days": found.days,
        "cohorts": found.cohorts,
        "units": unit_names(found.levels),
        "create": create_options(found.levels),
        "topics": found.topics,
        "partitions": found.partitions,
        "stored_bytes": round(found.stored * size * load.copies),
        "writes": round(found.written, 2),
        "written_bytes_per_s": round(found.written * mean * size * load.copies),
        "mover": f"{short(found.mover_rate, True)} messages per second and hop",
        "mover_rate": round(found.mover_rate),
        "dispatcher": f"{short(found.dispatcher_rate, True)} messages per second",
        "dispatcher_rate": round(found.dispatcher_rate),
        "dispatcher_cores": round(dispatcher_cores(mean), 2),
        "tracker_bytes": round(found.window.peak * bench.TRACKER_BYTES.value),
    }


def part_views(load: Load, found: SimulatedDay) -> list[dict[str, Any]]:
    """Return a row for each level, for the mover as a whole, and for the window."""
    size = (load.size + OVERHEAD_BYTES) * load.copies

    def row(
        part: str, partitions: int | None, stored: Sequence[float] | None, out: Any
    ) -> dict[str, Any]:
        most = None if stored is None else max(stored)
        return {
            "part": part,
            "partitions": partitions,
            "messages": None if most is None else short(most, True),
            "most": None if most is None else round(most),
            "mean": None if stored is None else round(sum(stored) / len(stored)),
            "stored_bytes": None if most is None else round(most * size),
            "out": short(out.mean, True),
            "out_per_s": round(out.mean),
            "peak": short(out.peak, True),
            "peak_per_s": round(out.peak),
            "peak_at": _clock(out.peak_at_ms),
            "peak_at_ms": out.peak_at_ms,
        }

    rows = [
        row(load.name, load.partitions, load.stored.values, load.handed_off) for load in found.loads
    ]
    rows.append(row("all levels", sum(part.partitions for part in found.loads), None, found.moved))
    rows.append(row("window", None, found.window.values, found.due))
    return rows


def recovery_views(found: SimulatedDay) -> list[dict[str, Any]]:
    """Return a row for each case in which messages can be late."""
    begin, end = (_clock(time_ms)[:5] for time_ms in found.outage_ms)
    cases = (
        ("mover, no outage", found.mover),
        ("dispatchers, no outage", found.dispatcher),
        (f"no mover {begin} to {end}", found.mover_outage),
        (f"no dispatcher {begin} to {end}", found.dispatcher_outage),
    )
    return [{"case": name, **_recovery(item)} for name, item in cases]


def _recovery(item: Recovery) -> dict[str, Any]:
    return {
        "late": round(item.late),
        "late_short": short(item.late, True),
        "worst_ms": round(item.worst_ms),
        "on_time_ms": None if item.on_time_ms is None else round(item.on_time_ms),
        "on_time": _from(item.on_time_ms),
        "within_a_minute_ms": None if item.near_ms is None else round(item.near_ms),
        "near": _from(item.near_ms),
    }


def _from(time_ms: float | None) -> str:
    if time_ms is None:
        return "-"
    return _clock(time_ms) if time_ms else "always"


def simulated_view(load: Load, found: SimulatedDay) -> dict[str, Any]:
    """Return a simulated day as one JSON object."""
    return {
        **facts_view(load, found),
        "parts": part_views(load, found),
        "cases": recovery_views(found),
        "growth": [round(value) for value in found.growth],
        "bin_ms": BIN_MS,
        "curves": {
            scale: {name: [round(value) for value in values] for name, values in panel.items()}
            for scale, panel in curves(found).items()
        },
    }


def curves(found: SimulatedDay) -> Mapping[str, Mapping[str, Sequence[float]]]:
    """Return the curves of a simulated day, by scale and name."""
    return {
        "handed off per second": {
            **{load.name: load.handed_off.values for load in found.loads},
            "due": found.due.values,
        },
        "messages": {
            **{load.name: load.stored.values for load in found.loads},
            "window": found.window.values,
        },
    }


def _clock(time_ms: float) -> str:
    seconds = int(time_ms // 1000)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
