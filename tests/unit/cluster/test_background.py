"""Tests of background threads at the end of a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import time
from delaylevel.cluster.background import in_thread
in_thread(lambda: ({work}, print("done", flush=True)))
"""


@pytest.mark.parametrize(
    ("work", "printed"), [("time.sleep(0.3)", "done\n"), ("time.sleep(60)", "")]
)
def test_a_process_waits_for_its_threads_for_a_limited_time(work: str, printed: str) -> None:
    program = [sys.executable, "-c", PROGRAM.format(work=work)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")
