"""Check of the source distribution and the wheel that is built from it, in a clean environment.

``twine check`` must accept both. The wheel must install exactly one top-level name and run
``delaylevel --version``. ``import delaylevel`` must not import packages that only some users
install, and a part that needs an extra must name it.

With ``--release``, the two are also written to ``dist/``, unless something in them is not ready for
others: addresses of the project that are placeholders, or a version without a date in CHANGELOG.md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")
FOLDERS = ("delaylevel", "functions", "spark_sync", "cli")
TOOLS = ("build>=1.2", "twine>=6.1")
#: Files of packages that are no Python code.
DATA = ("py.typed", "spark_sync/log4j2.properties")
HEAVY = ("pyspark", "numpy", "pyarrow", "duckdb", "pandas")

PROBE = f"""
import sys
from importlib.metadata import distribution
import delaylevel
heavy = sorted(set({HEAVY!r}) & sys.modules.keys())
assert not heavy, f"`import delaylevel` loads {{heavy}}"
files = distribution("delaylevel").files or []
names = sorted({{
    file.parts[0] for file in files
    if not file.parts[0].endswith(".dist-info") and ".." not in file.parts
}})
assert names == ["delaylevel"], f"the wheel installs the top-level names {{names}}"
from delaylevel.errors import MissingExtraError
for name in ("functions", "spark_sync", "cli"):
    try:
        __import__(f"delaylevel.{{name}}")
    except MissingExtraError as error:  # the only accepted error: it must name the extra
        assert "delaylevel[" in str(error), f"delaylevel.{{name}}: {{error}}"
for name in delaylevel.__all__:
    assert name in dir(delaylevel), f"dir(delaylevel) lacks {{name}}"
print("one top-level name, nothing heavy on import, version", delaylevel.__version__)
"""


def unfit(metadata: str, changelog: str) -> list[str]:
    """Return why a package must not be released.

    Args:
        metadata: the metadata of the wheel.
        changelog: the text of CHANGELOG.md.
    """
    found = re.findall(r"^Project-URL: (\w+), (\S+)$", metadata, re.MULTILINE)
    wrong = [f"{name} is a placeholder: {url}" for name, url in found if ".example" in url]
    if not found:
        wrong.append("no address of the project: project_urls in setup.cfg")
    version = re.findall(r"^Version: (\S+)$", metadata, re.MULTILINE)[0]
    if not re.search(rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        wrong.append(f"CHANGELOG.md has no date for {version}")
    return wrong


def run(*command: str | Path, cwd: Path) -> str:
    """Run a program and return its output; print the output and exit if it fails."""
    answer = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if answer.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{answer.stdout}{answer.stderr}")
    return answer.stdout


def main() -> None:
    """Build and check in a temporary directory, unaffected by the working tree's build/."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--release", action="store_true", help="write both to dist/, if fit")
    release = parser.parse_args().release
    with tempfile.TemporaryDirectory(prefix="delaylevel-wheel-") as scratch:
        work = Path(scratch)
        tree = work / "tree"
        tree.mkdir()
        for name in FILES:
            shutil.copy2(ROOT / name, tree / name)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        quiet = ["--disable-pip-version-check", "--quiet"]
        venv.create(work / "tools", with_pip=True)
        python = work / "tools" / "bin" / "python"
        run(python, "-m", "pip", *quiet, "install", *TOOLS, cwd=work)
        # The wheel is built from the unpacked source distribution, so that has every file, too.
        run(python, "-m", "build", "--outdir", work / "dist", tree, cwd=work)
        (source,) = (work / "dist").glob("*.tar.gz")
        (wheel,) = (work / "dist").glob("*.whl")
        run(python, "-m", "twine", "check", "--strict", source, wheel, cwd=work)
        print(f"{source.name} and {wheel.name} pass twine check")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = archive.read(name).decode()
        wrong = unfit(metadata, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
        if release and wrong:
            sys.exit("not fit for a release:\n  " + "\n  ".join(wrong))
        # setup.cfg lists packages by name. If one is not listed, it is missing only from the wheel.
        packed = {name.removeprefix("delaylevel/") for name in zipfile.ZipFile(wheel).namelist()}
        written = {
            str(path.relative_to(tree / "delaylevel" if top == "delaylevel" else tree))
            for top in FOLDERS
            for path in (tree / top).glob("**/*.py")
        }
        written |= set(DATA)
        if written - packed:
            sys.exit(f"{wheel.name} lacks {sorted(written - packed)}: list them in setup.cfg")

        venv.create(work / "clean", with_pip=True)
        python = work / "clean" / "bin" / "python"
        run(python, "-m", "pip", *quiet, "install", wheel, cwd=work)
        print(wheel.name + ":", run(python, "-I", "-c", PROBE, cwd=work).strip())
        print(run(work / "clean" / "bin" / "delaylevel", "--version", cwd=work).strip())
        run(work / "clean" / "bin" / "delaylevel", "--help", cwd=work)
        if release:
            (ROOT / "dist").mkdir(exist_ok=True)
            print(*(shutil.copy2(path, ROOT / "dist") for path in (source, wheel)), sep="\n")


if __name__ == "__main__":
    main()
