"""Plots of a horizon."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from delaylevel.errors import DelayLevelError, InvalidInputError, from_extra

from .horizon import Horizon, bucket_length_ms, comparable_buckets, period_name

_SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Check that a plot can be saved to a file."""
    if path.suffix.lower() not in _SUFFIXES:
        raise InvalidInputError(f"{path} is neither .png nor .svg: use one of these endings")
    if not path.absolute().parent.is_dir():
        raise InvalidInputError(f"{path.absolute().parent} is no folder: create it first")
    with from_extra("inspect", "plots need"):
        import matplotlib  # noqa: F401


def save_plot(found: Horizon, path: Path) -> None:
    """Save a plot of messages by due time, stacked by the parts in which they wait.

    An existing file is replaced.
    """
    check_plot(path)
    # Not pyplot, which would look for a display and keep every figure in memory.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")  # inches
    FigureCanvasAgg(figure)
    _draw(figure.add_subplot(), found)
    try:
        figure.savefig(path, format=path.suffix.lower()[1:], dpi=120)
    except OSError as error:
        raise DelayLevelError(f"cannot write {path}: {error.strerror or error}") from error


def _draw(axes: Any, found: Horizon) -> None:
    """Draw a histogram whose bars have areas in proportion to their messages.

    The first bucket has another length than the others, so heights are messages per time.
    """
    profile = comparable_buckets(found) if found.profile else ()
    starts = [_utc(row.from_ms) for row in profile]
    lengths = [bucket_length_ms(row, found.bucket_ms) for row in profile]
    days = [length / 86_400_000 for length in lengths]
    base = [0.0] * len(starts)
    for part in found.parts:
        heights = [
            row.parts[part.name] * found.bucket_ms / length
            for row, length in zip(profile, lengths, strict=True)
        ]
        if any(heights):
            axes.bar(
                starts,
                heights,
                days,
                base,
                align="edge",
                label=part.name,
                linewidth=0.8,
                edgecolor="white",
            )
            base = [low + high for low, high in zip(base, heights, strict=True)]
    axes.set_title(_title(found), loc="left")
    axes.set_xlabel(f"due (UTC), seen from {_utc(found.now_ms):%Y-%m-%d %H:%M:%S}")
    axes.set_ylabel(f"messages per {period_name(found.bucket_ms)}")
    axes.yaxis.set_major_formatter(
        lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}"
    )
    axes.spines[["top", "right"]].set_visible(False)
    if starts:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        axes.figure.autofmt_xdate()
    else:
        axes.text(0.5, 0.5, "nothing is pending", ha="center", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])


def _title(found: Horizon) -> str:
    topic = (found.target or found.topic).rpartition("/")[2]
    about = "" if found.exact else "about "
    overdue = found.within[0].messages
    title = f"{topic}: {about}{found.messages:,} messages pending"
    return f"{title}, of which {overdue:,} are overdue and not drawn" if overdue else title


def _utc(time_ms: int) -> datetime:
    return datetime.fromtimestamp(time_ms / 1000, timezone.utc)
