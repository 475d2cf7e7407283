"""Views of ``delaylevel plan``: a load, and lists of levels with their requirements."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from delaylevel.cli.output import Column
from delaylevel.model.clock import duration_ms
from delaylevel.model.formatting import exact_duration
from delaylevel.model.plan import Load, Plan
from delaylevel.model.strategy import Levels

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


def create_options(levels: Levels) -> str:
    """Return the options of ``delaylevel levels create`` for a list of levels."""

    def text(value: timedelta) -> str:
        return exact_duration(duration_ms(value))

    first, *finer = levels.strategies
    words = [
        f"--unit {first.unit_name.lower()} --max-delay {text(first.maximum_delay)} "
        f"--lead {text(first.effective_lead)}"
    ]
    for item in finer:
        parts = (item.unit_name.lower(), text(item.maximum_delay), text(item.effective_lead))
        words.append(f"--then {':'.join(parts)}")
    return " ".join(words)
