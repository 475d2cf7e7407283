"""Shared parts of the benchmarks on a real broker: a private broker, alternating sides, a table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pulsar
from baselines import Case, print_table

from delaylevel import DelayLevelClient
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.connection.settings import Connection

QUIET = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
BODY = b"x" * 1024
# The embedded broker limits JIT compilation to start quickly; a production server does not.
JIT = {"_JAVA_OPTIONS": "-XX:TieredStopAtLevel=4"}
# By default the server reads 1,000 entries ahead, which is 500 MB if every entry is a full batch.
# Two topics that are read at the same time then evict each other from its cache, and the server
# reads everything again.
READ_AHEAD = {"dbStorage_readAheadCacheBatchSize": 20}


@contextmanager
def private_broker(**conf: Any) -> Iterator[Connection]:
    """Start a broker with its own data, yield its addresses, and stop it as `started_broker` does.

    Args:
        conf: settings of ``standalone.conf`` in addition to ``READ_AHEAD``.
    """
    with started_broker(**conf) as broker:
        yield broker.connection


@contextmanager
def started_broker(**conf: Any) -> Iterator[EmbeddedBroker]:
    """Start a broker with its own data; stop it and delete the data at the end.

    Args:
        conf: settings of ``standalone.conf`` in addition to ``READ_AHEAD``.
    """
    with tempfile.TemporaryDirectory(prefix="delaylevel-bench-") as directory:
        broker = EmbeddedBroker(
            "bench",
            directory=Path(directory) / "broker",
            functions=False,
            conf={**READ_AHEAD, **conf},
            heap_mb=600,
            follow_parent=True,
            report=note,
        )
        with _environment(JIT):
            broker.start()
        try:
            yield broker
        finally:
            broker.remove()


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name)
        os.environ.update(before)


@contextmanager
def connected(connection: Connection) -> Iterator[DelayLevelClient]:
    """Yield a client, and close it at the end."""
    client = DelayLevelClient.from_connection(connection, logger=QUIET)
    try:
        yield client
    finally:
        client.close()


def in_turn(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every side once and discard the result, then run all sides in turn: A B A B ...

    In this way, other load on the machine affects all sides equally.

    Args:
        sides: functions by the name of their side; each returns its messages per second.
        rounds: number of runs of each side.
    """
    for name, side in sides.items():
        note(f"{name}: {side():,.0f} /s (to warm up)")
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            rate = side()
            found[name].append(rate)
            note(f"{name}: {rate:,.0f} /s ({number + 1} of {rounds})")
    return found


def rate_row(name: str, rates: list[float], baseline: list[float]) -> Case:
    """Return a table row: median, extremes, and the ratio to the baseline.

    The ratio is the median over the rounds. In each round, both sides ran one after the other.
    """
    ratios = [one / other for one, other in zip(rates, baseline, strict=True)]
    return {
        "side": name,
        "median_per_s": round(statistics.median(rates)),
        "least": round(min(rates)),
        "most": round(max(rates)),
        "times_baseline": statistics.median(ratios),
    }


def report(rows: list[Case], json_path: str | None) -> None:
    """Print a table, and write the rows as JSON with a description of the machine."""
    print_table(rows)
    if json_path:
        machine = {
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "pulsar_client": pulsar.__version__,
            "load_average": os.getloadavg(),
        }
        Path(json_path).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def note(text: str) -> None:
    """Print a progress line on stderr."""
    print(f"... {text}", file=sys.stderr, flush=True)


def arguments(doc: str | None, messages: int | None, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options that these benchmarks share.

    From then on, a SIGTERM ends the benchmark through its clean-up, as Ctrl-C does.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(
        description=(doc or "").splitlines()[0],
        epilog=(doc or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if messages is not None:
        parser.add_argument(
            "--messages",
            type=int,
            default=messages,
            help=f"number of messages (default: {messages:,})",
        )
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"number of rounds (default: {rounds})"
    )
    parser.add_argument("--json", help="file for the results as JSON")
    return parser
