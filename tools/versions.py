"""Run a selection of the tests with other versions of Pulsar, its client, Python and PySpark.

python tools/versions.py                  # every row of docs/versions.md that this machine can
python tools/versions.py broker=3.3.6 python=3.12

Each run differs from this environment in one version, and takes about three minutes. It prints a
row for the table in docs/versions.md. Servers come from Maven and packages from pip, into an
environment of its own for each version in build/versions.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

from delaylevel.broker.distribution import PULSAR_VERSION, fetch

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "versions"
VERSIONS = {
    "broker": ("3.3.6", "4.0.6", PULSAR_VERSION),
    "client": ("3.13.0",),
    "python": ("3.10", "3.11", "3.12", "3.13"),
    "pyspark": ("4.2.0", "4.3.0"),
}
# Flows on a real broker, a mover that dies, the dispatcher, cancellations, listeners, and tests
# that failed on one of the versions before.
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
    "tests/integration/functions/test_function_moves.py::test_every_message_arrives_as_it_was_sent",
)
SPARK = (
    "tests/integration/night/test_spark_levels.py::test_every_delay_is_delivered_on_time",
    "tests/integration/test_spark_levels.py::test_a_late_trigger",
)
TESTS = {"broker": CORE, "client": CORE, "python": (*CORE, *SPARK), "pyspark": (CORE[3], *SPARK)}
PACKAGES = ("hypothesis", "psutil", "pytest", "pytest-timeout", "pytest-xdist")
EXTRAS = "spark,functions,window,inspect,metrics,avro"
_TIMEOUT_S = 1500


def interpreter(version: str) -> str | None:
    """Return the program of a Python version, on the PATH or of pyenv; None if there is none."""
    if version == "{}.{}".format(*sys.version_info):
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    own = sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))
    return own[-1] if own else shutil.which(f"python{version}")


def environment(axis: str, version: str) -> Path | None:
    """Return the Python program of an environment with this version; None without its Python."""
    usual = "{}.{}".format(*sys.version_info)
    program = interpreter(version if axis == "python" else usual)
    if program is None:
        return None
    if axis == "broker":
        fetch(print, version)
        return Path(program)
    folder = FOLDER / f"{axis}-{version}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        if axis == "python":
            subprocess.run([program, "-m", "venv", folder], check=True)
        else:
            venv.create(folder, with_pip=True)
        name = {"client": "pulsar-client", "pyspark": "pyspark"}.get(axis)
        pinned = [f"{name}=={version}"] if name else []
        command = [python, "-m", "pip", "install", "-q", "-e", f".[{EXTRAS}]", *PACKAGES, *pinned]
        subprocess.run(command, cwd=ROOT, check=True)
        (folder / "ready").touch()
    return python


def run(axis: str, version: str) -> int:
    """Run the tests of a version, and print its row; return pytest's exit code."""
    python = environment(axis, version)
    if python is None:
        print(f"Python {version} is not on the PATH: left out")
        return 0
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    environ["DELAYLEVEL_TEST_BROKER_VERSION"] = version if axis == "broker" else PULSAR_VERSION
    environ["PATH"] = f"{python.parent}{os.pathsep}{environ['PATH']}"
    environ["PYSPARK_PYTHON"] = environ["PYSPARK_DRIVER_PYTHON"] = str(python)
    command = [python, "-m", "pytest", *TESTS[axis], "-q", "-p", "no:cacheprovider", "--tb=short"]
    done = subprocess.run(
        [*map(str, command), "-rfE"],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    print(done.stdout)
    passed = re.search(r"(\d+) passed", done.stdout)
    day = datetime.datetime.now(datetime.timezone.utc).date()
    result = f"**exit code {done.returncode}**" if done.returncode else "passes"
    count = passed[1] if passed else 0
    print(f"| {axis} | {version} | {count} | {result} | {day} |", flush=True)
    return done.returncode


def main(chosen: list[str]) -> int:
    """Run what the arguments choose; return 1 if something failed."""
    pairs = [each.partition("=")[::2] for each in chosen]
    pairs = pairs or [(axis, each) for axis, versions in VERSIONS.items() for each in versions]
    wrong = {axis for axis, version in pairs if axis not in VERSIONS or not version}
    if wrong:
        raise SystemExit(f"{sorted(wrong)}: use AXIS=VERSION, with one of {list(VERSIONS)}")
    print("installed:", *(f"{one} {metadata.version(one)}" for one in ("pulsar-client", "pyspark")))
    return int(bool(sum(run(axis, version) for axis, version in pairs)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
