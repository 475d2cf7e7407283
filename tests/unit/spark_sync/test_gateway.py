"""Tests of the stderr of Spark's Java process."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from delaylevel.spark_sync import session


def test_only_the_warning_that_is_no_problem_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    useless = "WARNING: Using incubator modules: jdk.incubator.vector\n"
    useful = ["WARNING: Using incubator modules: other\n", "Error: no memory\n", f"x {useless}"]
    session._copy([useless, *useful, useless])
    assert capsys.readouterr().err == "".join(useful)
