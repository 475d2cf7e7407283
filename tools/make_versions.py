"""The versions of Pulsar, its client, Python and PySpark that pass: docs/versions.json and .md.

python tools/make_versions.py                       # run everything that this machine has
python tools/make_versions.py --axis client         # one axis
python tools/make_versions.py --axis broker --version 3.3.6
python tools/make_versions.py --page                # only write the page from the results

Every axis is run with the default of the others: its tests in `TESTS`, on a real broker. A run
takes about three minutes. Servers come from Maven, packages from pip; both stay in the cache
directory. `--forget` deletes the packages. With `--strict`, a failed test fails the program.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from delaylevel.broker.distribution import DIRECTORIES, PULSAR_VERSION, fetch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
BEGIN = "<!-- versions: written by tools/make_versions.py from versions.json. Do not edit. -->"
END = "<!-- end of versions -->"
CACHE = Path(DIRECTORIES.user_cache_dir) / "versions"

#: The versions of each axis that are run by default.
VERSIONS = {
    "broker": ("3.3.6", "4.0.6", PULSAR_VERSION),
    "client": ("3.13.0",),
    "python": ("3.10", "3.11", "3.12", "3.13"),
    "pyspark": ("4.2.0", "4.3.0"),
}
TITLES = {
    "broker": "Pulsar server",
    "client": "pulsar-client",
    "python": "Python",
    "pyspark": "PySpark",
}
#: Flows on a real broker, a mover that dies, the dispatcher, cancellations, listeners, and tests
#: that failed on one of the versions before.
CORE = (
    "tests/contract/test_flows.py",
    "tests/unit/cluster/test_client_parts.py",
    "tests/unit/topics/test_scan.py",
    "tests/unit/spark_sync/test_executors.py",
    "tests/unit/model/test_formatting.py",
    "tests/integration/test_cancel_dispatched.py",
    "tests/integration/test_dispatcher.py::test_every_field_of_a_message_arrives",
    "tests/integration/test_mover_bounds.py::test_a_mover_that_dies_before_it_acknowledges",
    "tests/integration/consumer/night/test_listeners.py::test_every_message_is_handled_and_acknowledged",
    "tests/integration/consumer/night/test_listeners.py::test_a_retried_message_is_handled_again",
)
FUNCTION = (
    "tests/integration/functions/test_function_moves.py::test_every_message_arrives_as_it_was_sent",
)
SPARK = (
    "tests/unit/spark_sync/test_executors.py",
    "tests/integration/night/test_spark_levels.py::test_every_delay_is_delivered_on_time",
    "tests/integration/test_spark_levels.py::test_a_late_trigger",
)
#: What is run on each axis.
TESTS = {
    "broker": (*CORE, *FUNCTION),
    "client": (*CORE, *FUNCTION),
    "python": (*CORE, *FUNCTION, *SPARK[1:]),
    "pyspark": SPARK,
}
#: Packages of the tests, in addition to the package's own extras.
TEST_PACKAGES = ("hypothesis", "psutil", "pytest", "pytest-timeout", "pytest-xdist")
EXTRAS = "spark,functions,window,inspect,metrics,avro"
_TIMEOUT_S = 1500


@dataclass(frozen=True)
class Setting:
    """The versions of one run."""

    broker: str
    client: str
    python: str
    pyspark: str


@dataclass
class Run:
    """The result of one run.

    Attributes:
        axis: the axis whose version differs from the default; `default` if none does.
        setting: all versions.
        passed, skipped: numbers of tests.
        failed: names of the tests that failed, or a line about a run without tests.
        seconds: duration of the tests.
        date: day of the run, UTC.
    """

    axis: str
    setting: Setting
    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    seconds: int = 0
    date: str = ""

    @property
    def version(self) -> str:
        """The version of the axis."""
        return str(asdict(self.setting)[self.axis])

    @property
    def passes(self) -> bool:
        """True if every test passed."""
        return bool(self.passed) and not self.failed


def default() -> Setting:
    """Return the versions of this environment."""
    python = "{}.{}".format(*sys.version_info)
    installed = {name: metadata.version(name) for name in ("pulsar-client", "pyspark")}
    return Setting(PULSAR_VERSION, installed["pulsar-client"], python, installed["pyspark"])


def key(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, for sorting."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


# -- environments


def command(*words: str | Path, env: dict[str, str] | None = None) -> None:
    """Run a command; raise with the end of its output if it fails."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}:\n{(done.stdout + done.stderr)[-1500:]}")


def interpreter(version: str) -> str | None:
    """Return the program of a Python version, on the PATH or of pyenv; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    own = sorted(pyenv.glob(f"{version}.*/bin/python"), key=lambda path: key(str(path)))
    for found in (shutil.which(f"python{version}"), shutil.which("python3"), *map(str, own)):
        if found is None:
            continue
        program = "import sys; print('{}.{}'.format(*sys.version_info))"
        told = subprocess.run([found, "-c", program], capture_output=True, text=True, check=False)
        if told.stdout.strip() == version:
            return found
    return None


def base(python: str) -> Path | None:
    """Return the Python program of an environment with the package; None without this Python."""
    if python == default().python:
        return Path(sys.executable)
    program = interpreter(python)
    if program is None:
        return None
    folder = CACHE / f"python-{python}"
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        command(program, "-m", "venv", folder)
        pip = (folder / "bin" / "python", "-m", "pip", "install", "-q")
        command(*pip, "-e", f".[{EXTRAS}]", *TEST_PACKAGES)
        (folder / "ready").touch()
    return folder / "bin" / "python"


def overlay(python: Path, version: str, package: str, wanted: str) -> Path:
    """Return a folder with one package, which goes before those of the environment."""
    folder = CACHE / f"{package}-{wanted}-python-{version}"
    if not folder.exists():
        scratch = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(scratch, ignore_errors=True)
        pip = (python, "-m", "pip", "install", "-q", "--no-warn-conflicts", "--target", scratch)
        command(*pip, f"{package}=={wanted}")
        scratch.rename(folder)
    return folder


def prepare(setting: Setting) -> tuple[Path, dict[str, str]] | None:
    """Return the Python program and the variables of a run; None without its Python."""
    python = base(setting.python)
    if python is None:
        return None
    environ = {**os.environ, "DELAYLEVEL_TEST_BROKER_VERSION": setting.broker}
    environ["PATH"] = f"{python.parent}{os.pathsep}{environ['PATH']}"
    environ["PYTHONDONTWRITEBYTECODE"] = "1"
    fetch(print, setting.broker)
    here, paths = default(), []
    if setting.client != here.client:
        paths.append(overlay(python, setting.python, "pulsar-client", setting.client))
    if setting.python == here.python and setting.pyspark != here.pyspark:
        paths.append(overlay(python, setting.python, "pyspark", setting.pyspark))
        environ["SPARK_HOME"] = str(paths[-1] / "pyspark")
    if paths:
        environ["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    return python, environ


# -- runs


def settings(axis: str, versions: list[str]) -> list[tuple[str, Setting]]:
    """Return the runs of one axis, oldest version first."""
    usual = default()
    chosen = versions or VERSIONS[axis]
    return [(axis, replace(usual, **{axis: each})) for each in sorted(set(chosen), key=key)]


def run(axis: str, setting: Setting) -> Run | None:
    """Run the tests with these versions; return None if this machine lacks the Python."""
    result = Run(
        axis, setting, date=datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    )
    try:
        prepared = prepare(setting)
    except Exception as error:
        result.failed = [str(error).strip().splitlines()[-1][:200]]
        print(error, file=sys.stderr)
        return result
    if prepared is None:
        return None
    python, environ = prepared
    result.setting = replace(setting, pyspark=_installed(python, environ, "pyspark"))
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = [python, "-m", "pytest", *TESTS[axis], "-q", "-p", "no:cacheprovider", "--tb=short"]
        log = CACHE / f"{axis}-{result.version}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            process = subprocess.Popen(
                [*words, f"--junitxml={report}"],
                cwd=ROOT,
                env=environ,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                process.wait(_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                result.failed = [f"not finished within {_TIMEOUT_S} s"]
        result.seconds = round(time.monotonic() - started)
        if report.exists():
            read_report(result, report)
        elif not result.failed:
            result.failed = [f"pytest ended with code {process.returncode} and without a report"]
    return result


def _installed(python: Path, environ: dict[str, str], package: str) -> str:
    program = f"from importlib import metadata; print(metadata.version({package!r}))"
    words = [str(python), "-c", program]
    told = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    return told.stdout.strip()


def read_report(result: Run, report: Path) -> None:
    """Count the tests of a report in JUnit's format."""
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        if tags & {"failure", "error"}:
            module = (case.get("classname") or "").rpartition(".")[2]
            result.failed.append(f"{module}::{case.get('name')}")
        elif "skipped" in tags:
            result.skipped += 1
        else:
            result.passed += 1
    result.failed = sorted(set(result.failed))


# -- results and page


def load() -> dict[str, Any]:
    """Return the stored results; empty ones if there are none."""
    if not RESULTS.exists():
        return {"notes": {}, "runs": []}
    stored: dict[str, Any] = json.loads(RESULTS.read_text("utf-8"))
    return stored


def runs_of(stored: dict[str, Any]) -> list[Run]:
    """Return the stored runs, by axis and version."""
    return in_order(Run(**{**run, "setting": Setting(**run["setting"])}) for run in stored["runs"])


def in_order(runs: Iterable[Run]) -> list[Run]:
    """Return runs by axis and version."""
    axes = list(VERSIONS)
    return sorted(runs, key=lambda each: (axes.index(each.axis), key(each.version)))


def store(result: Run) -> None:
    """Replace the stored result of the same axis and version."""
    stored = load()
    place = result.axis, result.version
    kept = [each for each in runs_of(stored) if (each.axis, each.version) != place]
    stored["runs"] = [asdict(each) for each in in_order([*kept, result])]
    RESULTS.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def table(stored: dict[str, Any]) -> str:
    """Return the generated part of the page."""
    runs = runs_of(stored)
    lines = [
        BEGIN,
        "",
        "| | version | tests passed | result | with | date |",
        "|---|---|---|---|---|---|",
    ]
    for each in runs:
        rest = {name: value for name, value in asdict(each.setting).items() if name != each.axis}
        others = ", ".join(f"{TITLES[name]} {value}" for name, value in rest.items())
        note = stored["notes"].get(f"{each.axis} {each.version}", "")
        outcome = "passes" if each.passes else f"**{len(each.failed)} failed**"
        outcome += f": {note}" if note else ""
        title = TITLES[each.axis]
        lines.append(
            f"| {title} | {each.version} | {each.passed} | {outcome} | {others} | {each.date} |"
        )
    failures = [
        f"- {TITLES[each.axis]} {each.version}: `{name}`" for each in runs for name in each.failed
    ]
    if failures:
        lines += ["", "Failed tests:", "", *failures]
    return "\n".join([*lines, "", END])


def page(text: str, stored: dict[str, Any]) -> str:
    """Return the text of the page with the present results."""
    before, _, rest = text.partition(BEGIN)
    return before + table(stored) + rest.partition(END)[2]


def main() -> int:
    """Run what the arguments choose, store each result, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--axis", choices=VERSIONS, help="axis to run; all by default")
    parser.add_argument("--version", action="append", default=[], help="version on this axis")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a test failed")
    parser.add_argument("--forget", action="store_true", help="delete the environments afterwards")
    chosen = parser.parse_args()
    failed = False
    if not chosen.page:
        if chosen.version and not chosen.axis:
            parser.error("--version needs --axis")
        for axis in [chosen.axis] if chosen.axis else VERSIONS:
            for _, setting in settings(axis, chosen.version):
                print(f"{TITLES[axis]} {asdict(setting)[axis]} ...", flush=True)
                result = run(axis, setting)
                if result is None:
                    print(f"  Python {setting.python} is not on the PATH: left out")
                    continue
                failed = failed or not result.passes
                store(result)
                print(f"  {result.passed} passed in {result.seconds} s", *result.failed, sep="\n  ")
    PAGE.write_text(page(PAGE.read_text("utf-8"), load()), encoding="utf-8")
    if chosen.forget:
        shutil.rmtree(CACHE, ignore_errors=True)
    return int(failed and chosen.strict)


if __name__ == "__main__":
    sys.exit(main())
