"""The ``delaylevel`` program as in an install without extras, for tests in a process of their own.

It takes the arguments of the program, or ``--each`` and lines of JSON arrays on stdin: then it runs
all these commands, and prints a line of JSON for each of them.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

#: The top-level modules of the distributions that only extras install.
OPTIONAL = (
    *("bookkeeper", "duckdb", "fastavro", "google", "grpc", "numpy", "pandas"),
    *("prometheus_client", "py4j", "pyarrow", "pyroaring", "pyspark", "ratelimit", "rich"),
    "zstandard",
)


class Absent:
    """An import hook that finds no optional module."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in OPTIONAL:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def each() -> None:
    """Run the commands on stdin."""
    from click.testing import CliRunner

    from delaylevel.cli.main import cli

    for line in sys.stdin:
        result = CliRunner().invoke(cli, json.loads(line))
        bug = result.exception
        trace = ""
        if bug is not None and not isinstance(bug, SystemExit):
            trace = "".join(traceback.format_exception(bug))
        print(json.dumps([result.exit_code, result.output, trace]), flush=True)


if __name__ == "__main__":
    sys.meta_path.insert(0, Absent())  # type: ignore[arg-type]
    if sys.argv[1:] == ["--each"]:
        each()
    else:
        from delaylevel.cli.main import main

        main()
