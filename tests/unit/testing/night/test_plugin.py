"""Further ways to use the pytest plugin, or not."""

from __future__ import annotations

from pathlib import Path

from support.plugin_projects import PLUGIN, REMINDER, installed, run  # noqa: F401


def test_the_option_is_enough(tmp_path: Path) -> None:
    assert "2 passed" in run(tmp_path, REMINDER, "-p", PLUGIN)


def test_the_entry_point_and_the_option_do_not_collide(installed: Path, tmp_path: Path) -> None:
    assert "2 passed" in run(tmp_path, REMINDER, "-p", PLUGIN, path=[installed])
    (tmp_path / "project" / "conftest.py").write_text(f"pytest_plugins = [{PLUGIN!r}]\n")
    assert "2 passed" in run(tmp_path, REMINDER, "-p", PLUGIN, path=[installed])


def test_it_can_be_turned_off(installed: Path, tmp_path: Path) -> None:
    said = run(tmp_path, REMINDER, "-p", f"no:{PLUGIN}", path=[installed])
    assert "fixture 'memory_pulsar' not found" in said
