"""Alias of :mod:`delaylevel.cluster.admin`."""

from delaylevel.cluster.admin import Admin

__all__ = ["Admin"]
