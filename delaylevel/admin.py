"""Alias of :mod:`delaylevel.cluster.admin`."""

from delaylevel.cluster.admin import Admin
from delaylevel.cluster.http import RestOptions

__all__ = ["Admin", "RestOptions"]
