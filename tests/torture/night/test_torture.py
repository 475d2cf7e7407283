"""Tests of a whole run, and of the injection of faults."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from torture.faults import Fault, Undo
from torture.run import Current, Torture
from torture.scene import Scene, StageError
from torture.stage import stages

TESTS = Path(__file__).parents[2]
SEED = int(os.environ.get("TORTURE_SEED", "0"))


def test_a_fault_that_fails_half_way_is_undone(tmp_path: Path) -> None:
    undone: list[int] = []

    def repair(number: int) -> None:
        undone.append(number)
        if number == 2:
            raise StageError("no repair")

    def inject(_scene: Scene, _chosen: random.Random, undo: Undo) -> None:
        for number in (1, 2, 3):
            undo.callback(repair, number)
        raise StageError("half-way")

    scene = Scene(tmp_path / "run", stages(once=True, function=False), 1, print)
    run = Torture(scene, (Fault("planted", (0.0, 0.0), inject),), 1.0)
    current: list[Current] = []
    run.inject(current)
    run.scene.close()
    (blow,) = run.result.blows
    assert (current, undone, blow.lasted_s) == ([], [3, 2, 1], 0)
    assert "half-way" in blow.failure
    assert "no repair" in blow.failure


@pytest.mark.broker
@pytest.mark.spark
@pytest.mark.timeout(1800)
def test_five_minutes_of_faults_lose_copy_and_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "torture", "--json", str(path)]
    command += ["--minutes", "5", "--seed", str(SEED)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(process.stderr[-6_000:], process.stdout, sep="\n")
    result = json.loads(path.read_text()) if path.exists() else {}
    assert process.returncode == 0, result.get("examples")
    # About fifty on a quiet machine, and fewer on a busy one.
    assert sum(result["faults"].values()) >= 12
    assert len(result["faults"]) >= 6
    assert result["totals"]["confirmed"] > 1_000
