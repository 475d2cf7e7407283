"""Tests of the pytest plugin, in projects of their own."""

from __future__ import annotations

import configparser
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import delaylevel
from support.python import python

ROOT = Path(delaylevel.__file__).parents[1]

PLUGIN = "delaylevel.testing.plugin"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the metadata of an installed distribution: pytest finds the entry point."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    entry = config["options.entry_points"]["pytest11"].strip()
    folder = tmp_path / "site" / "delaylevel_plugin-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: delaylevel-plugin\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(f"[pytest11]\n{entry}\n")
    (folder / "RECORD").write_text("delaylevel/__init__.py,,\ndelaylevel/testing/plugin.py,,\n")
    return folder.parent


def run(
    folder: Path,
    program: str,
    *arguments: str,
    path: Sequence[Path] = (),
    environ: Mapping[str, str] | None = None,
) -> str:
    """Run a test module in a project of its own, in another process; return the output."""
    project = folder / "project"
    project.mkdir(exist_ok=True)
    (project / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers --strict-config\n")
    (project / "test_it.py").write_text(textwrap.dedent(program))
    variables = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, path))
    words = "-m", "pytest", "-p", "no:cacheprovider", "-v", *arguments
    done = python(*words, cwd=project, env={**variables, **(environ or {})})
    return done.stdout + done.stderr


REMINDER = """
    from datetime import timedelta

    def test_a_reminder_comes_three_days_later(memory_pulsar):
        producer = memory_pulsar.client().create_producer(
            "reminders", enable_delay_level_topic=True
        )
        producer.send(b"call Ada", deliver_after=timedelta(days=3))
        assert memory_pulsar.delivered("reminders") == []
        memory_pulsar.advance(timedelta(days=3))
        assert [message.data for message in memory_pulsar.delivered("reminders")] == [b"call Ada"]

    def test_every_test_has_its_own(memory_pulsar):
        assert memory_pulsar._broker.level_topics() == []
"""
HEAVY = ("pulsar", "_pulsar", "pydantic", "numpy", "urllib3", "delaylevel.testing.pulsar")


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
