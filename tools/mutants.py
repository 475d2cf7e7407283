"""Break important lines of the product, one at a time, and report which tests notice.

    tools/mutants.py                       all mutants: their own tests first, then the quick tier
    tools/mutants.py listener order        only those with such a text in their name or kind
    tools/mutants.py --tier own            only the tests that should notice first
    tools/mutants.py --tier broker         also the tests on a broker, which take long

``mutants.toml`` has the list. A line is found by its text, wherever it stands: a list survives
modules that are moved, and an entry whose text is not there exactly once is reported. Everything
happens in a copy of the tree, and the copy is tested once without a mutant.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".toml")
FOLDERS = {"functions": "functions", "spark_sync": "spark_sync", "cli": "cli"}
OWN, QUICK, BROKER = TIERS = ("own", "quick", "broker")
SURVIVED = "SURVIVED"


class Mutant(NamedTuple):
    """A broken line, the promise (``kind``) that it breaks, and tests that should notice first.

    No test can notice one that is ``equivalent``, for this reason.
    """

    name: str
    kind: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...] = ()
    equivalent: str = ""


class Result(NamedTuple):
    """The result of a mutant."""

    mutant: Mutant
    tier: str  # that notices, or SURVIVED
    test: str
    seconds: float


def main() -> int:
    """Run the chosen mutants; return 1 if one survives that should not, 2 if the list is wrong."""
    options = _options()
    with LIST.open("rb") as file:
        content = tomllib.load(file)
    every = [_mutant(each) for each in content["mutant"]]
    chosen = [each for each in every if _is_chosen(each, options.names)]
    places, problems = locate(chosen, ROOT)
    for problem in problems:
        print(problem, file=sys.stderr)
    if options.list:
        for each in chosen:
            print(f"{each.name:44} {each.kind:18} {each.why}")
        return 2 if problems else 0
    chosen = [each for each in chosen if each.name in places]
    tiers = TIERS[: TIERS.index(options.tier) + 1]
    results: list[Result] = []
    with _copy(ROOT) as copy:
        runner = Runner(copy, content["tiers"], options.workers, options.limit_s)
        if not options.no_baseline and not runner.check(chosen, tiers):
            return 2
        for number, mutant in enumerate(chosen, 1):
            results.append(runner.run(mutant, places[mutant.name], tiers))
            print(f"{number}/{len(chosen)} {_line(results[-1])}", flush=True)
    print("\n" + table(results))
    if problems:
        return 2
    return int(any(each.tier == SURVIVED and not each.mutant.equivalent for each in results))


def locate(mutants: Iterable[Mutant], root: Path) -> tuple[dict[str, tuple[Path, str]], list[str]]:
    """Return the place of each mutant by its name, and a sentence for each without one."""
    texts = {path: path.read_text(encoding="utf-8") for path in product_files(root)}
    places: dict[str, tuple[Path, str]] = {}
    problems: list[str] = []
    for mutant in mutants:
        pattern = _pattern(mutant.old)
        found = [(path, hit) for path, text in texts.items() for hit in pattern.finditer(text)]
        if len(found) != 1:
            where = ", ".join(sorted({str(path.relative_to(root)) for path, _ in found}))
            problems.append(
                f"{mutant.name}: its text is there {len(found)} times"
                + (f" ({where})" if where else ": was the line changed? Write its new text")
            )
            continue
        missing = [test for test in mutant.tests if not (root / test.partition("::")[0]).exists()]
        if missing:
            problems.append(f"{mutant.name}: where is {', '.join(missing)}? Name tests that exist")
        ((path, hit),) = found
        new = textwrap.indent(mutant.new, hit.groupdict().get("indent") or "")
        text = texts[path]
        changed = text[: hit.start()] + new + text[hit.end() :]
        places[mutant.name] = path.relative_to(root), changed
    return places, problems


def product_files(root: Path) -> Iterator[Path]:
    """Yield the modules of the product."""
    for folder in ("delaylevel", *FOLDERS.values()):
        for path in sorted((root / folder).rglob("*.py")):
            if not any(part.is_symlink() for part in path.parents):
                yield path


def _pattern(old: str) -> re.Pattern[str]:
    """Return a pattern for a text; several lines may be indented as a whole."""
    lines = old.split("\n")
    if len(lines) == 1:
        return re.compile(re.escape(old))
    whole = "\n".join(f"(?P=indent){re.escape(line)}" if line else "" for line in lines)
    return re.compile(whole.replace("(?P=indent)", "^(?P<indent>[ ]*)", 1), re.MULTILINE)


class Runner:
    """Runs tests in a copy of the tree; a run that takes longer than a limit counts as failed."""

    def __init__(
        self, copy: Path, tiers: dict[str, list[str]], workers: int, limit_s: float
    ) -> None:
        self._copy, self._tiers = copy, tiers
        self._workers, self._limit_s = workers, limit_s
        self._deselected: list[str] = []

    def check(self, mutants: Iterable[Mutant], tiers: Sequence[str]) -> bool:
        """Run everything without a mutant; what fails is left out, if it is little."""
        own = sorted({test for mutant in mutants for test in mutant.tests})
        for tier in tiers:
            failed, output = self._pytest(tier, own, first=False)
            failed = [test for test in failed if test]
            if len(failed) > 5 or (not failed and output):
                print(output, file=sys.stderr)
                return False
            for test in failed:
                print(f"left out, because it fails without a mutant: {test}", file=sys.stderr)
                self._deselected += ["--deselect", test]
        return True

    def run(self, mutant: Mutant, place: tuple[Path, str], tiers: Sequence[str]) -> Result:
        """Run the tests with a mutant, tier by tier, up to the first failure."""
        path, text = self._copy / place[0], place[1]
        before, start_s = path.read_text(encoding="utf-8"), time.monotonic()
        self._write(path, text)
        try:
            for tier in tiers:
                if tier == OWN and not mutant.tests:
                    continue
                failed, _ = self._pytest(tier, mutant.tests, first=True)
                if failed:
                    return Result(mutant, tier, failed[0], time.monotonic() - start_s)
        finally:
            self._write(path, before)
        return Result(mutant, SURVIVED, "", time.monotonic() - start_s)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()  # its time and size may be those of the text before

    def _pytest(self, tier: str, own: Sequence[str], first: bool) -> tuple[list[str], str]:
        """Run a tier; return the tests that fail, and the end of the output if there are any."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
        command += ["--durations=0", "-rfE", *self._deselected, *(["-x"] if first else [])]
        if tier == OWN:
            command += own
        else:
            command += [*self._tiers[tier], *(["-n", str(self._workers)] if self._workers else [])]
        # The tests of the copy see its modules, not those that are installed.
        environment = {**os.environ, "PYTHONPATH": str(self._copy), "COLUMNS": "300"}
        process = subprocess.Popen(
            command,
            cwd=self._copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        limit_s = self._limit_s * (1 if first and tier == OWN else 8)
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return [f"(no end within {limit_s:.0f} s)"], ""
        if process.returncode in (0, 5):
            return [], ""
        found = re.findall(r"^(?:FAILED|ERROR) (\S+(?: [^-]\S*)*)", output, re.MULTILINE)
        return found or [f"(exit code {process.returncode})"], output[-3000:]


@contextmanager
def _copy(root: Path) -> Iterator[Path]:
    """Make a copy of the tree as it stands, without what git ignores."""
    with tempfile.TemporaryDirectory(prefix="delaylevel-mutants-") as name:
        copy = Path(name)
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
        for each in filter(None, listed.stdout.split("\0")):
            if (root / each).is_file():
                (copy / each).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / each, copy / each)
        for package, folder in FOLDERS.items():  # as the package is installed
            (copy / "delaylevel" / package).symlink_to(Path("..", folder))
        yield copy


def table(results: Sequence[Result]) -> str:
    """Return the results, and the number of mutants that each tier has noticed."""
    lines = [_line(each) for each in results]
    counts = [f"{sum(each.tier == tier for each in results)} {tier}" for tier in (*TIERS, SURVIVED)]
    return "\n".join([*lines, "", f"{len(results)} mutants: {', '.join(counts)}"])


def _line(result: Result) -> str:
    mutant = result.mutant
    note = f"equivalent: {mutant.equivalent}" if mutant.equivalent else result.test
    return f"{mutant.name:44} {mutant.kind:18} {result.tier:9} {result.seconds:5.0f} s  {note}"


def _mutant(data: dict[str, Any]) -> Mutant:
    texts = {name: data[name].strip("\n") for name in ("old", "new")}
    return Mutant(**{**data, **texts, "tests": tuple(data.get("tests", ()))})


def _is_chosen(mutant: Mutant, names: Sequence[str]) -> bool:
    return not names or any(name in mutant.name or name in mutant.kind for name in names)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("names", nargs="*", help="parts of names or kinds; all mutants by default")
    add("--tier", choices=TIERS, default=QUICK, help="the last tier to run")
    add("--list", action="store_true", help="list the mutants, and check the list")
    add("--no-baseline", action="store_true", help="do not test without a mutant")
    add("--workers", type=int, default=2, help="processes of the later tiers")
    add("--limit-s", type=float, default=600.0, help="limit of the first tier, s")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
