"""Seeds and examples of searches: always the same by day, new ones at night.

``DELAYLEVEL_TEST_SEARCH=5`` makes each search five times as long, and ``DELAYLEVEL_TEST_SEED=…``
moves its seeds. A seed that finds something becomes a case of its own in the test.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

#: How many times as long searches are as by day.
SEARCH = int(os.environ.get("DELAYLEVEL_TEST_SEARCH", "1"))
_FIRST = int(os.environ.get("DELAYLEVEL_TEST_SEED", "0"))
_BY_DAY = SEARCH == 1


def seeds(count: int) -> range:
    """Return the seeds of a search, by their number by day."""
    return range(_FIRST, _FIRST + count * SEARCH)


def examples(count: int, **options: Any) -> settings:
    """Return the settings of a test by hypothesis, by the number of its examples by day."""
    return settings(
        max_examples=count * SEARCH, deadline=None, derandomize=_BY_DAY, database=None, **options
    )
