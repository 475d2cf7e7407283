"""Level topics on a broker: create, find, describe, expand and delete them."""

from .members import check_same
from .registry import FoundLevelTopic, create, describe, find, list_level_topics, notes

__all__ = [
    "FoundLevelTopic",
    "check_same",
    "create",
    "describe",
    "find",
    "list_level_topics",
    "notes",
]
