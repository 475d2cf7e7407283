"""Tests of whole runs: one without a fault in the product, and some with one put back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torture.faults import ALL, named

TESTS = Path(__file__).parents[1]
SEED = int(os.environ.get("TORTURE_SEED", "0"))


def run(path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run ``python -m torture``; return its exit code and its result."""
    command = [sys.executable, "-m", "torture", "--json", str(path), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(process.stderr[-6_000:])
    print(process.stdout)
    return process.returncode, json.loads(path.read_text()) if path.exists() else {}


def test_the_faults_have_names_of_their_own() -> None:
    names = [fault.name for fault in ALL]
    assert len(set(names)) == len(names)
    assert named(()) == ALL
    assert [fault.name for fault in named((names[3],))] == [names[3]]
    with pytest.raises(ValueError, match="no fault earthquake; known: kill dispatcher"):
        named(("earthquake",))


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.spark
@pytest.mark.timeout(1800)
def test_five_minutes_of_faults_lose_copy_and_change_nothing(tmp_path: Path) -> None:
    code, result = run(tmp_path / "result.json", "--minutes", "5", "--seed", str(SEED))
    assert code == 0, result.get("examples")
    assert result["injected"] >= 8
    assert result["messages"]["confirmed"] > 1_000


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("fix", "faults", "rules"),
    [
        ("full-disk", "disk full", {"lost"}),
        ("deleted-target", "delete", {"lost"}),
    ],
)
def test_a_run_fails_without_a_fix(fix: str, faults: str, rules: set[str], tmp_path: Path) -> None:
    options = ["--topics", "local", "--delivery", "effectively-once", "--no-java"]
    options += ["--tokens", "no", "--minutes", "1.5", "--drain", "200", "--seed", "7"]
    options += ["--faults", faults, "--without", fix]
    code, result = run(tmp_path / "result.json", *options)
    assert code == 1
    broken = {rule for rule, count in result["violations"].items() if count}
    assert rules <= broken
