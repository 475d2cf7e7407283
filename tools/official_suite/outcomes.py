"""Outcomes of one run of the suite, their comparison with the baseline, and the table of counts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

#: Outcomes that are no fault of a mode.
GOOD = ("passed", "skipped")
_COLUMNS = ("passed", "skipped", "failed", "hung")


@dataclass(frozen=True)
class Outcome:
    """Result of one test.

    Attributes:
        test: its node ID, as in ``pulsar_test.py::PulsarTest::test_seek``.
        result: ``passed``, ``failed``, ``skipped``, or ``hung``: its process ended during the test,
            because of a crash or the time limit.
        reason: the last line of the error; empty if it passed.
        attempts: number of attempts, of which the last one counts.
    """

    test: str
    result: str
    reason: str = ""
    attempts: int = 1

    @property
    def name(self) -> str:
        """Short name of the test, with its file."""
        return f"{self.test.partition('.py')[0]}::{self.test.rpartition('::')[2]}"


def parse(lines: Iterable[str]) -> tuple[list[Outcome], str | None]:
    """Return the outcomes that the plugin has written, and the test that was started last.

    The second value is None if that test has ended.
    """
    found: dict[str, Outcome] = {}
    running = None
    for line in lines:
        event = json.loads(line)
        if event["result"] == "started":
            running = event["test"]
            continue
        running = None if event["test"] == running else running
        found[event["test"]] = Outcome(event["test"], event["result"], event["reason"])
    return list(found.values()), running


def worse(mode: Iterable[Outcome], baseline: Iterable[Outcome]) -> list[Outcome]:
    """Return the tests that do not pass in a mode although they do in the baseline."""
    passed = {each.test for each in baseline if each.result == "passed"}
    return [each for each in mode if each.result != "passed" and each.test in passed]


def count(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Return the number of tests by result."""
    counts = dict.fromkeys(_COLUMNS, 0)
    for each in outcomes:
        counts[each.result] += 1
    return counts


def table(modes: Mapping[str, Sequence[Outcome]], baseline: str) -> list[str]:
    """Return the lines of the table of counts, by mode and by kind of client."""
    header = ("mode", "client", "tests", *_COLUMNS, "new failures")
    rows: list[tuple[str, ...]] = [header]
    for mode, outcomes in modes.items():
        asyncio = [each for each in outcomes if each.test.startswith("asyncio_test")]
        for kind, chosen in (
            ("sync", [each for each in outcomes if each not in asyncio]),
            ("asyncio", asyncio),
        ):
            new = "" if mode == baseline else str(len(worse(chosen, modes.get(baseline, ()))))
            counts = [str(number) for number in count(chosen).values()]
            rows.append((mode, kind, str(len(chosen)), *counts, new))
    widths = [max(len(row[index]) for row in rows) for index in range(len(header))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return [lines[0].upper(), *lines[1:]]
