"""Tests of the distribution of tests over several processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("xdist")

from support.parallel import group

TESTS = Path(__file__).parents[1]
FILES = [
    str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py") if "night" not in path.parts
]


def test_files_with_spark_jobs_share_a_process() -> None:
    found = {
        file
        for file in FILES
        if file.startswith("integration/")
        and re.search(r"mark\.spark|spark_job|spark_once", (TESTS / file).read_text())
    }
    assert {file for file in found if group(f"tests/{file}::test") != "spark"} == set()
