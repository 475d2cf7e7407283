"""The walk of a new user with `run`, in the environment of these tests, at any speed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from support.walk import Walk


@pytest.mark.broker
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not ("CI" in os.environ or shutil.which("java")), reason="Java is missing")
def test_a_new_user_gets_delayed_messages(tmp_path: Path) -> None:
    Walk(tmp_path, installed=Path(sys.prefix)).go("run")
