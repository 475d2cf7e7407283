"""The ``delaylevel`` program as in an install without extras, for tests in a process of their own.

It takes the arguments of the program, or ``--each`` and lines of JSON arrays on stdin: then it runs
all these commands, and prints a line of JSON for each of them. From the line ``["--extras", "a"]``
on, the extra ``a`` is installed, too.
"""

from __future__ import annotations

import configparser
import json
import re
import sys
import traceback
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

#: The top-level modules of the distributions that only extras install.
OPTIONAL = (
    *("bookkeeper", "duckdb", "fastavro", "google", "grpc", "numpy", "pandas"),
    *("prometheus_client", "py4j", "pyarrow", "pyroaring", "pyspark", "ratelimit", "rich"),
    "zstandard",
)


class Absent:
    """An import hook that finds no optional module.

    Attributes:
        absent: the optional modules.
    """

    def __init__(self) -> None:
        self.absent = set(OPTIONAL)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in self.absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def modules_of(extras: Iterable[str]) -> set[str]:
    """Return the top-level modules of the distributions that extras of this package install."""
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg", encoding="utf-8")
    left = [
        line
        for extra in extras
        for line in setup["options.extras_require"][extra].splitlines()
        if line.strip() and not line.startswith("#")
    ]
    found: set[str] = set()
    while left:
        line = left.pop()
        name = re.split(r"[^\w.-]", line.strip(), maxsplit=1)[0].lower().replace("_", "-")
        if name and name not in found and "extra ==" not in line:
            found.add(name)
            try:
                left += metadata.requires(name) or []
            except metadata.PackageNotFoundError:  # for another platform
                continue
    return {
        module
        for module, names in metadata.packages_distributions().items()
        if any(name.lower().replace("_", "-") in found for name in names)
    }


def each(hook: Absent) -> None:
    """Run the commands on stdin."""
    from click.testing import CliRunner

    from delaylevel.cli.main import cli

    for line in sys.stdin:
        words = json.loads(line)
        if words[0] == "--extras":
            hook.absent -= modules_of(words[1:])
            continue
        result = CliRunner().invoke(cli, words)
        bug = result.exception
        trace = ""
        if bug is not None and not isinstance(bug, SystemExit):
            trace = "".join(traceback.format_exception(bug))
        print(json.dumps([result.exit_code, result.output, trace]), flush=True)


if __name__ == "__main__":
    absent = Absent()
    sys.meta_path.insert(0, absent)  # type: ignore[arg-type]
    if sys.argv[1:] == ["--each"]:
        each(absent)
    else:
        from delaylevel.cli.main import main

        main()
