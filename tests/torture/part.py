"""The program of the processes: ``python -m torture.part NAME ROLE ARGUMENT…``.

The role ``cli`` is the ``delaylevel`` program itself, with its clock and its spill disk replaced:
faults change them through files. The clock of a part is ahead by the number of ms in the file
``clock``, and its disk is full while the file ``disk-full`` exists, both in its own folder.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

CLOCK = Path("clock")
DISK_FULL = Path("disk-full")
# Memory for the messages of a window partition: the least, so that bursts go to the disk.
_MEMORY_BYTES = 1 << 20


def step_clock() -> None:
    """Let the clock of this process be ahead by what the file says, in ms."""
    from delaylevel.model.clock import SystemClock

    if not CLOCK.exists():
        CLOCK.write_bytes(bytes(8))
    file = CLOCK.open("rb")
    offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    true_ms = SystemClock.now_ms

    def now_ms(self: SystemClock) -> int:
        return true_ms(self) + int.from_bytes(offset[:8], "little", signed=True)

    SystemClock.now_ms = now_ms  # type: ignore[method-assign]


def write_clock(folder: Path, offset_ms: int) -> None:
    """Step the clock of a part, in ms; 0 corrects it."""
    with (folder / CLOCK).open("r+b") as file:
        file.write(offset_ms.to_bytes(8, "little", signed=True))


def small_disk() -> None:
    """Give window partitions little memory, and a disk that can be full."""
    from delaylevel.dispatcher import owner
    from delaylevel.structures.segments import file
    from delaylevel.structures.segments.pending import PendingSegments
    from support.fakes import SmallDisk

    def opened(path: Path) -> Any:
        return SmallDisk(0 if DISK_FULL.exists() else 1 << 60)(path)

    def small(directory: Path | None, **options: Any) -> PendingSegments:
        return PendingSegments(directory, **{**options, "budget_bytes": _MEMORY_BYTES})

    owner.PendingSegments = small  # type: ignore[assignment, misc]
    file.append_to = opened


def main(name: str, role: str, *rest: str) -> None:
    from support.background import end_with_parent

    end_with_parent()
    # The thread that follows a signal must find the default handlers, as in any other process.
    threading.current_thread().name = name
    if role == "cli":
        from delaylevel.cli.main import main as program

        step_clock()
        small_disk()
        sys.argv = ["delaylevel", *rest]
        program()
        return
    from torture.clients import TICK_S, Receiver, Sender
    from torture.stage import Control

    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    folder, more = Path(rest[0]), rest[1:]
    worker: Receiver | Sender
    if role == "consumer":
        worker = Receiver(name, folder, *more)
    else:
        step_clock()
        seed, *classes = more
        worker = Sender(name, folder, seed, *classes, preexec_fn=end_with_parent)
    while not ended.wait(TICK_S):
        worker.work(Control.load(folder / "control.json"))
    worker.note()
    os._exit(0)  # whatever the client waits for


if __name__ == "__main__":
    main(*sys.argv[1:])
