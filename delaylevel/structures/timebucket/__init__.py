"""Compact tracker of pending messages by due time."""

from .tracker import TimeBucketTracker

__all__ = ["TimeBucketTracker"]
