"""Tests of the package itself: light imports, public names, missing extras, and error classes."""

from __future__ import annotations

from pathlib import Path

import pytest

import delaylevel
from delaylevel import errors
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
