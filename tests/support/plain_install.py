"""Commands of ``delaylevel`` as in an install without extras, in a process of their own."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
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


def run(commands: Sequence[Sequence[str]], **options: Any) -> list[tuple[int, str, str]]:
    """Run commands one after another; return exit code, output and traceback of each."""
    from support.python import python  # the process itself has no such package

    given = json.dumps(commands)
    done = python(__file__, input=given, check=True, **options)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def main() -> None:
    from click.testing import CliRunner

    from delaylevel.cli.main import cli

    for words in json.load(sys.stdin):
        result = CliRunner().invoke(cli, words)
        bug = result.exception
        trace = ""
        if bug is not None and not isinstance(bug, SystemExit):
            trace = "".join(traceback.format_exception(bug))
        print(json.dumps([result.exit_code, result.output, trace]), flush=True)


if __name__ == "__main__":
    sys.meta_path.insert(0, Absent())  # type: ignore[arg-type]
    main()
