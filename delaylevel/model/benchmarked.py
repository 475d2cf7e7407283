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
    28_957,
    "messages a second, core and hop, at least once",
    "docs/benchmarks.md",
    "| 28,957/s (27,866 to 30,048) | 1.8 |",
    "python benchmarks/bench_spark.py",
)
LOCAL_MOVER_RATE = Figure(
    31_475,
    "messages a second and hop of one mover without Spark, at least once",
    "docs/benchmarks.md",
    "| 1.8 | 31,475/s (30,370 to 32,579) | 2.0 |",
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
    40_400,
    "delayed messages a second of one wrapped producer",
    "docs/benchmarks.md",
    "| | wrapper | 45,400 (38,800 to 50,000) | 1.4 | 40,400 (36,800 to 46,400) | 1.1 |",
    "python benchmarks/bench_publish.py",
)
RESTART_RATE = Figure(
    1_000_000 / 12.2,
    "pending messages a second, known again to a restarted dispatcher",
    "docs/benchmarks.md",
    "| dispatcher, all messages known | 12.2 s | 357 MiB |",
    "python benchmarks/bench_restart.py",
)
BURST_RATE = Figure(
    41_200,
    "messages a second of one dispatcher that are due at one instant",
    "docs/benchmarks.md",
    "| dispatcher | 7.3 s | 41,200/s | 18.5 µs, 10.3 µs | 310 MiB, 642 MiB |",
    "python benchmarks/bench_dispatch.py --burst",
)
BROKER_STORE_S = Figure(
    74e-6 / 3,
    "seconds of a broker's core for a message and store, of the three on its way through one level",
    "docs/benchmarks.md",
    "| without Spark, 8,000/s, **120 s, quiet** | 0, 0, 0 | 23 ms | 322 ms | 752 ms | 16, 28, 78, "
    "74, 6 µs |",
    "python benchmarks/bench_end_to_end.py --rate 8000 --seconds 120 --sides local",
)
DISPATCHER_CORES_AT_100 = Figure(
    0.068,
    "cores of a dispatcher at 100 messages a second",
    "docs/benchmarks.md",
    "| 100/s | 6.8 % | 15.3 % | 8 ms |",
    "python benchmarks/bench_dispatch.py --rates 100,1000",
)
DISPATCHER_CORES_AT_1000 = Figure(
    0.135,
    "cores of a dispatcher at 1,000 messages a second",
    "docs/benchmarks.md",
    "| 1,000/s | 13.5 % | 23.4 % | 15 ms |",
    "python benchmarks/bench_dispatch.py --rates 100,1000",
)

# By the name of the constant in lower case.
FIGURES = {
    name.lower(): value for name, value in list(globals().items()) if isinstance(value, Figure)
}
