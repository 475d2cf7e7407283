"""Level topics on a broker: create, find, describe, expand and delete them."""

from .registry import FoundLevelTopic, create, describe, find, list_level_topics, notes

__all__ = ["FoundLevelTopic", "create", "describe", "find", "list_level_topics", "notes"]
