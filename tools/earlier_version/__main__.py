"""Recorder of level topics and messages that the code of an earlier commit writes.

    python -m tools.earlier_version 9205e8a tests/data/9205e8a.json

It exports the commit, starts a private broker, runs `scenario` with the exported code, and stores
what the broker then has. The file is made once: tests read it, so they need no git history.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

from delaylevel.broker.embedded import EmbeddedBroker

ROOT = Path(__file__).resolve().parents[2]
SCENARIO = Path(__file__).with_name("scenario.py")


def main() -> int:
    """Record the scenario, and return the exit code of the earlier version's process."""
    parser = argparse.ArgumentParser(description="Record what an earlier version writes.")
    parser.add_argument("commit", help="Commit of the earlier version.")
    parser.add_argument("output", type=Path, help="File to write.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "code"
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", given.commit], check=True, stdout=subprocess.PIPE
        ).stdout
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(code, filter="data")
        broker = EmbeddedBroker(
            "earlier-version", directory=Path(folder) / "broker", follow_parent=True
        )
        try:
            broker.start()
            connection = broker.connection
            command = [sys.executable, str(SCENARIO), str(code), given.commit]
            command += [connection.service_url, connection.admin_url, str(given.output.resolve())]
            # The installed package must not be found before the exported one.
            environment = {**os.environ, "PYTHONPATH": str(code)}
            return subprocess.run(command, cwd=code, env=environment, check=False).returncode
        finally:
            broker.remove()


if __name__ == "__main__":
    sys.exit(main())
