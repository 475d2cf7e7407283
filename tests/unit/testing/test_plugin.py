"""Tests of the pytest plugin, in projects of their own."""

from __future__ import annotations

import re
from pathlib import Path

from delaylevel.testing import MemoryPulsar
from support.plugin_projects import PLUGIN, REMINDER, installed, run  # noqa: F401

HEAVY = ("pulsar", "_pulsar", "pydantic", "numpy", "urllib3", "delaylevel.testing.pulsar")


def test_the_fixture_of_the_plugin_is_an_in_memory_pulsar(memory_pulsar: MemoryPulsar) -> None:
    assert isinstance(memory_pulsar, MemoryPulsar)
    client = memory_pulsar.client()
    assert client.admin is memory_pulsar.admin


def test_the_entry_point_is_enough(installed: Path, tmp_path: Path) -> None:
    assert "2 passed" in run(tmp_path, REMINDER, path=[installed])


def test_a_project_that_does_not_use_it_imports_next_to_nothing(
    installed: Path, tmp_path: Path
) -> None:
    said = run(
        tmp_path,
        f"""
        import sys

        def test_nothing_heavy_is_loaded():
            ours = {{name for name in sys.modules if name.partition(".")[0] == "delaylevel"}}
            assert ours == {{
                "delaylevel", "delaylevel.errors", "delaylevel.testing",
                "{PLUGIN}",
            }}
            assert not set({HEAVY!r}) & set(sys.modules)
        """,
        # Errors: a warning of pytest about the plugin would show here, too.
        "-W",
        "error",
        path=[installed],
    )
    assert "1 passed" in said, said


def test_a_broker_without_java_skips_the_test_and_fails_it_in_ci(tmp_path: Path) -> None:
    program = """
        def test_on_a_broker(embedded_pulsar):
            assert False, "there is no broker"
    """
    nowhere = {"PATH": str(tmp_path), "JAVA_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    said = run(tmp_path, program, "-p", PLUGIN, "-rs", environ={**nowhere, "CI": ""})
    assert re.search(r"SKIPPED .*needs Java", said), said
    said = run(tmp_path, program, "-p", PLUGIN, environ={**nowhere, "CI": "1"})
    assert "1 error" in said
    assert "The embedded broker needs Java" in said
