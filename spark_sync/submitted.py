"""The program that ``spark-submit`` runs: the ``delaylevel`` command itself."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this file's folder first on its path, but its modules are not top-level ones.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    from delaylevel.cli.main import main

    main()
