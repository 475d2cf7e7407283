"""Bytes of pending messages: in memory up to a budget, beyond it in files by due time."""

from .pending import PendingSegments

__all__ = ["PendingSegments"]
