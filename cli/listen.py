"""``delaylevel listen``: the listeners of an application as a program."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from delaylevel.broker.process import follow_parent
from delaylevel.cli.views import logs
from delaylevel.cli.views.output import note
from delaylevel.cluster.threads import stop_on_signals

from . import options
from .command import Settings, examples, pass_settings
from .service import serve_metrics

if TYPE_CHECKING:
    from delaylevel.consumer import Listeners


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


@examples(
    "delaylevel listen shop.billing:app",
    "delaylevel listen shop.billing:app --metrics-port 9110",
    "delaylevel listen shop.billing:app --reload   # for development",
)
@click.command()
@click.argument("target", metavar="MODULE:NAME")
@click.option("--reload", is_flag=True, help="Start again whenever a Python source file changes.")
@options.metrics
@pass_settings
def listen(
    settings: Settings, target: str, reload: bool, metrics_port: int | None, metrics_address: str
) -> None:
    """Run the listeners of an application.

    MODULE is searched in the current folder first. NAME is that of a Listeners, or of something
    that returns one when it is called. It may be left out if the module has only one Listeners.

    Listeners.from_config() takes the address of the cluster from the options of this command, from
    the environment and from the configuration file. Listeners with a client of their own ignore
    these.

    SIGTERM or Ctrl-C ends it when the running handlers have finished. --reload watches the folder
    of the module's topmost package.
    """
    from delaylevel.consumer.listeners import load, source_folder, split_target

    split_target(target)
    _pass_on(settings)
    if reload:
        raise click.exceptions.Exit(
            _reloading(settings, target, source_folder(target), metrics_port, metrics_address)
        )
    app = load(target)
    for name in app.unused_settings():
        note(f"{name} has no effect: there is no listener with this name.")
    # For the time before the listeners have handlers of their own.
    stop_on_signals(app.stop)
    with contextlib.ExitStack() as stack:
        if metrics_port is not None:
            from delaylevel.consumer.metrics import ListenerCollector

            serve_metrics(stack, ListenerCollector(app), metrics_port, metrics_address)
        _tell(app)
        app.run()


def _tell(app: Listeners) -> None:
    for listener in app.listeners:
        kind = listener.subscription_type.name
        note(f"{listener.name}: {listener.topic}, subscription {listener.subscription} ({kind})")
    note("Ctrl-C ends it.")


def _pass_on(settings: Settings) -> None:
    """Put the options for the connection into the environment, where `from_config` finds them."""
    flags = settings.flags
    if {"token", "token_file"} & flags.keys():
        for name in ("DELAYLEVEL_TOKEN", "DELAYLEVEL_TOKEN_FILE"):
            os.environ.pop(name, None)
    for name, value in flags.items():
        variable = "CONFIG" if name == "config_file" else name.upper()
        os.environ[f"DELAYLEVEL_{variable}"] = str(value)


def _reloading(
    settings: Settings, target: str, folder: os.PathLike[str], port: int | None, address: str
) -> int:
    """Run this command without --reload in another process, again after each change."""

    words = [sys.executable, "-m", "delaylevel", *["-v"] * settings.verbosity]
    words += ["--log-format", "json" if logs.is_json() else "text", "listen", target]
    if port is not None:
        words += ["--metrics-port", str(port), "--metrics-address", address]
    stopping = threading.Event()
    stop_on_signals(stopping.set)
    note(f"Watching {folder} for changes.")
    return run_reloading(words, os.environ, Path(folder), stopping)
