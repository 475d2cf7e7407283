"""Tests of packages, Python and token of executors."""

from __future__ import annotations

import configparser
import importlib
import logging
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

pytest.importorskip("pyspark")

from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import ConfigError
from delaylevel.spark_sync import Executors, cluster
from delaylevel.spark_sync.cluster import FOLDER, distributions, pack

NAME = f"python{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(tmp_path_factory.mktemp("archives"))


def test_requirements_are_found_without_those_of_spark() -> None:
    found = distributions(["pydantic", "pulsar-client"])
    assert {"certifi", "pydantic-core", "typing-extensions"} <= set(found)
    assert not {"pyspark", "py4j", "delaylevel"} & set(distributions(["pyspark", "pydantic"]))
    assert "fastavro" not in found, "an extra of pulsar-client that is not required"


@pytest.mark.parametrize("version", [(3, 10), (3, 11), (3, 13)])
def test_the_archive_has_every_requirement_of_the_python_version(
    version: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load the module as another Python version does: executors have the driver's version."""
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[3] / "setup.cfg")
    needed = set()
    extra = setup["options.extras_require"]["spark"].split("\n")
    for line in [*setup["options"]["install_requires"].split("\n"), *extra]:
        requirement, _, marker = line.partition(";")
        name = re.match(r"[\w.-]+", requirement.strip())
        assert marker.strip() in ("", 'python_version < "3.11"')
        if name is not None and (not marker or version < (3, 11)):
            needed.add(name.group())
    monkeypatch.setattr(sys, "version_info", (*version, 0, "final", 0))
    assert set(importlib.reload(cluster).ROOTS) == needed - {"pyspark"}
    monkeypatch.undo()
    importlib.reload(cluster)


def test_a_package_that_is_not_installed_cannot_be_shipped() -> None:
    with pytest.raises(ConfigError, match="no-such-package is not installed"):
        distributions(["pydantic", "no-such-package"])


def test_the_archive_has_all_parts_and_no_tests(archive: Path) -> None:
    names = set(zipfile.ZipFile(archive).namelist())
    assert {
        "delaylevel/__init__.py",
        "delaylevel/spark_sync/source.py",
        "delaylevel/spark_sync/log4j2.properties",
        "delaylevel/cli/mover.py",
        "pulsar/__init__.py",
        "pyarrow/__init__.py",
    } <= names
    assert not [name for name in names if name.startswith(("pyspark/", "py4j/", "..", "/"))]
    assert not [name for name in names if "/tests/" in name or name.endswith(".pyc")]


def test_the_archive_alone_runs_the_workers_code(archive: Path, tmp_path: Path) -> None:
    """Run it in a Python that has only Spark's own zips, as on an executor."""
    zipfile.ZipFile(archive).extractall(tmp_path)
    import pyspark

    lib = Path(pyspark.__file__).parent / "python" / "lib"
    program = (
        "import sys, delaylevel, delaylevel.spark_sync.source, pulsar\n"
        "import pyarrow\n"
        f"assert delaylevel.__file__.startswith({str(tmp_path)!r}), delaylevel.__file__\n"
        f"assert pyarrow.__file__.startswith({str(tmp_path)!r}), pyarrow.__file__\n"
    )
    path = [str(tmp_path), *(str(item) for item in sorted(lib.glob("*.zip")))]
    done = subprocess.run(
        [os.path.realpath(sys.executable), "-S", "-c", program],
        env={"PYTHONPATH": ":".join(path), "PATH": os.environ["PATH"]},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_an_archive_is_created_once_and_again_after_a_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = tmp_path / "module.py"
    module.write_text("first")
    monkeypatch.setattr(cluster, "ROOTS", ("platformdirs",))
    files = [("delaylevel/module.py", module)]
    monkeypatch.setattr(cluster.installed, "project_files", lambda _: files)
    folder = tmp_path / "archives"
    first = pack(folder)
    written = first.stat().st_mtime_ns
    assert pack(folder) == first
    assert first.stat().st_mtime_ns == written
    assert [path.name for path in folder.iterdir()] == [first.name], (
        "there are other files besides the archive"
    )

    module.write_text("second one")
    second = pack(folder)
    assert second != first
    assert zipfile.ZipFile(second).read("delaylevel/module.py") == b"second one"


def test_executors_find_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Path("/cache/delay level/packages.zip")
    monkeypatch.setattr(cluster, "pack", lambda folder, extra: archive)
    executors = Executors()
    assert cluster.cluster_conf(executors, {}) == {
        "spark.archives": f"{archive.as_uri()}#{FOLDER}",
        "spark.executorEnv.PYTHONPATH": FOLDER,
    }
    own = {"spark.archives": "a.zip#a", "spark.executorEnv.PYTHONPATH": "a"}
    assert cluster.cluster_conf(executors, own) == {
        "spark.archives": f"a.zip#a,{archive.as_uri()}#{FOLDER}",
        "spark.executorEnv.PYTHONPATH": f"{FOLDER}:a",
    }
    assert cluster.cluster_conf(Executors(ship=False), own) == {}


def test_the_python_of_executors_is_found_in_their_path() -> None:
    executors = Executors(ship=False, python=f"/opt/python/bin/{NAME}")
    conf = cluster.cluster_conf(executors, {})
    assert conf["spark.executorEnv.PATH"].split(":")[0] == "/opt/python/bin"
    environment = cluster.python_environment(executors)
    assert environment["PYSPARK_PYTHON"] == NAME
    assert environment["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    with pytest.raises(ConfigError, match="there is no python9 next to"):
        cluster.python_environment(Executors(python="/opt/python/bin/python9"))


@pytest.mark.parametrize(
    ("master", "local"),
    [
        ("local", True),
        ("local[2]", True),
        ("local[*,3]", True),
        ("local-cluster[2,1,1024]", False),
        ("spark://localhost:7077", False),
        ("yarn", False),
    ],
)
def test_only_a_local_master_runs_in_the_driver(master: str, local: bool) -> None:
    assert cluster.is_local(master) is local


class Log4j:
    """A fake Log4j with some loggers at DEBUG, which records the levels that are set."""

    def __init__(self, *at_debug: str) -> None:
        self.levels: dict[str, str] = {}
        self.Level = SimpleNamespace(INFO="INFO")
        self.LogManager = SimpleNamespace(
            getLogger=lambda name: SimpleNamespace(isDebugEnabled=lambda: name in at_debug)
        )
        configurator = SimpleNamespace(setLevel=self.levels.__setitem__)
        self.core = SimpleNamespace(config=SimpleNamespace(Configurator=configurator))


def test_the_token_goes_into_the_workers_environment_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Keep it out of the logs that would show that environment."""
    environment = {"PATH": "executors only", "PYTHONPATH": FOLDER, "OTHER": "kept"}
    registration = "org.apache.spark.sql.DataSourceRegistration"
    log4j = Log4j(registration)
    jvm = SimpleNamespace(
        org=SimpleNamespace(apache=SimpleNamespace(logging=SimpleNamespace(log4j=log4j)))
    )
    context = SimpleNamespace(environment=environment, _jvm=jvm)
    session: Any = SimpleNamespace(sparkContext=context)
    caplog.set_level(logging.DEBUG, "py4j")
    cluster.enter_environment(session, Connection(token=SecretStr("t0ken")))
    assert environment == {"OTHER": "kept", "DELAYLEVEL_TOKEN": "t0ken"}
    assert log4j.levels == {registration: "INFO"}
    assert not logging.getLogger("py4j.clientserver").isEnabledFor(logging.DEBUG)
    cluster.enter_environment(session, Connection())
    assert environment["DELAYLEVEL_TOKEN"] == "t0ken"
