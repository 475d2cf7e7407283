"""The package's front: light, complete, and clear about what is not installed."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import delaylevel
from delaylevel import errors

HEAVY = ("pyspark", "numpy", "duckdb", "pyarrow", "pyroaring", "pandas", "py4j", "rich", "fastavro")


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules(program: str) -> set[str]:
    return set(run(f"{program}\nimport sys\nprint('\\n'.join(sys.modules))").split())


def test_the_import_is_light() -> None:
    loaded = modules("import delaylevel")
    assert "delaylevel.model.strategy" in loaded
    assert not loaded & {*HEAVY, "pulsar", "_pulsar"}


@pytest.mark.parametrize(
    "use",
    [
        "from delaylevel import DelayLevelClient, DelayLevelProducer, wrap, PartitionStrategy",
        "import delaylevel.mover.ready, delaylevel.mover.forwarder",
        "import delaylevel.cluster.reader, delaylevel.cluster.schemas",
    ],
)
def test_what_a_producer_needs_brings_no_more_than_the_client_does(use: str) -> None:
    # The client itself loads fastavro, and what that loads, where it is installed.
    brought = modules(use) - modules("import pulsar, pulsar.schema")
    assert "delaylevel" in brought
    assert not brought & set(HEAVY)


def test_every_public_name_is_there() -> None:
    for name in delaylevel.__all__:
        assert getattr(delaylevel, name) is not None, name
    assert sorted(delaylevel.__all__) == delaylevel.__all__ == dir(delaylevel)
    assert delaylevel.__version__[0].isdigit()


def test_every_lazy_name_is_public_and_the_other_way_round() -> None:
    eager = {"DelayLevelError", "Levels", "PartitionBy", "PartitionStrategy", "__version__"}
    assert set(delaylevel._LAZY) == set(delaylevel.__all__) - eager


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Timer'"):
        delaylevel.Timer  # noqa: B018


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_missing_extra_is_named(made_up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (made_up / "needs_something.py").write_text("import surely_not_installed\n")
    monkeypatch.setitem(delaylevel._LAZY, "Thing", ("needs_something", "window"))
    with pytest.raises(errors.MissingExtraError) as caught:
        delaylevel.Thing  # noqa: B018
    for part in ("delaylevel.Thing", "surely_not_installed", "pip install 'delaylevel[window]'"):
        assert part in str(caught.value)
    assert isinstance(caught.value, ImportError)


def test_what_is_missing_in_the_plain_install_is_not_called_an_extra(
    made_up: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made_up / "needs_something_else.py").write_text("import delaylevel.not_there\n")
    for extra in ("window", None):
        monkeypatch.setitem(delaylevel._LAZY, "Thing", ("needs_something_else", extra))
        with pytest.raises(ModuleNotFoundError) as caught:
            delaylevel.Thing  # noqa: B018
        assert not isinstance(caught.value, errors.MissingExtraError)


def test_all_errors_have_one_root() -> None:
    classes = [item for item in vars(errors).values() if isinstance(item, type)]
    assert len(classes) > 10
    for item in classes:
        assert issubclass(item, errors.DelayLevelError)
        # Your input is wrong, the broker misbehaved, or neither; both only for a target that is
        # not allowed.
        both = issubclass(item, errors.InvalidInputError) and issubclass(item, errors.BrokerError)
        assert both == (item is errors.TargetNotAllowedError)


PURE = [
    "model.strategy", "model.router", "model.due_time", "model.envelope", "model.level_topic",
    "model.delivery", "producer.routing", "model.topic_name", "model.position", "model.clock",
    "errors", "cluster.port", "cluster.values", "model.formatting", "model.message",
    "model.source_partition",
]  # fmt: skip


@pytest.mark.parametrize("name", PURE)
def test_the_domain_does_no_io(name: str) -> None:
    module = importlib.import_module(f"delaylevel.{name}")
    tree = ast.parse(Path(str(module.__file__)).read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = node.module or ""
            whole = {f"{package}.{alias.name}" for alias in node.names}
            imported |= whole if package == "delaylevel.model" else {package}
    for module_name in imported:
        first = module_name.partition(".")[0]
        if first == "delaylevel":
            assert module_name.partition(".")[2] in PURE
        else:
            assert first not in {"os", "socket", "pulsar", "_pulsar", "urllib3", "pathlib"}
        if name != "model.clock":
            assert first != "time"
