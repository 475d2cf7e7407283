"""Helpers that the tests of spark process share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Spark takes ten seconds to start on an idle machine, and minutes on a busy one.
PATIENCE_S = 240


Start = Callable[..., Any]


def said(process: Any) -> str:
    return Path(process.log).read_text()


def end(process: Any, seconds: float = PATIENCE_S) -> int:
    try:
        return int(process.wait(seconds))
    except subprocess.TimeoutExpired:
        pytest.fail(f"it did not end within {seconds} s; its log:\n{said(process)}")
