"""Tests of the log on stderr as JSON."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from delaylevel.cli.main import cli
from delaylevel.cli.views import logs

JSON = ["--log-format", "json"]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Give the later tests of this process the log of a terminal again."""
    yield
    logs.configure("text", logging.WARNING)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["mover", "run"], 2, "Missing argument"),
        (["levels", "list", "--nope"], 2, "--nope"),
        (["run"], 3, "no broker answers"),
        (["--admin-url", "http://127.0.0.1:1", "levels", "list"], 3, "127.0.0.1:1"),
    ],
)
def test_an_error_is_one_line(arguments: list[str], code: int, reason: str) -> None:
    away = ["--service-url", "pulsar://127.0.0.1:1"]
    result = CliRunner().invoke(cli, [*JSON, *away, *arguments])
    assert result.exit_code == code
    (line,) = lines(result.stderr)
    assert line["level"] == "error"
    assert line["logger"] == "delaylevel.cli"
    assert reason in line["message"]
    assert line["time"].endswith("Z")


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("logging.getLogger('x').warning('hello')", ("warning", "x", "hello")),
        ("raise KeyError('a bug')", ("critical", "delaylevel.cli", "'a bug'")),
        (
            "import threading\nthreading.Thread(target=lambda: {}['a bug']).start()",
            ("critical", "delaylevel.cli", "'a bug'"),
        ),
        ("import warnings\nwarnings.warn('careful')", ("warning", "py.warnings", "careful")),
        (
            "import pulsar\n"
            "from delaylevel.cluster import logs\n"
            "pulsar.Client('pulsar://127.0.0.1:1', logger=logs.for_verbosity(1)).close()",
            ("info", "pulsar", "Closing Pulsar client"),
        ),
    ],
)
def test_everything_on_stderr_is_json(program: str, expected: tuple[str, str, str]) -> None:
    start = "import logging\nfrom delaylevel.cli.views import logs\nlogs.configure('json', 30)\n"
    done = subprocess.run(
        [sys.executable, "-c", start + program], capture_output=True, text=True, check=False
    )
    found = [(line["level"], line["logger"], line["message"]) for line in lines(done.stderr)]
    assert any(
        (level, logger) == expected[:2] and expected[2] in message
        for level, logger, message in found
    ), found
