"""The files in examples/ work as their own tests say, as a reader runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tests_of_the_examples_pass(tmp_path: Path) -> None:
    for name in ("CONFIG", "STATE", "CACHE"):
        (tmp_path / name).mkdir()
    homes = {f"XDG_{name}_HOME": str(tmp_path / name) for name in ("CONFIG", "STATE", "CACHE")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "examples"],
        cwd=ROOT,
        env={**os.environ, **homes, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    written = sum(path.read_text().count("def test_") for path in ROOT.glob("examples/test_*.py"))
    assert written >= 3
    assert f"{written} passed" in done.stdout, done.stdout


def test_every_example_is_tested() -> None:
    tests = [*ROOT.glob("examples/test_*.py"), *ROOT.glob("tests/**/test_*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in tests)
    untested = [
        path.name
        for path in ROOT.glob("examples/*.py")
        if not path.name.startswith("test_") and path.stem not in text
    ]
    assert untested == []
    assert "](examples/)" in (ROOT / "README.md").read_text(encoding="utf-8")
