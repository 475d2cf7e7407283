"""Publishing delayed messages of 1 KiB from Java: the Java producer, and the plain Java client.

Each side sends the same messages as bench_publish.py. "plain client" is the Java client with
deliverAfter, "no delay" the same client without delays. "Python wrapper" is for comparison, with a
callback in C. At most 5,000 messages are outstanding. Rates are from the first send until all
messages are stored. A round before the first one warms up.

Examples:
    python benchmarks/bench_java.py
    python benchmarks/bench_java.py --messages 5000 --rounds 1 --json java.json
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from baselines import Case
from bench_publish import FIXED, MIXED, make, publish
from common import arguments, connected, in_turn, private_broker, rate_row, report

from delaylevel.broker.distribution import distribution_directory, java
from delaylevel.cluster.connection.settings import Connection

SOURCES = Path(__file__).parents[1] / "clients" / "java" / "src"
SIDES = ("wrapper", "plain", "undelayed")
NAMES = {"wrapper": "Java producer", "plain": "plain client", "undelayed": "no delay"}


class JavaBench:
    """The Java program that measures (Bench.java).

    Args:
        connection: the broker.
        folder: a folder for the compiled classes.
    """

    def __init__(self, connection: Connection, folder: str) -> None:
        libraries = f"{distribution_directory()}/lib/*"
        files = [*(SOURCES / "main").rglob("*.java"), *(SOURCES / "test").rglob("Bench.java")]
        compiler = ["javac", "-d", folder, "-cp", libraries, "-encoding", "UTF-8"]
        subprocess.run([*compiler, *map(str, files)], check=True)
        program = [java(), "-Xmx512m", "-cp", f"{folder}:{libraries}", "delaylevel.client.Bench"]
        self._process = subprocess.Popen(
            [*program, connection.service_url, connection.admin_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def rate(self, side: str, topic: str, messages: int, delays: Sequence[timedelta]) -> float:
        """Send messages and wait until they are stored; return messages per second."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        in_ms = ",".join(str(int(each.total_seconds() * 1000)) for each in delays)
        self._process.stdin.write(f"{side} {topic} {messages} {in_ms}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("rate "):  # the client logs to the same stream
                return float(line.split()[1])
        raise RuntimeError("the Java program ended")

    def close(self) -> None:
        """Stop the program."""
        self._process.kill()
        self._process.communicate()


def run(given: Any) -> list[Case]:
    """Measure fixed and mixed delays."""
    rows: list[Case] = []
    with (
        private_broker() as connection,
        connected(connection) as client,
        tempfile.TemporaryDirectory() as folder,
    ):
        bench = JavaBench(connection, folder)
        for kind, delays in (("one delay", FIXED), ("29 delays in turn", MIXED)):
            python = make(client, wrapped=True)
            # The level topic of a Python producer also serves the Java producer.
            topics = {side: make(client, side == "wrapper").topic() for side in SIDES}

            def of(side: str, delays: Sequence[timedelta] = delays) -> Callable[[], float]:
                topic = topics[side]  # noqa: B023, called in this round only
                return lambda: bench.rate(side, topic, given.messages, delays)

            sides = {NAMES[side]: of(side) for side in SIDES}
            sides["Python wrapper"] = lambda python=python, delays=delays: publish(  # type: ignore[misc]
                python, delays, given.messages, "C"
            )
            for measure in sides.values():
                measure()  # compiles the code, and opens all producers
            rates = in_turn({f"{kind}, {name}": each for name, each in sides.items()}, given.rounds)
            found = dict(zip(sides, rates.values(), strict=True))
            rows += [
                {"delays": kind, **rate_row(name, each, found["plain client"])}
                for name, each in found.items()
            ]
        bench.close()
    return rows


if __name__ == "__main__":
    options = arguments(__doc__, messages=60_000, rounds=3).parse_args()
    report(run(options), options.json)
