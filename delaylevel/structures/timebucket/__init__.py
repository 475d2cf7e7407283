"""Tracker of pending messages by due time: ten million in a few megabytes."""

from .tracker import TimeBucketTracker

__all__ = ["TimeBucketTracker"]
