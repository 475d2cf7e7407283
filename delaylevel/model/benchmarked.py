"""Figures from the project's own benchmarks, the input of :mod:`delaylevel.model.plan`.

They were measured on two shared cores. A test compares them with the documentation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """The result of a benchmark.

    Attributes:
        value: the number that the planner uses.
        unit: its unit, in words.
        page: the page of the documentation that shows it.
        quote: the text on that page that contains it.
        command: the command that measures it.
    """

    value: float
    unit: str
    page: str
    quote: str
    command: str


NATIVE_INDEX_BYTES = Figure(
    6_809_192 / 200_000,
    "bytes a pending message and subscription",
    "docs/benchmarks.md",
    "| index of the business topic | 6,809,192 B, 200,000 messages | 118,088 B, 4,256 messages |",
    "python benchmarks/bench_index.py",
)
NATIVE_REBUILD_RATE = Figure(
    200_000 / 13.3,
    "pending messages a second, read again after an unload",
    "docs/benchmarks.md",
    "| a fresh message gets through after an unload | 13.3 s (at worst 13.5 s) | 0.44 s (at worst "
    "0.56 s) |",
    "python benchmarks/bench_index.py",
)
TRACKER_BYTES = Figure(
    39.2e6 / 10e6,
    "bytes a pending message, exact to the ms",
    "docs/final-window-structures.md",
    "| random within 24 h, exact | 39.2 MB (7,407, 242, 1,684) |",
    "python benchmarks/bench_tracker.py",
)
SPARK_RATE = Figure(
    35_600,
    "messages a second, core and hop, at least once",
    "docs/benchmarks.md",
    "| at least once, `local[1]` | 500,000 | 17,600/s | 28,100/s | 35,600/s (33,200 to 37,900) "
    "| 2.0 |",
    "python benchmarks/bench_spark.py",
)
FUNCTION_RATE = Figure(
    9_111,
    "messages a second, instance and hop",
    "docs/functions.md",
    "| **the deployed Function**, one instance | 9,111 (9,012 to 9,835) | 16.9 | 0.87 |",
    "python benchmarks/bench_function.py",
)
PUBLISH_RATE = Figure(
    44_400,
    "delayed messages a second of one wrapped producer",
    "docs/benchmarks.md",
    "| | wrapper | 50,300 (50,100 to 52,400) | 1.5 | 44,400 (42,500 to 48,400) | 1.5 |",
    "python benchmarks/bench_publish.py",
)

# By the name of the constant in lower case.
FIGURES = {
    name.lower(): value for name, value in list(globals().items()) if isinstance(value, Figure)
}
