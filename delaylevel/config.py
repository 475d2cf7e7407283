"""Alias of :mod:`delaylevel.cluster.connection`."""

from delaylevel.cluster.connection import Connection

__all__ = ["Connection"]
