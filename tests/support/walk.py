"""The walk of a new user through README.md and docs/getting-started.md, from the clone to the end.

It types the commands of the blocks that are marked ``walked``, and waits for the output that the
pages show. It fails if a command fails, if something that a page promises does not appear, or if
any line is a warning that the reader would have to ignore. ``-s`` prints the time of each step.

Other options of these blocks:

``terminal-N``          they are typed in another terminal, in the folder of the checkout
``with-run``            they are left out of the walk with Spark; ``with-spark`` the other way round
``stopped``             programs that run until Ctrl-C are stopped first

The server of Pulsar is downloaded before. By day, the environment that runs the tests stands where
the reader would install one. At night pip installs it as the pages say, and downloads what its
cache lacks.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

from support.pages import FOREVER, PAGES, ROOT, Block, bare, missing
from support.world import eventually

WALKED = ("README.md", "docs/getting-started.md")
WAYS = {"run": "with-spark", "spark": "with-run"}  # with what the other one does
#: The address on the page, and the folder of a clone.
REPOSITORY, CHECKOUT = "https://git.example/delaylevel.git", "delaylevel"
#: Most time that one step may take: pip may download, and the processors may be busy.
PATIENCE_S = 600.0
_INSTALLS = ("python3 -m venv ", "pip install ")
_WARNING = re.compile(r"warn|deprecat|traceback", re.IGNORECASE)
#: A line of Java, of which the page says that it is no problem.
_KNOWN = "WARNING: Using incubator modules: jdk.incubator.vector"
# Settings of this environment that a new user does not have.
_FOREIGN = ("DELAYLEVEL_", "PYSPARK_", "PYTHON", "VIRTUAL_ENV", "SPARK_", "PIP_DISABLE", "GIT_")


class Walk:
    """One walk, with everything that it starts, in an empty folder for the clone.

    A reader who installs nothing has the environment ``installed``, with the package of this
    checkout. The time of all steps is in ``seconds``.
    """

    def __init__(self, folder: Path, installed: Path | None = None) -> None:
        self.seconds = 0.0
        self._folder = folder
        self._installed = installed
        self._logs: dict[str, Path] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        # The lines of each terminal that its later ones need.
        self._state: dict[str, list[str]] = defaultdict(lambda: [f"cd {CHECKOUT}"])
        self._state["terminal-1"] = []
        kept = {name: text for name, text in os.environ.items() if not name.startswith(_FOREIGN)}
        # The user's own Python, and not that of the environment of these tests.
        ours = str(Path(sys.executable).parent)
        path = [part for part in kept["PATH"].split(os.pathsep) if part != ours]
        path.insert(0, str(Path(sys.base_exec_prefix) / "bin"))
        state = str(folder / "state")
        self._environ = {**kept, "PATH": os.pathsep.join(path), "XDG_STATE_HOME": state}
        if installed is not None:  # the processors are busy
            self._environ["DELAYLEVEL_OPERATION_TIMEOUT_SECONDS"] = "60"

    def go(self, way: str) -> None:
        """Do what both pages say about ``run`` or ``spark``; fail if something differs."""
        try:
            for block in (block for page in WALKED for block in PAGES[page]):
                if "walked" in block.words and WAYS[way] not in block.words:
                    self._take(block)
        finally:
            self._leave()
        for program in ("python remind.py", "python first.py"):
            seconds = {words: passed for passed, words in self.arrivals(program)}
            assert seconds["in twelve seconds"] >= 11.9, "early"
            assert seconds.get("in three seconds", 3.0) >= 2.9, "early"

    def arrivals(self, program: str) -> list[tuple[float, str]]:
        """Return the seconds and the body of each message that a program has received."""
        text = "\n".join(self._printed(program))
        found = re.findall(r"^ ?(\d+\.\d) s  (.+)$", text, re.MULTILINE)
        return [(float(passed), words) for passed, words in found]

    def _take(self, block: Block) -> None:
        if "stopped" in block.words:
            self._stop()
        if block.kind == "python":  # the first line has the name of the program
            name = block.code.partition("\n")[0].removeprefix("# ")
            (self._folder / CHECKOUT / name).write_text(block.code, encoding="utf-8")
            return
        terminals = [word for word in block.words if word.startswith("terminal-")]
        state = self._state[terminals[0] if terminals else "terminal-1"]
        for line, shown in block.commands:
            self._type(state, bare(line), shown)

    def _printed(self, line: str) -> list[str]:
        return self._logs[line].read_text("utf-8", "replace").splitlines()

    def _ended(self, line: str, code: int | None) -> None:
        assert code == 0, f"{line}: exit code {code}\n" + "\n".join(self._printed(line))
        for text in self._printed(line):
            assert not _WARNING.search(text.replace(_KNOWN, "")), f"{line} warns: {text}"

    def _stop(self) -> None:
        """Stop the programs that run until Ctrl-C."""
        for line, process in self._running.items():
            process.send_signal(signal.SIGINT)
            self._ended(line, process.wait(PATIENCE_S))
        self._running.clear()

    def _leave(self) -> None:
        """End what still runs after a failure."""
        for process in self._running.values():
            process.kill()
            process.wait()
        program = self._folder / CHECKOUT / ".venv/bin/delaylevel"
        if program.exists():
            stop = [str(program), "broker", "stop"]
            subprocess.run(stop, env=self._environ, capture_output=True, check=False)

    def _type(self, state: list[str], line: str, shown: list[str]) -> None:
        line = line.replace(REPOSITORY, shlex.quote(f"file://{ROOT}"))
        if line.startswith("git clone "):
            line += f" {CHECKOUT}"  # the name that the address on the page has
            if self._installed is not None:  # its files may be older than the package
                line += " --no-checkout --depth 1"
        if line.startswith(("cd ", ". ")):
            state.append(line)
            return
        if self._installed is not None and line.startswith(_INSTALLS):
            environment = self._folder / CHECKOUT / ".venv"
            if not environment.is_symlink():
                environment.symlink_to(self._installed)
            return
        forever = FOREVER.match(line) is not None
        log = self._logs[line] = self._folder / f"{len(self._logs)}.log"
        started = time.monotonic()
        with log.open("wb") as output:
            process = self._running[line] = subprocess.Popen(
                ["bash", "-e", "-c", "\n".join([*state, f"exec {line}"])],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environ,
                cwd=self._folder,
                # A program that a script runs in the background inherits that Ctrl-C is ignored.
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
            )

        def absent() -> list[str]:
            return missing(shown, self._printed(line), any_numbers=True)

        def over() -> bool:
            return process.poll() is not None or (forever and not absent())

        eventually(over, line, PATIENCE_S)
        seconds = time.monotonic() - started
        print(f"{seconds:6.1f} s   {line}", flush=True)
        self.seconds += seconds
        if process.poll() is not None:
            self._ended(line, self._running.pop(line).returncode)
        assert not absent(), f"no {absent()[0]!r} from {line}, but {self._printed(line)}"
