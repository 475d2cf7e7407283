"""A day of a load after a year: levels, peaks and outages on a virtual clock, without a broker.

The simulation calls the product's router, source partitions and mover order for cohorts of
messages (benchmarks/simulation). Rates of movers and dispatchers are those that `plan` assumes.

    python benchmarks/bench_year.py --rate 100000 --days 365
"""

from __future__ import annotations

import argparse
import json
from datetime import timedelta

from simulation.traffic import Traffic
from simulation.year import simulate

from delaylevel.model.plan import BURST_RATE, SPARK_RATE, Load, plans


def main() -> None:
    """Simulate, and print the figures of the examined day as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=100_000.0, help="messages per second")
    parser.add_argument("--days", type=int, default=365, help="longest delay")
    parser.add_argument("--at-nine", type=float, default=0.1, help="share due at nine o'clock")
    given = parser.parse_args()
    load = Load(given.rate, timedelta(days=given.days), 1024, nine_share=given.at_nine)
    chosen = plans(load)[0]
    dispatchers = max(1, chosen.dispatchers)
    day = simulate(
        chosen.levels,
        Traffic(
            rate=load.rate,
            maximum_ms=load.maximum_delay // timedelta(milliseconds=1),
            mean_ms=load.mean / timedelta(milliseconds=1),
            peak_share=load.nine_share,
            peak_spread_ms=0,
        ),
        days=None,
        mover_rate=chosen.movers * SPARK_RATE,
        dispatcher_rate=dispatchers * BURST_RATE,
        rebuild_s=chosen.rebuild_s / dispatchers,
    )
    parts = {
        part.name: {"most": max(part.stored.values), "out_peak": part.handed_off.peak}
        for part in day.loads
    }
    cases = {
        "mover": day.mover,
        "dispatchers": day.dispatcher,
        "no mover for an hour": day.mover_outage,
        "no dispatcher for an hour": day.dispatcher_outage,
    }
    late = {
        name: {"late": round(item.late), "worst_s": round(item.worst_ms / 1000)}
        for name, item in cases.items()
    }
    found = {"writes": day.written, "window_peak": day.window.peak, "parts": parts, "late": late}
    print(json.dumps(found, indent=2, default=float))


if __name__ == "__main__":
    main()
