"""The table of tested versions and the bounds in setup.cfg agree."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

from delaylevel.broker.distribution import PULSAR_VERSION

ROOT = Path(__file__).parents[2]
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


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", "utf-8")
    return parser


def test_each_version_was_tried_once() -> None:
    assert len({row[:2] for row in ROWS}) == len(ROWS) > 9
    assert {row[0] for row in ROWS} == {"Pulsar server", "pulsar-client", "Python", "PySpark"}
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\d", row[-1]) for row in ROWS)
    assert PULSAR_VERSION in {version for title, version, *_ in ROWS if title == "Pulsar server"}


def test_the_tests_that_are_run_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    chosen = makefile.partition("VERSION_TESTS = ")[2].partition("\n\n")[0]
    found = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", chosen)
    assert len(found) > 10
    for path, name in found:
        assert f"def {name}" in (ROOT / path).read_text("utf-8"), f"{path}::{name}"


@pytest.mark.parametrize("package", ["pulsar-client", "PySpark"])
def test_the_bounds_admit_what_passes(setup: configparser.ConfigParser, package: str) -> None:
    options = setup["options"]["install_requires"] + setup["options.extras_require"]["spark"]
    lines = [line for line in options.splitlines() if line.startswith(package.lower())]
    assert len(lines) == 1
    found = re.search(r">=([\d.]+),<([\d.]+)", lines[0])
    assert found, lines[0]
    low, high = key(found[1]), key(found[2])
    assert passing(package)
    assert all(low <= each[: len(low)] and each < high for each in passing(package))


def test_the_pythons_that_are_named_pass(setup: configparser.ConfigParser) -> None:
    named = re.findall(r"Python :: (3\.\d+)", setup["metadata"]["classifiers"])
    assert passing("Python") == set(map(key, named))
    assert setup["options"]["python_requires"] == f">={named[0]}"
