"""The simulated broker of the tests of publishing, with each delivery guarantee."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.simulation import Simulation


@pytest.fixture(params=[False, True], ids=["at-least-once", "effectively-once"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Simulation:
    return Simulation(request.param, tmp_path)
