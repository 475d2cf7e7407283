"""Runner of the official suite: a broker for each mode, and a process for each file of tests."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from .broker import SuiteBroker, running, with_ports
from .dispatchers import alongside
from .outcomes import GOOD, Outcome, parse, table, worse

ROOT = Path(__file__).resolve().parents[2]
BASELINE = "plain"
WITH_LEVELS = ("levels-on", "wrap")
MODES = (BASELINE, "levels-off", *WITH_LEVELS)
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
_TEST_SECONDS = 120


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite in the chosen modes, and print the counts and the new failures."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    # A shell starts background jobs with SIGINT ignored, and children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The suite's configuration has settings of earlier brokers.
    logging.getLogger("delaylevel.broker.conf").setLevel(logging.ERROR)
    chosen = _parser().parse_args(arguments)
    _check(chosen.checkout)
    found: dict[str, list[Outcome]] = {}
    if chosen.baseline:
        stored = json.loads(chosen.baseline.read_text("utf-8"))[BASELINE]
        found[BASELINE] = [Outcome(**each) for each in stored]
    for mode in dict.fromkeys([BASELINE, *(chosen.mode or MODES)]):
        if mode not in found:
            found[mode] = run_mode(mode, chosen.checkout, FILES, chosen.select, chosen.logs)
            _report(mode, found, chosen.results)
        if mode not in WITH_LEVELS or not chosen.dispatcher:
            continue
        again = [each.test for each in worse(found[mode], found[BASELINE])]
        if again:
            ran = run_mode(mode, chosen.checkout, again, None, chosen.logs, dispatchers=True)
            served = {each.test: each for each in ran}
            name = f"{mode}, dispatcher"
            found[name] = [served.get(each.test, each) for each in found[mode]]
            _report(name, found, chosen.results)
    print("\n".join(table(found, BASELINE)))
    return int(any(worse(outcomes, found[BASELINE]) for outcomes in found.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.official_suite", description=__doc__)
    parser.add_argument("checkout", type=Path, help="checkout of apache/pulsar-client-python")
    parser.add_argument(
        "--mode", action="append", choices=MODES, help="mode to run after the baseline; all if none"
    )
    parser.add_argument(
        "--dispatcher",
        action="store_true",
        help="run the tests that fail with levels once more, with dispatchers for the level topics",
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="FILE",
        help="results of an earlier run, to take the baseline from",
    )
    parser.add_argument("--select", metavar="EXPRESSION", help="tests to run, as for pytest -k")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="folder for the tests' output")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON file for all outcomes")
    return parser


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


def run_mode(
    mode: str,
    checkout: Path,
    tests: Sequence[str],
    select: str | None = None,
    logs: Path | None = None,
    *,
    dispatchers: bool = False,
) -> list[Outcome]:
    """Run tests in one mode with a new broker, those that fail once more; return the outcomes.

    Args:
        mode: one of `MODES`.
        checkout: folder of the checkout.
        tests: files or node IDs.
        select: expression for ``pytest -k``, or None.
        logs: folder for the output of the tests, or None.
        dispatchers: True to run dispatchers for the level topics.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="official-suite-")))
        copy = folder / "tests"
        _copy(checkout / "tests", copy)
        broker = stack.enter_context(running(folder, copy))
        for path in copy.glob("*.py"):
            path.write_text(with_ports(path.read_text("utf-8"), broker.ports), encoding="utf-8")
        (copy / ".test-token.txt").write_text(broker.principal, encoding="utf-8")
        if dispatchers:
            service_url = f"pulsar://localhost:{broker.ports[6650]}"
            stack.enter_context(alongside(broker, service_url, folder / "spill"))
        try:
            first = _run_files(mode, copy, broker, tests, select)
            again = [each.test for each in first if each.result not in GOOD]
            second = _run_files(mode, copy, broker, again)
        finally:
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
                shutil.copy(copy / "output.log", logs / f"{mode}{'-dispatcher' * dispatchers}.log")
        last = {each.test: replace(each, attempts=2) for each in second}
        return [last.get(each.test, each) for each in first]


def _copy(source: Path, target: Path) -> None:
    """Copy the tests, without those that are not run and without what earlier runs left."""
    target.mkdir()
    for file in FILES:
        (target / file).write_bytes((source / file).read_bytes())
    (target / "test-conf").mkdir()
    for path in (source / "test-conf").iterdir():
        (target / "test-conf" / path.name).write_bytes(path.read_bytes())
    (target / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")


def _run_files(
    mode: str, tests: Path, broker: SuiteBroker, chosen: Sequence[str], select: str | None = None
) -> list[Outcome]:
    """Run tests with a process for each file, as the suite's own script does.

    The client keeps the loggers of one file for the whole process, and may then hang in another.
    """
    files: dict[str, list[str]] = {}
    for test in chosen:
        files.setdefault(test.partition("::")[0], []).append(test)
    return [
        outcome
        for group in files.values()
        for outcome in _run_tests(mode, tests, broker, group, select)
    ]


def _run_tests(
    mode: str, tests: Path, broker: SuiteBroker, chosen: Sequence[str], select: str | None
) -> list[Outcome]:
    """Run tests in one process, and those after a hung test in another one."""
    found: list[Outcome] = []
    while True:
        results = tests / "results.jsonl"
        results.write_text("", encoding="utf-8")
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "OFFICIAL_SUITE_MODE": mode,
            "OFFICIAL_SUITE_ADMIN": broker.admin_url,
            "OFFICIAL_SUITE_TOKEN": broker.superuser,
            "OFFICIAL_SUITE_RESULTS": str(results),
        }
        command = _command(chosen, select, [each.test for each in found])
        _run(command, tests, environ, results)
        outcomes, unfinished = parse(results.read_text("utf-8").splitlines())
        found += outcomes
        if unfinished is None:
            return found
        found.append(Outcome(unfinished, "hung", "the process ended during the test"))


def _command(chosen: Sequence[str], select: str | None, done: list[str]) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--durations=8"]
    # The time limit of pytest-timeout is a thread, which some tests would count.
    command += ["-p", "no:timeout", "-p", "tools.official_suite.plugin"]
    command += ["-k", select] if select else []
    return [*command, *(f"--deselect={test}" for test in done), *chosen]


def _run(command: list[str], tests: Path, environ: Mapping[str, str], results: Path) -> None:
    """Run a process; end it, with the stacks of its threads in the log, if a test takes too long.

    Args:
        results: file to which the process writes at the start and end of each test.
    """
    with (
        (tests / "output.log").open("ab") as output,
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
                if time.time() - results.stat().st_mtime > _TEST_SECONDS:
                    process.send_signal(signal.SIGABRT)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(10)
                    break
        finally:
            process.kill()


def _report(mode: str, found: Mapping[str, list[Outcome]], results: Path | None) -> None:
    """Print the failures of a mode, those of the baseline left out, and store all outcomes."""
    if results is not None:
        text = {name: [asdict(each) for each in outcomes] for name, outcomes in found.items()}
        results.write_text(json.dumps(text), encoding="utf-8")
    shown = worse(found[mode], found[BASELINE])
    if mode == BASELINE:
        shown = [each for each in found[mode] if each.result not in GOOD]
    print(f"{mode}: {len(shown)} {'' if mode == BASELINE else 'new '}failures")
    for each in shown:
        reason = (each.reason.splitlines() or [""])[0]
        print(f"  {each.name} ({each.result}): {reason[:240]}")
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
