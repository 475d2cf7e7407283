"""Runner of the official suite: a broker for each mode, and a process for each file of tests."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

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
_TEST_SECONDS, _FILE_SECONDS = 120, 1800


def main() -> int:
    """Run the suite in all modes, and print the counts and the new failures."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    # A shell starts background jobs with SIGINT ignored, and children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The suite's configuration has settings of earlier brokers.
    logging.getLogger("delaylevel.broker.embedded").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(prog="python -m official_suite", description=__doc__)
    parser.add_argument("checkout", type=Path, help="checkout of apache/pulsar-client-python")
    checkout = parser.parse_args().checkout
    _check(checkout)
    passed: dict[str, set[str]] = {}
    for mode in MODES:
        found = run_mode(mode, checkout)
        passed[mode] = {test for test, reason in found.items() if reason is None}
        new = passed[BASELINE] - passed[mode]
        for test in sorted(new):
            print(f"  {test}: {found.get(test, 'its process was ended')}")
        counts = f"{len(passed[mode])} of {len(found)} passed, {len(new)} not that do without us"
        print(f"{mode}: {counts}", flush=True)
    return int(any(passed[BASELINE] - each for each in passed.values()))


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


def run_mode(mode: str, checkout: Path) -> dict[str, str | None]:
    """Run the tests in one mode with a new broker, and those that fail once more.

    The reason for which a test has not passed is None for one that has.
    """
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
            first = dict(_run(mode, tests, broker))
            return {**first, **dict(_run(mode, tests, broker, "--lf", "--lfnf=none"))}


def _run(
    mode: str, tests: Path, broker: SuiteBroker, *options: str
) -> Iterator[tuple[str, str | None]]:
    """Run the tests with a process for each file; yield each with its failure.

    The client keeps the loggers of one file for the whole process, and may then hang in another.
    """
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))),
        "OFFICIAL_SUITE_MODE": mode,
        "OFFICIAL_SUITE_ADMIN": broker.admin_url,
        "OFFICIAL_SUITE_TOKEN": broker.superuser,
    }
    report = tests / "report.xml"
    # Another method is a thread, which some tests would count.
    limit = [f"--timeout={_TEST_SECONDS}", "--timeout-method=signal"]
    command = [sys.executable, "-m", "pytest", "-p", "official_suite.plugin", *limit, *options]
    for file in FILES:
        report.unlink(missing_ok=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [*command, f"--junitxml={report}", file],
                cwd=tests,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                timeout=_FILE_SECONDS,
                check=False,
            )
        for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
            bad = [each for each in case if each.tag in ("failure", "error", "skipped")]
            reason = bad[0].get("message", bad[0].tag).partition("\n")[0] if bad else None
            yield f"{case.get('classname')}.{case.get('name')}", reason


if __name__ == "__main__":
    sys.exit(main())
