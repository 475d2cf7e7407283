"""The walk of a new user through README.md and docs/getting-started.md, from the clone to the end.

It types the commands of the blocks that are marked ``walked``, and waits for the output that the
pages show. It fails if a command fails, if something that a page promises does not appear, or if
any line is a warning that the reader would have to ignore. ``-s`` prints the time of each step.

Other options of these blocks:

``terminal-N``          they are typed in another terminal, in the folder of the checkout
``with-run``            they are left out of the walk with Spark; ``with-spark`` the other way round
``stopped``             programs that run until Ctrl-C are stopped first

The server of Pulsar is downloaded before. pip downloads what its cache lacks.
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
from pathlib import Path

import pytest

from support.page_reader import FOREVER, PAGES, bare
from support.pages import ROOT, Block, missing
from support.world import eventually

WALKED = ("README.md", "docs/getting-started.md")
WAYS = {"run": "with-spark", "spark": "with-run"}  # with what the other one does
#: The address on the page, and the folder of a clone.
REPOSITORY, CHECKOUT = "https://git.example/delaylevel.git", "delaylevel"
#: Most time that one step may take: pip may download.
PATIENCE_S = 600.0
LIMIT_S = 180.0
_WARNING = re.compile(r"warn|deprecat|traceback", re.IGNORECASE)
#: A line of Java, of which the page says that it is no problem.
_KNOWN = "WARNING: Using incubator modules: jdk.incubator.vector"
# Settings of this environment that a new user does not have.
_FOREIGN = ("DELAYLEVEL_", "PYSPARK_", "PYTHON", "VIRTUAL_ENV", "SPARK_", "PIP_DISABLE")


def _obey_ctrl_c() -> None:
    # A program that a script runs in the background inherits that Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Walk:
    """One walk, with everything that it starts, in an empty folder for the clone.

    Attributes:
        seconds: time of all steps.
    """

    def __init__(self, folder: Path) -> None:
        self.seconds = 0.0
        self._folder = folder
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

    def take(self, block: Block) -> None:
        """Do what a block says."""
        if "stopped" in block.words:
            self.stop()
        if block.kind == "python":  # the first line has the name of the program
            name = block.code.partition("\n")[0].removeprefix("# ")
            (self._folder / CHECKOUT / name).write_text(block.code, encoding="utf-8")
            return
        terminals = [word for word in block.words if word.startswith("terminal-")]
        state = self._state[terminals[0] if terminals else "terminal-1"]
        for line, shown in block.commands:
            self._type(state, bare(line), shown)

    def printed(self, line: str) -> list[str]:
        """Return the lines that a command has printed."""
        return self._logs[line].read_text("utf-8", "replace").splitlines()

    def check(self) -> None:
        """Raise AssertionError for a line that looks like a warning."""
        for line in self._logs:
            for text in self.printed(line):
                assert not _WARNING.search(text.replace(_KNOWN, "")), f"{line} warns: {text}"

    def stop(self) -> None:
        """Stop the programs that run until Ctrl-C."""
        for line, process in self._running.items():
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0, f"{line}: {self.printed(line)}"
        self._running.clear()

    def leave(self) -> None:
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
        if line.startswith(("cd ", ". ")):
            state.append(line)
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
                preexec_fn=_obey_ctrl_c,
            )

        def absent() -> list[str]:
            return missing(shown, self.printed(line), any_numbers=True)

        def over() -> bool:
            return process.poll() is not None or (forever and not absent())

        eventually(over, line, PATIENCE_S)
        seconds, code = time.monotonic() - started, process.poll()
        print(f"{seconds:6.1f} s   {line}", flush=True)
        self.seconds += seconds
        said = "\n".join(self.printed(line))
        assert code == (None if forever else 0), f"{line}: exit code {code}\n{said}"
        assert not absent(), f"{line} did not print {absent()[0]!r}, but\n{said}"
        if not forever:
            del self._running[line]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
def test_a_new_user_gets_delayed_messages_within_three_minutes(way: str, tmp_path: Path) -> None:
    walk = Walk(tmp_path)
    try:
        for block in (block for page in WALKED for block in PAGES[page]):
            if "walked" in block.words and WAYS[way] not in block.words:
                walk.take(block)
    finally:
        walk.leave()
    walk.check()
    for program in ("python remind.py", "python first.py"):
        text = "\n".join(walk.printed(program))
        printed = re.findall(r"^ ?(\d+\.\d) s  (.+)$", text, re.MULTILINE)
        seconds = {words: float(passed) for passed, words in printed}
        assert printed[0][1] == "at once"
        assert seconds["in twelve seconds"] >= 11.9, "early"
        assert seconds.get("in three seconds", 3.0) >= 2.9, "early"
    assert walk.seconds < LIMIT_S
