"""The walk of a new user through README.md and docs/getting-started.md, in terminals.

It types the commands of the blocks that are marked ``walked``, from the clone to the clean-up, and
waits for the output that the pages show. It fails if a command fails, if something that a page
promises does not appear, or if any line is a warning that the reader would have to ignore. It
prints the time of each step, and two totals: with and without the time that pip takes.

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
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from support.pages import ROOT, Block, blocks, missing
from support.terminal import Shell

PAGES = ("README.md", "docs/getting-started.md")
WAYS = ("run", "spark")
#: The address on the page, and the folder of a clone.
REPOSITORY, CHECKOUT = "https://git.example/delaylevel.git", "delaylevel"
#: Most time that one step may take: pip may download.
PATIENCE_S = 600.0
LIMIT_S = 180.0
_FOREVER = re.compile(r"delaylevel (mover |dispatcher )?run ")
_WARNING = re.compile(r"warn|deprecat|traceback", re.IGNORECASE)
#: A line of Java, of which the page says that it is no problem.
_KNOWN = "WARNING: Using incubator modules: jdk.incubator.vector"
# Settings of this environment that a new user does not have.
_FOREIGN = ("DELAYLEVEL_", "PYSPARK_", "PYTHON", "VIRTUAL_ENV", "SPARK_", "PIP_DISABLE", "PS1")


def walked(page: str, way: str) -> list[Block]:
    """Return the blocks of a page that belong to a walk."""
    others = {f"with-{other}" for other in WAYS} - {f"with-{way}"}
    found = [block for block in blocks(ROOT / page) if "walked" in block.words]
    return [block for block in found if not others & set(block.words)]


class Step(NamedTuple):
    """One command that was typed, with the time until the page's promise was kept."""

    page: str
    terminal: int
    line: str
    seconds: float
    output: list[str]


class Walk:
    """One walk, with everything that it has opened, in an empty folder for the clone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[Step] = []
        self._terminals: dict[int, Shell] = {}
        self._running: list[int] = []

    def __enter__(self) -> Walk:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop()
        program = self.folder / CHECKOUT / ".venv/bin/delaylevel"
        if program.exists():
            stop = [program, "broker", "stop"]
            subprocess.run(stop, env=self._environ(), capture_output=True, check=False)
        for terminal in self._terminals.values():
            terminal.close()

    def take(self, page: str, way: str) -> None:
        """Do everything that a page says, as far as it is part of the walk."""
        for block in walked(page, way):
            if "stopped" in block.words:
                self._stop()
            if block.kind == "python":  # the first line has the name of the program
                name = block.code.partition("\n")[0].removeprefix("# ")
                (self.folder / CHECKOUT / name).write_text(block.code, encoding="utf-8")
                continue
            numbers = [int(word[-1]) for word in block.words if word.startswith("terminal-")]
            for line, shown in block.commands:
                self._type(page, *(numbers or [1]), line, shown)

    def check(self) -> None:
        """Raise AssertionError for a line that looks like a warning."""
        for number, terminal in self._terminals.items():
            for line in terminal.text.splitlines():
                warns = _WARNING.search(line.replace(_KNOWN, ""))
                assert not warns, f"terminal {number} warns: {line}"

    @property
    def seconds(self) -> float:
        """Time of all steps."""
        return sum(step.seconds for step in self.steps)

    def report(self) -> str:
        """Return a table of the steps, and the totals."""
        after_s = sum(each.seconds for each in self.steps if not each.line.startswith("pip "))
        rows = [(each.seconds, f"{each.page:<24} {each.line}") for each in self.steps]
        rows += [(self.seconds, "in all"), (after_s, "without pip")]
        return "\n".join(f"{seconds:6.1f} s   {text}" for seconds, text in rows)

    def _type(self, page: str, number: int, line: str, shown: list[str]) -> None:
        terminal = self._terminal(number)
        line = re.sub(r"\s+#.*", "", line).replace(REPOSITORY, shlex.quote(f"file://{ROOT}"))
        if line.startswith("git clone "):
            line += f" {CHECKOUT}"  # the name that the address on the page has
        started = time.monotonic()
        terminal.type(line)
        forever = _FOREVER.match(line) is not None
        if forever:
            self._running.append(number)

        def absent() -> list[str]:
            return missing(shown, terminal.lines, any_numbers=True)

        def over() -> bool:
            return terminal.exit_code is not None or (forever and not absent())

        terminal.wait_for(over, PATIENCE_S, line)
        seconds, code = time.monotonic() - started, terminal.exit_code
        self.steps.append(Step(page, number, line, seconds, terminal.lines))
        screen = "\n".join(terminal.lines)
        assert code == (None if forever else 0), f"{line}: exit code {code}\n{screen}"
        assert not absent(), f"{line} did not print {absent()[0]!r}, but\n{screen}"

    def _stop(self) -> None:
        """Stop the programs that run until Ctrl-C."""
        while self._running:
            terminal = self._terminals[self._running.pop()]
            if terminal.exit_code is None:
                terminal.interrupt()
                terminal.wait_for(lambda t=terminal: t.exit_code is not None, PATIENCE_S, "the end")
            assert terminal.exit_code == 0, "\n".join(terminal.lines)

    def _terminal(self, number: int) -> Shell:
        if number not in self._terminals:
            folder = self.folder / CHECKOUT
            folder = folder if folder.exists() else self.folder
            self._terminals[number] = Shell(folder, self._environ())
        return self._terminals[number]

    def _environ(self) -> dict[str, str]:
        kept = {name: text for name, text in os.environ.items() if not name.startswith(_FOREIGN)}
        # The user's own Python, and not that of the environment of these tests.
        ours = str(Path(sys.executable).parent)
        path = [part for part in kept["PATH"].split(os.pathsep) if part != ours]
        path.insert(0, str(Path(sys.base_exec_prefix) / "bin"))
        state = str(self.folder / "state")
        return {**kept, "PATH": os.pathsep.join(path), "XDG_STATE_HOME": state, "HISTFILE": ""}


def walk(way: str, folder: Path) -> Walk:
    """Walk the pages with one of the services, and print the times.

    Raises:
        AssertionError: a step failed, or a screen had a warning.
    """
    with Walk(folder) as found:
        try:
            for page in PAGES:
                found.take(page, way)
            found.check()
        finally:
            print(f"With `{way}`:", found.report(), sep="\n", flush=True)
    return found


if __name__ == "__main__":
    for each in WAYS:
        with tempfile.TemporaryDirectory(prefix="delaylevel-walk-") as name:
            if walk(each, Path(name)).seconds > LIMIT_S:
                sys.exit(f"more than {LIMIT_S:.0f} s")
