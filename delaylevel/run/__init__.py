"""Mover and dispatcher in one service, without Spark: what ``delaylevel run`` runs."""

from __future__ import annotations

from .service import LocalService

__all__ = ["LocalService"]
