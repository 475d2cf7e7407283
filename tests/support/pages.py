"""The fenced blocks of the documentation pages, and the comparison of output with them.

The info string of a fence has options for its block:

``no-run: reason``  the block cannot run in a test
``exits-N``         its commands exit with this code
``stopped``         programs that run until Ctrl-C are stopped first (such commands are known)
``with-broker``     Python that needs a broker; the blocks of a page share their names. A block that
                    begins with ``# some/file.py`` is written to that file
``background``      Python that needs a broker and runs until Ctrl-C, while later blocks run
``needs-NAME``      Python that runs where the package NAME is installed (test_pages.py)
``walked``          a step of a new user: test_walk.py types it (`walk` has more such options)
``pytest``          a file of a project, ``# some/file.py``, whose tests test_pages.py runs

``sh`` blocks are commands. In ``console`` blocks commands begin with ``$``, and the lines below a
command must be in its output (``...`` for omitted text).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
KINDS = {"sh", "console", "python", "java", "text", "yaml"}
OPTION = re.compile(
    r"exits-\d|background|stopped|with-broker|pytest|needs-\w+|walked|terminal-\d|with-(run|spark)"
)
FOREVER = re.compile(r"delaylevel ((-v )?mover run|(dispatcher )?run)\b(?!.*--once)")
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


class Block(NamedTuple):
    kind: str
    options: str
    reason: str
    code: str
    line: int

    @property
    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """The commands of a shell block, each with the output lines shown below it."""
        lines = self.code.replace("\\\n", " ").splitlines()
        if self.kind == "sh":
            script = any(line.startswith(("export ", ". ", "cd ")) for line in lines)
            yield from ((line, []) for line in ([self.code] if script else lines))
            return
        found: list[tuple[str, list[str]]] = []
        for line in lines:
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif line.strip() not in ("", "..."):
                found[-1][1].append(line)
        yield from found

    @property
    def words(self) -> list[str]:
        return self.options.split()

    @property
    def runs(self) -> bool:
        """True for a block that runs page by page and needs a broker."""
        return not (self.reason or "walked" in self.words) and bool(
            self.kind in ("sh", "console")
            or (self.kind == "python" and re.search("with-broker|background", self.options))
        )


def blocks(page: Path) -> list[Block]:
    return blocks_of(page.read_text(encoding="utf-8"))


def blocks_of(text: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(text):
        info, _, reason = match["info"].partition("no-run: ")
        kind, _, options = info.strip().partition(" ")
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(kind, options, reason, match["code"], line))
    return found


PAGES = {
    str(page.relative_to(ROOT)): blocks(page)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}


def bare(line: str) -> str:
    """Return a command without its comment."""
    return re.sub(r"\s+#.*", "", line)


def missing(shown: Iterable[str], output: Iterable[str], *, any_numbers: bool = False) -> list[str]:
    """Return the lines shown on a page that were not printed; columns may be wider.

    `` ...`` stands for any end of a line. With ``any_numbers``, numbers such as times may differ.
    """

    def plain(line: str) -> str:
        line = " ".join(line.split())
        return _NUMBER.sub("0", line) if any_numbers else line

    printed = [plain(line) for line in output]
    absent = []
    for line in shown:
        wanted, cut, _ = plain(line).partition(" ...")
        if not any(text == wanted or (cut and text.startswith(wanted)) for text in printed):
            absent.append(wanted)
    return absent
