"""A test of a whole run."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from torture.run import Torture
from torture.scene import Scene
from torture.stage import stages

MINUTES = float(os.environ.get("TORTURE_MINUTES", "5"))
SEED = int(os.environ.get("TORTURE_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)


@pytest.mark.broker
@pytest.mark.spark
@pytest.mark.timeout(MINUTES * 60 + 1500)
def test_some_minutes_of_faults_lose_copy_and_change_nothing(tmp_path: Path) -> None:
    # The seed decides about the guarantee of `dispatcher run` (`run` has the other one).
    once = random.Random(SEED).random() < 0.7
    began_s = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began_s:7.1f} s  {line}", flush=True)

    say(f"seed {SEED}, logs and ledgers in {tmp_path}")
    result = Torture(Scene(tmp_path / "run", stages(once), SEED, say), MINUTES).run()
    print(result.as_json())
    assert result.ok
    # About ten a minute on a quiet machine, and fewer on a busy one.
    assert sum(result.faults.values()) >= 2.4 * MINUTES
    assert len(result.faults) >= min(6, MINUTES + 1)
    assert result.totals["confirmed"] > 200 * MINUTES
