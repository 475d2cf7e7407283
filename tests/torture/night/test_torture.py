"""Tests of a whole run, and of the injection of faults."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torture.faults import ALL, Fault, Undo, named
from torture.run import Torture
from torture.scene import Scene, Settings, StageError
from torture.stage import stages

TESTS = Path(__file__).parents[2]
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
    assert not [name for name in names if "," in name], "`--faults` separates them by commas"
    assert named(()) == ALL
    assert [fault.name for fault in named((names[3],))] == [names[3]]
    with pytest.raises(ValueError, match="no fault earthquake; known: kill dispatcher"):
        named(("earthquake",))


@pytest.fixture
def torture(tmp_path: Path) -> Iterator[Callable[..., Torture]]:
    """``torture(inject)``: a run of one fault, whose broker is not started."""
    made: list[Torture] = []

    def make(inject: Callable[..., object]) -> Torture:
        settings = Settings(tmp_path / "run", tuple(stages(("local",), True)), 1)
        faults = (Fault("planted", (0.0, 0.0), inject),)
        made.append(Torture(settings, faults, 1.0, print))
        return made[-1]

    yield make
    for each in made:
        each.scene.close()


def test_a_fault_that_fails_half_way_is_undone(torture: Callable[..., Torture]) -> None:
    undone: list[int] = []

    def repair(number: int) -> None:
        undone.append(number)
        if number == 2:
            raise StageError("no repair")

    def inject(_scene: Scene, _chosen: random.Random, undo: Undo) -> None:
        for number in (1, 2, 3):
            undo.callback(repair, number)
        raise StageError("half-way")

    run = torture(inject)
    current: list[Any] = []
    run.inject(current)
    assert current == []
    assert undone == [3, 2, 1]
    (blow,) = run.result.blows
    assert "half-way" in blow.failure
    assert "no repair" in blow.failure
    assert blow.lasted_s == 0


@pytest.mark.broker
@pytest.mark.spark
@pytest.mark.timeout(1800)
def test_five_minutes_of_faults_lose_copy_and_change_nothing(tmp_path: Path) -> None:
    code, result = run(tmp_path / "result.json", "--minutes", "5", "--seed", str(SEED))
    assert code == 0, result.get("examples")
    # About fifty on a quiet machine, and fewer on a busy one.
    assert result["injected"] >= 12
    assert len(result["faults"]) >= 6
    assert result["messages"]["confirmed"] > 1_000
