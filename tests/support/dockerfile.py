"""The instructions of a Dockerfile, in the small part of its language that ours uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def instructions(path: Path) -> list[tuple[str, Any]]:
    """Return the name and the value of each instruction.

    The value of COPY is a list of words; that of CMD, ENTRYPOINT and HEALTHCHECK is the list of
    arguments; that of others is the text.
    """
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    found: list[tuple[str, Any]] = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, value = line.partition(" ")
        if name in ("CMD", "ENTRYPOINT", "HEALTHCHECK"):
            found.append((name, json.loads(value[value.index("[") :])))
        elif name:
            found.append((name, value.split() if name == "COPY" else value))
    return found
