"""The program of the processes: ``python -m torture.part NAME ROLE ARGUMENT…``.

The role ``cli`` is the ``delaylevel`` program itself, with its clock and its spill disk replaced:
faults change them through files. The clock of a part is ahead by the number of ms in the file
``clock``, and its disk is full while the file ``disk-full`` exists, both in its own folder. There,
the file ``refused`` grows whenever a batch finds neither memory nor space on the disk.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

CLOCK = Path("clock")
DISK_FULL = Path("disk-full")
REFUSED = Path("refused")
_PR_SET_PDEATHSIG = 1
# Memory for the messages of a window partition: the least, so that bursts go to the disk.
_MEMORY_BYTES = 1 << 20


def end_with_parent() -> None:
    """End this process when the one that started it ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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


class _Disk:
    """Opener of spill files that fail while the disk is full."""

    def __call__(self, path: Path) -> Any:
        from delaylevel.structures.segments.file import append_to

        inner = append_to(path)

        class File:
            def __enter__(self) -> File:
                inner.__enter__()
                return self

            def __exit__(self, *error: object) -> None:
                inner.__exit__(*error)

            def write(self, data: Any) -> int:
                if DISK_FULL.exists():
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return int(inner.write(data))

            def truncate(self, size: int) -> None:
                inner.truncate(size)

        return File()


def small_disk() -> None:
    """Give window partitions little memory, and a disk that can be full."""
    from delaylevel.dispatcher import pending
    from delaylevel.dispatcher.delay_queue import OfferQueue
    from delaylevel.structures.segments.pending import PendingSegments

    def make(directory: Path | None, *, budget_bytes: int, **options: Any) -> PendingSegments:
        return PendingSegments(directory, budget_bytes=_MEMORY_BYTES, opener=_Disk(), **options)

    refuse = OfferQueue._refuse

    def count(self: OfferQueue, error: Any) -> None:
        refuse(self, error)
        with REFUSED.open("ab") as file:
            file.write(b".")

    pending.PendingSegments = make  # type: ignore[assignment, misc]
    OfferQueue._refuse = count  # type: ignore[method-assign]


def batches_refused(folder: Path) -> int:
    """Return how often a part could not take a batch in, because its disk was full."""
    try:
        return (folder / REFUSED).stat().st_size
    except FileNotFoundError:
        return 0


def main(arguments: list[str]) -> None:
    """Run a role."""
    end_with_parent()
    # The thread that follows a signal must find the default handlers, as in any other process.
    threading.current_thread().name = arguments[0]
    name, role, *rest = arguments
    if role == "cli":
        from delaylevel.cli.main import main as program

        step_clock()
        small_disk()
        sys.argv = ["delaylevel", *rest]
        program()
    elif role == "producer":
        from torture.producing import produce

        step_clock()
        produce(name, *rest)
    elif role == "java-producer":
        from torture.java_sending import produce_with_java

        produce_with_java(name, *rest)
    elif role == "consumer":
        from torture.consuming import consume

        consume(name, *rest)
    else:
        raise SystemExit(f"there is no role {role}")


if __name__ == "__main__":
    main(sys.argv[1:])
