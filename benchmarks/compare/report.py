"""Results: a small JSON file with one row for each system and load."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Results that docs/comparison.md shows.
PUBLISHED = Path(__file__).with_name("results.json")


def load(path: Path) -> dict[str, Any]:
    """Return the results in a file; without the file, results without rows."""
    if not path.exists():
        return {"machine": {}, "systems": {}, "rows": []}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def add(
    results: Mapping[str, Any], system: Mapping[str, str], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return results with the rows of a system, which replace earlier ones of the same loads.

    Args:
        results: earlier results.
        system: ``name``, ``title``, ``version`` and ``settings`` of the system.
        rows: new rows of this system.
    """
    name = system["name"]
    new = {row["load"] for row in rows}
    kept = [row for row in results["rows"] if row["system"] != name or row["load"] not in new]
    kernel = ".".join(platform.release().split(".")[:2])
    machine = {
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {kernel}, {platform.machine()}",
        "python": platform.python_version(),
    }
    details = {key: text for key, text in system.items() if key != "name"}
    return {
        "machine": machine,
        "systems": {**results["systems"], name: details},
        "rows": [*kept, *rows],
    }


def save(results: Mapping[str, Any], path: Path) -> None:
    """Write results to a file, one row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join("  " + json.dumps(row) for row in results["rows"])
    head = json.dumps({key: results[key] for key in ("machine", "systems")}, indent=1)
    path.write_text(f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n', encoding="utf-8")
