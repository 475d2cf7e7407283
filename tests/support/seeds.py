"""Seeds of searches: always the same by day, new ones at night.

``DELAYLEVEL_TEST_SEARCH=5`` makes each search five times as long, and ``DELAYLEVEL_TEST_SEED=…``
moves its seeds. A seed that finds something becomes a case of its own in the test.
"""

from __future__ import annotations

import os

#: How many times as long searches are as by day.
SEARCH = int(os.environ.get("DELAYLEVEL_TEST_SEARCH", "1"))
_FIRST = int(os.environ.get("DELAYLEVEL_TEST_SEED", "0"))


def seeds(count: int) -> range:
    """Return the seeds of a search.

    Args:
        count: their number by day.
    """
    return range(_FIRST, _FIRST + count * SEARCH)
