"""Runner of the official suite: a broker for each mode, and a process for each file of tests."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .broker import SuiteBroker, running, with_ports

TESTS = Path(__file__).resolve().parents[1]
BASELINE = "plain"
MODES = (BASELINE, "levels-off", "levels-on", "wrap")
# Those of the suite's own run-unit-tests.sh, without the one that needs Docker.
FILES = (
    "custom_logger_test.py",
    "debug_logger_test.py",
    "interrupted_test.py",
    "pulsar_test.py",
    "schema_test.py",
    "table_view_test.py",
    "reader_test.py",
    "asyncio_test.py",
)
#: Outcomes that are no fault of a mode.
GOOD = ("passed", "skipped")
_TEST_SECONDS = 120
_RESULTS, _LOG = "results.jsonl", "output.log"


@dataclass(frozen=True)
class Outcome:
    """Result of one test: passed, failed, skipped, or hung if its process ended during it."""

    test: str
    result: str
    reason: str = ""


def main() -> int:
    """Run the suite in all modes, and print the counts and the new failures."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    # A shell starts background jobs with SIGINT ignored, and children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The suite's configuration has settings of earlier brokers.
    logging.getLogger("delaylevel.broker.conf").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(prog="python -m official_suite", description=__doc__)
    parser.add_argument("checkout", type=Path, help="checkout of apache/pulsar-client-python")
    checkout = parser.parse_args().checkout
    _check(checkout)
    found: dict[str, list[Outcome]] = {}
    for mode in MODES:
        found[mode] = run_mode(mode, checkout)
        bad = [each for each in found[mode] if each.result not in GOOD]
        for each in bad if mode == BASELINE else worse(found[mode], found[BASELINE]):
            print(f"  {mode}: {each.test} ({each.result}): {each.reason.splitlines()[:1]}")
    print("\n".join(table(found)))
    return int(any(worse(outcomes, found[BASELINE]) for outcomes in found.values()))


def _check(checkout: Path) -> None:
    """Exit with a remedy if the checkout or the environment does not fit."""
    about = checkout / "pulsar" / "__about__.py"
    if not about.is_file():
        sys.exit(f"{checkout} is not a checkout of apache/pulsar-client-python: name its folder")
    installed = importlib.metadata.version("pulsar-client")
    if f"'{installed}'" not in about.read_text("utf-8").replace('"', "'"):
        sys.exit(f"check out the tag of the installed client in {checkout}: v{installed}")
    for module in ("requests", "fastavro"):
        if importlib.util.find_spec(module) is None:
            sys.exit(f"the suite imports {module}: install it in this environment")


def run_mode(mode: str, checkout: Path) -> list[Outcome]:
    """Run the tests in one mode with a new broker, and those that fail once more."""
    with tempfile.TemporaryDirectory(prefix="official-suite-") as name:
        tests = Path(name) / "tests"
        (tests / "test-conf").mkdir(parents=True)
        # Only what is run, without what earlier runs left.
        for path in (
            *FILES,
            *(f"test-conf/{one}" for one in os.listdir(checkout / "tests/test-conf")),
        ):
            (tests / path).write_bytes((checkout / "tests" / path).read_bytes())
        (tests / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        with running(Path(name), tests) as broker:
            for path in tests.glob("*.py"):
                path.write_text(with_ports(path.read_text("utf-8"), broker.ports), encoding="utf-8")
            (tests / ".test-token.txt").write_text(broker.principal, encoding="utf-8")
            first = _run_files(mode, tests, broker, FILES)
            again = [each.test for each in first if each.result not in GOOD]
            last = {each.test: each for each in _run_files(mode, tests, broker, again)}
        return [last.get(each.test, each) for each in first]


def _run_files(mode: str, tests: Path, broker: SuiteBroker, chosen: Sequence[str]) -> list[Outcome]:
    """Run tests with a process for each file, and another one for those after a hung test.

    The client keeps the loggers of one file for the whole process, and may then hang in another.
    """
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))),
        "OFFICIAL_SUITE_MODE": mode,
        "OFFICIAL_SUITE_ADMIN": broker.admin_url,
        "OFFICIAL_SUITE_TOKEN": broker.superuser,
        "OFFICIAL_SUITE_RESULTS": str(tests / _RESULTS),
    }
    # The time limit of pytest-timeout is a thread, which some tests would count.
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:timeout"]
    command += ["-p", "official_suite.plugin"]
    found: list[Outcome] = []
    for file in dict.fromkeys(test.partition("::")[0] for test in chosen):
        group = [test for test in chosen if test.partition("::")[0] == file]
        unfinished: str | None = ""
        while unfinished is not None:
            done = [f"--deselect={each.test}" for each in found]
            (tests / _RESULTS).write_text("", encoding="utf-8")
            _run([*command, *done, *group], tests, environ)
            outcomes, unfinished = parse((tests / _RESULTS).read_text("utf-8").splitlines())
            found += outcomes
            if unfinished is not None:
                found.append(Outcome(unfinished, "hung", "the process ended during the test"))
    return found


def _run(command: list[str], tests: Path, environ: Mapping[str, str]) -> None:
    """Run a process; end it if a test takes too long, with the stacks of its threads in the log."""
    with (
        (tests / _LOG).open("ab") as output,
        subprocess.Popen(
            command,
            cwd=tests,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            while process.poll() is None:
                time.sleep(0.1)
                if time.time() - (tests / _RESULTS).stat().st_mtime > _TEST_SECONDS:
                    process.send_signal(signal.SIGABRT)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(10)
                    break
        finally:
            process.kill()


def parse(lines: Iterable[str]) -> tuple[list[Outcome], str | None]:
    """Return the outcomes that the plugin has written, and the test that did not end, or None."""
    found: dict[str, Outcome] = {}
    unfinished = None
    for line in lines:
        event = json.loads(line)
        if event["result"] == "started":
            unfinished = event["test"]
            continue
        unfinished = None if event["test"] == unfinished else unfinished
        found[event["test"]] = Outcome(**event)
    return list(found.values()), unfinished


def worse(mode: Iterable[Outcome], baseline: Iterable[Outcome]) -> list[Outcome]:
    """Return the tests that do not pass in a mode although they do in the baseline."""
    passed = {each.test for each in baseline if each.result == "passed"}
    return [each for each in mode if each.result != "passed" and each.test in passed]


def table(modes: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """Return the lines of the table of counts, by mode."""
    columns = ("passed", "skipped", "failed", "hung")
    rows: list[tuple[str, ...]] = [("MODE", "TESTS", *map(str.upper, columns), "NEW")]
    for mode, outcomes in modes.items():
        results = [each.result for each in outcomes]
        counts = (str(results.count(each)) for each in columns)
        new = len(worse(outcomes, modes[BASELINE]))
        rows.append((mode, str(len(results)), *counts, str(new)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


if __name__ == "__main__":
    sys.exit(main())
