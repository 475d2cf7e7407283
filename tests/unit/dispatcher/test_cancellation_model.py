"""Random runs of a delay queue with cancellations: an outcome that was reported is true for ever.

The delay queue and the state of the journal are the real ones. Simulated are the journal, of which
a crash keeps a random part, the window topic, the targets and the outcomes topic."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from delaylevel.dispatcher.journal import state
from support.cancellation_runs import RARE, run
from support.seeds import seeds


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("seed", [*seeds(16), RARE])
def test_every_outcome_stays_true(seed: int, numbered: bool, tmp_path: Path) -> None:
    run(seed, numbered, tmp_path)


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("seed", seeds(8))
def test_no_cancelled_message_is_forgotten_while_it_is_pending(
    seed: int, numbered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = state.CancelledIds.__init__

    def tiny(self: Any, capacity: int) -> None:
        create(self, 2)

    monkeypatch.setattr(state.CancelledIds, "__init__", tiny)
    run(seed, numbered, tmp_path, copies=False)


def test_the_runs_reach_everything(tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    for seed in range(12):
        world = run(seed, False, tmp_path / str(seed))
        for name, outcomes in world.reported.items():
            found.update(outcomes)
            found["several outcomes"] += len(outcomes) > 1
            found["released twice"] += world.delivered[name] > 1
    every = {"cancelled", "too late", "unknown", "released twice", "several outcomes"}
    assert {each for each, count in found.items() if count} == every
