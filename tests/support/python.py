"""Python in another process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def python(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with a command line, for example ``-c`` and a program; return what it printed."""
    given = {"capture_output": True, "text": True, "timeout": 120, "check": False, **options}
    return subprocess.run([sys.executable, *words], **given)
