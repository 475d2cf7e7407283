"""Run the same loads on several systems, one after the other, and print a table for each load.

Everything listens on the loopback interface, has its own data, and is stopped at the end. All rows
are also stored as JSON, where they replace earlier ones of the same system and load.

Examples:
    python -m compare --systems ours,nats --loads minute,instant
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from common import Case, note, store, table

from delaylevel.errors import DelayLevelError

from .brokers import Ours, trackers
from .nats import Nats
from .rocketmq import RocketMq
from .system import System
from .trial import LOADS, run

RESULTS = Path(__file__).parents[2] / "build" / "compare.json"


def systems() -> dict[str, System]:
    """Return all systems by their names."""
    found: list[System] = [Ours(), *trackers(), Nats(), RocketMq()]
    return {each.name: each for each in found}


def add(rows: list[Case], row: Case) -> list[Case]:
    """Return rows with another one, which replaces an earlier one of its system and load."""
    place = row["system"], row["load"]
    return [*(each for each in rows if (each["system"], each["load"]) != place), row]


def main() -> None:
    """Parse the options, run the trials, and print the tables."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    known = systems()
    options = _parser(known).parse_args()
    path = Path(options.results)
    rows = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
    failed = []
    for name in _chosen(options.systems, known):
        system = known[name]
        note(f"{system.title}: fetching what is missing")
        system.fetch()
        note(f"{system.version()}. {system.settings}")
        for load in (LOADS[each] for each in _chosen(options.loads, LOADS)):
            if load.cancelled and not system.cancels:
                continue
            load = replace(load.of(options.messages or load.count), patience=options.patience)
            note(f"{system.title}: {load.count:,} messages {load.title}")
            try:
                rows = add(rows, run(system, load))
            except (RuntimeError, DelayLevelError, subprocess.SubprocessError) as error:
                note(f"FAILED: {error}")
                failed.append(f"{name} {load.name}")
                continue
            note(str(rows[-1]))
            path.parent.mkdir(parents=True, exist_ok=True)
            store(rows, path)
    for load in LOADS.values():
        found = [row for row in rows if row["load"] == load.name]
        if found:
            print(f"\n{load.name}: {load.title}\n{table(found)}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _chosen(text: str, known: dict[str, object]) -> list[str]:
    names = [each.strip() for each in text.split(",")]
    for name in names:
        if name not in known:
            sys.exit(f"{name!r} is unknown: choose from {', '.join(known)}")
    return names


def _parser(known: dict[str, System]) -> argparse.ArgumentParser:
    first, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="compare",
        description=first,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "%s, separated by commas (default: %%(default)s)"
    parser.add_argument("--systems", default=",".join(known), help=text % "systems")
    parser.add_argument("--loads", default=",".join(LOADS), help=text % "loads")
    parser.add_argument("--messages", type=int, help="number of messages, instead of the load's")
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        help="factor for the time to publish and all limits, for a busy machine (default: 1)",
    )
    parser.add_argument("--results", default=RESULTS, help="JSON file for the rows (%(default)s)")
    return parser


if __name__ == "__main__":
    main()
