"""Tests of slow work in the background, and of what waits for its end."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from delaylevel.cluster.threads import BackgroundWork

PROGRAM = """
import time
from delaylevel.cluster.threads import in_thread
in_thread(lambda: ({work}, print("done", flush=True)))
"""


@pytest.mark.parametrize(
    ("work", "printed"), [("time.sleep(0.3)", "done\n"), ("time.sleep(60)", "")]
)
def test_a_process_waits_for_its_threads_for_a_limited_time(work: str, printed: str) -> None:
    program = [sys.executable, "-c", PROGRAM.format(work=work)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


def test_work_is_waited_for() -> None:
    work, go, ended = BackgroundWork(), threading.Event(), []
    assert work.join()  # there is none
    for number in range(3):
        work.start(lambda number=number: (go.wait(60), ended.append(number)))
    assert not work.join(0)
    go.set()
    assert work.join(60)
    assert sorted(ended) == [0, 1, 2]
