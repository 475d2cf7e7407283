"""Run mypy over the package as it is installed.

``setup.cfg`` maps the top-level folders into one package, which mypy cannot follow. The script
creates a tree of links with the installed layout under ``build/``, and runs mypy on it.
"""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Create the links, run mypy, and return its exit code."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = config["options"]["package_dir"].strip().splitlines()
    folders = dict(map(str.strip, line.split("=")) for line in lines)

    tree = ROOT / "build" / "types"
    shutil.rmtree(tree, ignore_errors=True)
    top = tree / "delaylevel"
    top.mkdir(parents=True)
    for path in (ROOT / folders.pop("delaylevel")).iterdir():
        if path.name != "__pycache__":
            (top / path.name).symlink_to(path)
    for package, folder in folders.items():
        (tree / package.replace(".", "/")).symlink_to(ROOT / folder)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), "-p", "delaylevel", *sys.argv[1:]]
    return subprocess.run(command, cwd=tree, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
