"""Tests of the versions of the client whose private parts are used."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

from delaylevel.cluster.client_parts import REQUIRED
from support.python import python

ROOT = Path(__file__).parents[3]
PRIVATE = re.compile(
    r"^(from|import) _pulsar|(?<!self)\._(client|producer|consumer|reader|message|schema"
    r"|schema_info|build_msg|wrap|result|msg_id)\b",
    re.MULTILINE,
)


def test_private_parts_are_used_in_one_place() -> None:
    files = [
        path
        for room in ("delaylevel", "functions", "spark_sync", "cli")
        for path in (ROOT / room).rglob("*.py")
    ]
    used = {path.parent for path in files if PRIVATE.search(path.read_text("utf-8"))}
    # The in-memory Pulsar stands for the private parts themselves.
    used = {path for path in used if not path.is_relative_to(ROOT / "delaylevel" / "testing")}
    assert used == {ROOT / "delaylevel" / "cluster" / "client_parts"}


def test_the_tested_versions_are_those_of_the_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    required = config["options"]["install_requires"].split()
    assert REQUIRED in required


@pytest.mark.parametrize("version", ["3.12.0", "3.14.0", "4.0.0", "3.130.1"])
def test_a_client_that_was_not_tested_is_refused_at_the_import(version: str) -> None:
    program = f"import pulsar; pulsar.__version__ = {version!r}\nfrom delaylevel import wrap"
    answer = python("-c", program)
    assert answer.returncode
    assert f"PrerequisiteError: pulsar-client {version} is installed" in answer.stderr
    assert "pip install 'pulsar-client>=3.13,<3.14'" in answer.stderr
