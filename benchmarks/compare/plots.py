"""The pictures of docs/comparison.md, made from the results with matplotlib."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .measurement import SHARES

_COLOURS = {
    "ours": "#1b6ca8",
    "memory": "#d1495b",
    "bucket": "#edae49",
    "nats": "#3a7d44",
    "rocketmq": "#7b5ea7",
}

Results = Mapping[str, Any]


def digest(results: Results) -> str:
    """Return a short hash of the results, which every picture contains."""
    text = json.dumps(results, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def lateness(results: Results, path: Path) -> None:
    """Draw the share of messages that have arrived, by lateness."""
    figure = _figure(10, 4.2)
    loads = {"minute": "due at random within a minute", "instant": "due at one instant"}
    for place, (load, title) in enumerate(loads.items(), 1):
        axes: Any = figure.add_subplot(1, 2, place)
        for row in _rows(results, load):
            points = [
                (late / 1000, share * 100)
                for late, share in zip(row["curve_ms"], SHARES, strict=True)
                if late is not None
            ]
            axes.plot(
                *zip(*points, strict=True),
                label=_title(results, row),
                color=_COLOURS[row["system"]],
            )
        axes.set_xscale("symlog", linthresh=0.01)
        axes.axvline(0, color="grey", linewidth=0.8)
        axes.set_title(title, loc="left")
        axes.set_xlabel("seconds after the due time")
        axes.set_ylabel("messages that have arrived, %")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize="small")
    _save(figure, path, results)


def costs(results: Results, path: Path) -> None:
    """Draw publish rate, memory and restart time with messages that are due within 30 days."""
    figure = _figure(10, 3.2)
    rows = _rows(results, "month")[::-1]
    names = [_title(results, row) for row in rows]
    colours = [_COLOURS[row["system"]] for row in rows]
    panels: dict[str, Callable[[Any], float]] = {
        "published, messages/s": lambda row: row["publish_per_s"],
        "private memory, MiB": lambda row: row["private_mib"],
        "restart until it serves, s": lambda row: row["served_s"] or row["grace_s"],
    }
    for place, (title, value) in enumerate(panels.items(), 1):
        axes: Any = figure.add_subplot(1, 3, place)
        bars = axes.barh(names, [value(row) for row in rows], color=colours)
        axes.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize="small")
        axes.set_title(title, loc="left", fontsize="medium")
        axes.margins(x=0.25)
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        if place > 1:
            axes.set_yticks([])
    _save(figure, path, results)


PICTURES: dict[str, Callable[[Results, Path], None]] = {
    "comparison-lateness.svg": lateness,
    "comparison-costs.svg": costs,
}


def _rows(results: Results, load: str) -> list[Any]:
    found = [row for row in results["rows"] if row["load"] == load]
    return sorted(found, key=lambda row: list(_COLOURS).index(row["system"]))


def _title(results: Results, row: Mapping[str, Any]) -> str:
    return str(results["systems"][row["system"]]["title"])


def _figure(width: float, height: float) -> Any:
    # Not pyplot, which would look for a display.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path, results: Results) -> None:
    import matplotlib

    # The same results give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "compare", "svg.fonttype": "none"}):
        about = {"Date": None, "Creator": None, "Description": f"results {digest(results)}"}
        figure.savefig(path, format="svg", metadata=about)
