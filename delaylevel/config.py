"""Alias of :mod:`delaylevel.cluster.connection.settings`."""

from delaylevel.cluster.connection.settings import Connection

__all__ = ["Connection"]
