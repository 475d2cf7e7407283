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

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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


@dataclass
class Step:
    """One command that was typed.

    Attributes:
        page: name of the page.
        terminal: number of the terminal.
        line: the command.
        seconds: time until the page's promise was kept.
    """

    page: str
    terminal: int
    line: str
    seconds: float

    @property
    def installs(self) -> bool:
        """True for a step of pip."""
        return self.line.startswith("pip ")


@dataclass
class Walk:
    """One walk, with everything that it has opened.

    Attributes:
        way: ``run`` or ``spark``, the service of the walk.
        folder: an empty folder for the clone, and for the state of the programs.
        steps: the steps so far.
        outputs: the lines of each step.
    """

    way: str
    folder: Path
    steps: list[Step] = field(default_factory=list)
    outputs: list[list[str]] = field(default_factory=list)
    _terminals: dict[int, Shell] = field(default_factory=dict)
    _running: list[int] = field(default_factory=list)

    def __enter__(self) -> Walk:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop()
        broker = [self.folder / CHECKOUT / ".venv/bin/delaylevel", "broker", "stop"]
        if broker[0].exists():  # type: ignore[union-attr]
            subprocess.run(broker, env=self._environ(), capture_output=True, check=False)
        for terminal in self._terminals.values():
            terminal.close()

    def take(self, page: str) -> None:
        """Do everything that a page says, as far as it is part of the walk."""
        for block in blocks(ROOT / page):
            other = {f"with-{way}" for way in WAYS} - {f"with-{self.way}"}
            if "walked" not in block.words or other & set(block.words):
                continue
            if "stopped" in block.words:
                self._stop()
            if block.kind == "python":
                self._save(block)
                continue
            number = next(
                (int(word[-1]) for word in block.words if word.startswith("terminal-")), 1
            )
            for line, shown in block.commands:
                self._type(page, number, line, shown)

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

    @property
    def seconds_after_install(self) -> float:
        """Time of all steps but those of pip."""
        return sum(step.seconds for step in self.steps if not step.installs)

    def report(self) -> str:
        """Return a table of the steps, and the totals."""
        rows = [
            f"{step.seconds:6.1f} s   {step.page:<24} {step.terminal}   {step.line}"
            for step in self.steps
        ]
        rows.append(f"{self.seconds:6.1f} s   in all, with `{self.way}`")
        rows.append(f"{self.seconds_after_install:6.1f} s   without pip")
        return "\n".join(rows)

    def _save(self, block: Block) -> None:
        """Save a program under the name in its first line."""
        name = block.code.partition("\n")[0].removeprefix("# ")
        (self.folder / CHECKOUT / name).write_text(block.code, encoding="utf-8")

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

        def over(_: list[str]) -> bool:
            return terminal.exit_code is not None or (forever and not absent())

        terminal.wait_for(over, PATIENCE_S, line)
        self.steps.append(Step(page, number, line, time.monotonic() - started))
        self.outputs.append(terminal.lines)
        screen = "\n".join(terminal.lines)
        code = terminal.exit_code
        assert code in ((None,) if forever else (0,)), f"{line}: exit code {code}\n{screen}"
        assert not absent(), f"{line} did not print {absent()[0]!r}, but\n{screen}"

    def _stop(self) -> None:
        """Stop the programs that run until Ctrl-C."""
        while self._running:
            number = self._running.pop()
            terminal = self._terminals[number]
            if terminal.exit_code is None:
                terminal.interrupt()
                terminal.wait_for(
                    lambda _, t=terminal: t.exit_code is not None, PATIENCE_S, "the end"
                )
            assert terminal.exit_code == 0, "\n".join(terminal.lines)

    def _terminal(self, number: int) -> Shell:
        found = self._terminals.get(number)
        if found is None:
            folder = self.folder / CHECKOUT
            folder = folder if folder.exists() else self.folder
            found = self._terminals[number] = Shell(folder, self._environ())
        return found

    def _environ(self) -> Mapping[str, str]:
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)
        }
        # The user's own Python, and not that of the environment of these tests.
        ours = str(Path(sys.executable).parent)
        path = [part for part in environ["PATH"].split(os.pathsep) if part != ours]
        environ["PATH"] = os.pathsep.join([str(Path(sys.base_exec_prefix) / "bin"), *path])
        environ["XDG_STATE_HOME"] = str(self.folder / "state")
        environ["HISTFILE"] = ""
        return environ


def walk(way: str, folder: Path, pages: Sequence[str] = PAGES) -> Walk:
    """Walk pages, and check what was on the screens; return the walk, whose terminals are closed.

    Args:
        way: the service, one of `WAYS`.
        folder: a folder that is empty, or has the clone of an earlier walk.
        pages: the pages, in this order.

    Raises:
        AssertionError: a step failed, or a screen had a warning.
    """
    with Walk(way, folder) as found:
        try:
            for page in pages:
                found.take(page)
            found.check()
        finally:
            print(found.report(), flush=True)
    return found


def main() -> int:
    """Walk with each service, and print the times and what was on the screens."""
    parser = argparse.ArgumentParser(description="Walk through the first pages as a new user.")
    parser.add_argument("--with", dest="ways", action="append", choices=WAYS, help="only this one")
    parser.add_argument(
        "--page", dest="pages", action="append", choices=PAGES, help="only this one"
    )
    parser.add_argument("--folder", type=Path, help="folder of the clone, which is kept")
    parser.add_argument("--screens", action="store_true", help="print all that was on the screens")
    wanted = parser.parse_args()
    if wanted.folder is not None:
        wanted.folder.mkdir(parents=True, exist_ok=True)
    for way in wanted.ways or WAYS:
        with tempfile.TemporaryDirectory(prefix="delaylevel-walk-") as folder:
            found = walk(way, wanted.folder or Path(folder), wanted.pages or PAGES)
        if wanted.screens:
            for step, lines in zip(found.steps, found.outputs, strict=True):
                print("-" * 80, f"[{step.terminal}]", *filter(None, lines), sep="\n")
        if found.seconds > LIMIT_S:
            print(f"more than {LIMIT_S:.0f} s", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
