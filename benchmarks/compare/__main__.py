"""Run the loads on the systems, and print the tables of docs/comparison.md.

Results are added to a JSON file, where they replace earlier ones of the same system and load.
With ``--publish`` this is the file of docs/comparison.md, and the page and its pictures are written
again. Everything listens on the loopback interface, has its own data, and is stopped at the end.

Examples:
    python -m compare
    python -m compare --systems ours,nats --loads minute,instant
    python -m compare --systems ours --loads publishing --messages 5000
    python -m compare --loads none --publish
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from common import note

from delaylevel.errors import DelayLevelError

from . import page, report
from .loads import LOADS
from .native import bucket_tracker, memory_tracker
from .nats import Nats
from .ours import Ours
from .rocketmq import RocketMq
from .system import System
from .trial import run

ROOT = Path(__file__).parents[2]


def systems() -> dict[str, System]:
    """Return all systems by their names."""
    found: list[System] = [Ours(), memory_tracker(), bucket_tracker(), Nats(), RocketMq()]
    return {each.name: each for each in found}


def main() -> None:
    """Parse the options, and run the trials."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    known = systems()
    options = _parser(known).parse_args()
    path = report.PUBLISHED if options.publish else Path(options.results)
    names = [] if options.loads == "none" else _chosen(options.loads, LOADS)
    failed = []
    for name in _chosen(options.systems, known) if names else []:
        system = known[name]
        note(f"{system.title}: fetching what is missing")
        system.fetch()
        details = {
            "name": name,
            "title": system.title,
            "version": system.version(),
            "settings": system.settings,
        }
        for load in (LOADS[each] for each in names):
            if load.cancelled and not system.cancels:
                continue
            if options.messages:
                load = load.of(options.messages)
            load = replace(load, patience=options.patience)
            note(f"{system.title}: {load.count:,} messages {load.title}")
            try:
                row = run(system, load)
            except (RuntimeError, DelayLevelError, subprocess.SubprocessError) as error:
                note(f"FAILED: {error}")
                failed.append(f"{name} {load.name}")
                continue
            note(str({key: value for key, value in row.items() if key != "curve_ms"}))
            report.save(report.add(report.load(path), details, [row]), path)
    results = report.load(path)
    print(page.tables(results))
    if options.publish:
        page.write(results, ROOT / "docs")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _chosen(text: str, known: dict[str, object]) -> list[str]:
    names = [each.strip() for each in text.split(",")]
    for name in names:
        if name not in known:
            sys.exit(f"{name!r} is unknown: choose from {', '.join(known)}")
    return names


def _parser(known: dict[str, System]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compare",
        description=(__doc__ or "").splitlines()[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    every, loads = ",".join(known), ",".join(LOADS)
    parser.add_argument(
        "--systems", default=every, help="systems, separated by commas (default: %(default)s)"
    )
    parser.add_argument(
        "--loads", default=loads, help="loads, separated by commas, or none (default: %(default)s)"
    )
    parser.add_argument(
        "--messages", type=int, help="number of messages (default: another one for each load)"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        help="factor for the time to publish and all limits, for a busy machine (default: 1)",
    )
    parser.add_argument(
        "--results",
        default=str(ROOT / "build" / "compare.json"),
        help="JSON file for the results (default: build/compare.json)",
    )
    parser.add_argument(
        "--publish", action="store_true", help="renew docs/comparison.md and its results"
    )
    return parser


if __name__ == "__main__":
    main()
