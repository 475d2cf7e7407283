"""Tests of the client's private parts: where they are used, and with which versions."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from delaylevel.cluster.client_parts import TESTED

ROOT = Path(__file__).parents[3]
PLACE = ROOT / "delaylevel" / "cluster" / "client_parts"
#: The in-memory Pulsar stands for the private parts themselves.
IN_MEMORY = ROOT / "delaylevel" / "testing"
#: Attributes of the client's objects.
PRIVATE = {
    *("_client", "_producer", "_consumer", "_reader", "_message", "_schema", "_schema_info"),
    *("_build_msg", "_wrap", "_result", "_msg_id"),
}


def uses(source: str) -> Iterator[str]:
    """Yield each use of a private part of the client, as an attribute, a name or a text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name == "_pulsar")
        elif isinstance(node, ast.ImportFrom) and node.module == "_pulsar":
            yield "_pulsar"
        elif isinstance(node, ast.Attribute) and node.attr in PRIVATE:
            # Classes of ours may have attributes of these names.
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                yield f"line {node.lineno}: {node.attr}"
        elif isinstance(node, ast.Constant) and node.value in PRIVATE:
            yield f"line {node.lineno}: {node.value!r}"
        elif isinstance(node, ast.keyword) and node.arg in PRIVATE:
            yield f"line {node.value.lineno}: {node.arg}="


def test_private_parts_are_used_in_one_place() -> None:
    found = {}
    for folder in ("delaylevel", "functions", "spark_sync", "cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.is_relative_to(PLACE) or path.is_relative_to(IN_MEMORY):
                continue
            if here := list(uses(path.read_text("utf-8"))):
                found[str(path.relative_to(ROOT))] = here
    assert found == {}


def test_the_tested_versions_are_those_of_the_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    required = config["options"]["install_requires"].split()
    (first, *_, last) = (*TESTED, TESTED[-1])
    assert f"pulsar-client>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}" in required


@pytest.mark.parametrize("version", ["3.12.0", "3.14.0", "4.0.0", "3.130.1"])
def test_a_client_that_was_not_tested_is_refused_at_the_import(version: str) -> None:
    answer = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import pulsar; pulsar.__version__ = {version!r}\nfrom delaylevel import wrap",
        ],
        capture_output=True,
        text=True,
    )
    assert answer.returncode
    assert f"PrerequisiteError: pulsar-client {version} is installed" in answer.stderr
    assert "pip install 'pulsar-client>=3.13,<3.14'" in answer.stderr
