"""Distribution of the tests over several processes (pytest-xdist).

All processes share one broker with the usual settings (see ``shared_broker``). Each has its own
brokers with other settings, and its own copy of every other session fixture. Tests of one group
run in one process, one after another. A group is a file, or one of ``GROUPS``.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Groups of files, by the begin of their paths, in the order in which they start: long ones first,
# so that the processes end at about the same time.
GROUPS = {
    # A Spark job uses all processors: two at a time would delay each other. Spark fails if one of
    # its Python processes takes more than ten seconds to start.
    "spark": ("integration/test_spark",),
    # These share a broker with a functions worker.
    "functions": ("integration/functions/",),
}
_ORDER = (*GROUPS, "docs/test_walk", "integration/", "contract/", "docs/", "unit/")


def group(node_id: str) -> str:
    file = node_id.partition("::")[0].removeprefix("tests/")
    return next((name for name, starts in GROUPS.items() if file.startswith(starts)), file)


def rank(item: pytest.Item) -> int:
    """Return the place of a test's group in the order of the start."""
    name = group(item.nodeid)
    return next((place for place, start in enumerate(_ORDER) if name.startswith(start)), 0)


class GroupScheduling(LoadScopeScheduling):
    """A scheduler that gives the next group to the process that has the least to do."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        # Keep the order of the items; by default, groups with many tests come first.
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)
