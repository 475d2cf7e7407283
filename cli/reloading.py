"""Supervisor that starts a program again whenever its sources change, for development."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from delaylevel.broker.process import follow_parent

from .output import note

_LOOK_S = 0.3
# A program that has not ended by then is killed; listeners end after their own timeout.
_END_S = 60.0
_SKIPPED = {"__pycache__", "node_modules", "site-packages"}


class SourceWatch:
    """The Python files below a folder, with the times of their last changes.

    Args:
        folder: the folder. Hidden folders and virtual environments in it are left out.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = self._read()

    def changed(self) -> list[Path]:
        """Return the files that changed, appeared or disappeared since the last call."""
        found = self._read()
        names = {
            name for name in {*self._known, *found} if self._known.get(name) != found.get(name)
        }
        self._known = found
        return sorted(map(Path, names))

    def _read(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for folder, names, files in os.walk(self._folder):
            names[:] = [
                name
                for name in names
                if name not in _SKIPPED
                and not name.startswith(".")
                and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
            ]
            for file in files:
                if file.endswith(".py"):
                    path = os.path.join(folder, file)
                    try:
                        state = os.stat(path)
                    except OSError:
                        continue  # deleted just now, or a link to nowhere
                    found[path] = (state.st_mtime_ns, state.st_size)
        return found


def run_reloading(
    command: Sequence[str],
    environ: Mapping[str, str],
    folder: Path,
    stopping: threading.Event,
) -> int:
    """Run a program until it is stopped, and start it again whenever a source file changes.

    A program that ends with an error is started again after the next change.

    Args:
        command: the program with its arguments.
        environ: its environment.
        folder: the folder of its sources.
        stopping: event that ends the program, and then this function.

    Returns:
        The exit code of the program.
    """
    watch = SourceWatch(folder)
    while True:
        child = subprocess.Popen(command, env=dict(environ), start_new_session=True)
        # Even if this process is killed, the program gets the signal that ends it.
        watcher = follow_parent(child.pid)
        try:
            again = _until_change(child, watch, stopping)
        finally:
            code = _end(child)
            watcher.kill()
            watcher.communicate()
        if not again:
            return code


def _until_change(
    child: subprocess.Popen[bytes], watch: SourceWatch, stopping: threading.Event
) -> bool:
    """Wait until the sources change; return False if the program is not started again."""
    told = False
    while not stopping.wait(_LOOK_S):
        changed = watch.changed()
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            note(f"{changed[0]}{more} changed: starting again.")
            return True
        code = child.poll()
        if code == 0:
            return False
        if code is not None and not told:
            told = True
            note(f"The program ended with code {code}. Waiting for a change.")
    return False


def _end(child: subprocess.Popen[bytes]) -> int:
    """End a program by SIGTERM, and return its exit code."""
    stopped = child.poll() is None
    if stopped:
        child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            note(f"The program did not end within {_END_S:.0f} s; it is killed.")
            child.kill()
    code = child.wait()
    # A program that was still starting has no handler of the signal yet.
    return 0 if stopped and code == -signal.SIGTERM else code
