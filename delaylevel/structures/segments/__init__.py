"""Payloads of pending messages: in memory up to a budget, then in files by due time."""

from .pending import PendingSegments

__all__ = ["PendingSegments"]
